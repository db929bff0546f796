"""What tests read of a run's record."""

from pathlib import Path

from megatron_resilient.telemetry import Event, read_events


def events_of(run_dir: Path, kind: str) -> list[Event]:
    """Returns the run's events of one kind, in the order in which they were written."""
    return [event for event in read_events(run_dir) if event["event"] == kind]
