"""The part of a spot trace that Lazarus is judged on (arXiv 2407.04656, section 6.4), and how.

The paper says that four nodes are lost at minute 34: so it is in the first 80 minutes of Bamboo's
trace of AWS P3 instances. How it caps the 18 to 32 nodes of the trace at 10 it does not say. Here
ten are in use from the first minute, those four among them and the others drawn; whoever comes
while there is room joins.
"""

import argparse
import random
from pathlib import Path

from megatron_resilient.errors import TraceError
from megatron_resilient.simulation.failures import draw_failures
from megatron_resilient.simulation.trace import NodeEvent, Trace
from megatron_resilient.simulation.trace_files import read_trace
from tools.reproduce.figure import ROOT

MINUTES = 80
PLACES = 10
BURST_MINUTE = 34
# Samples of Lazarus over those of a baseline, by model.
PAPER_RATIOS = {"GPT-S": {"DS": 2.3, "DS(FT)": 1.2}, "GPT-L": {"DS": 3.4, "DS(FT)": 1.8}}


def default_trace() -> Path | None:
    """Returns Bamboo's P3 trace where it lies beside a checkout, else None."""
    path = ROOT.parent / "shared" / "data" / "bamboo" / "p3-trace.csv"
    return path if path.is_file() else None


def add_trace_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--trace`; None where none is given and Bamboo's is not there."""
    parser.add_argument(
        "--trace", type=trace_file, default=default_trace(), help="default: Bamboo's, if there"
    )


def trace_file(text: str) -> Path:
    """The type of a flag that names a trace: one that cannot be read is refused at once."""
    try:
        read_trace(text)
    except TraceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return Path(text)


def ten_of(trace: Trace, seed: int) -> Trace:
    """Returns the trace as ten places see it, that any newcomer takes if one is free."""
    burst = {
        node
        for change in trace.changes
        if change.seconds == 60 * BURST_MINUTE
        for node in change.lost
    }
    # Those of the burst who come later than the start keep a place free.
    first = [node for node in trace.start if node in burst]
    others = [node for node in trace.start if node not in burst]
    first += random.Random(seed).sample(others, max(0, min(PLACES - len(burst), len(others))))
    places, missing = set(first), burst.difference(first)
    events = [NodeEvent(0.0, "add", node) for node in first]
    for event in trace.events():
        if event.seconds == 0:
            continue
        if event.kind != "add":
            if event.node in places:
                places.remove(event.node)
                events.append(event)
        elif event.node in missing or len(places) + len(missing) < PLACES:
            missing.discard(event.node)
            places.add(event.node)
            events.append(event)
    return Trace.of(events, trace.seconds, trace.source)


def spot_traces(path: Path | None, draws: int) -> list[Trace]:
    """Returns the 80 minutes as ten places see them, for each draw; without a file, drawn ones."""
    if path:
        whole = read_trace(path).window(0.0, 60 * MINUTES)
        return [ten_of(whole, seed) for seed in range(draws)]
    return [
        draw_failures(
            PLACES, 8 * 60, 60 * MINUTES, seed=seed, repair_seconds=600, nodes_per_failure=1.5
        )
        for seed in range(draws)
    ]
