"""What a run tells about itself: `events.jsonl`, one event a line, and `summary.json` made of it.

Standard library only: agents, the coordinator and the command line use it without torch.
The kinds of events and their fields are in `docs/telemetry.md`.
"""

from megatron_resilient.telemetry.kinds import COMMON, KINDS, EventKind, Field
from megatron_resilient.telemetry.log import EVENTS_FILE, EventLog
from megatron_resilient.telemetry.reader import Event, read_events
from megatron_resilient.telemetry.summary import SUMMARY_FILE, RunSummary, write_summary
from megatron_resilient.telemetry.values import number

__all__ = [
    "COMMON",
    "EVENTS_FILE",
    "KINDS",
    "SUMMARY_FILE",
    "Event",
    "EventKind",
    "EventLog",
    "Field",
    "RunSummary",
    "number",
    "read_events",
    "write_summary",
]
