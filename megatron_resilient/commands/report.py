"""Makes one self-contained HTML page of a run.

It shows loss, throughput, expert load, members, recoveries, checkpoints and errors.
"""

import argparse
import importlib.util
import json
from pathlib import Path

from megatron_resilient.errors import ConfigError, TelemetryError

HELP = "one HTML page with plots of a run: loss, speed, loads, members, recoveries, checkpoints"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    parser.add_argument(
        "--output", metavar="FILE.html", type=Path, help="default: RUN_DIR/report.html"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the path of the page and the summary as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page, in one piece.

    Raises:
        ConfigError: A package is missing, or the page cannot be written there.
        TelemetryError: The run has no events, or they cannot be read.
    """
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the report needs {' and '.join(missing)}; "
            "install with: pip install 'megatron-resilient[tools]'"
        )
    output: Path = args.output or args.run_dir / "report.html"
    if args.output and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: {output.parent} is no directory; make it first")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a directory; name a file in it")

    from megatron_resilient.report.page import build_page
    from megatron_resilient.report.run import Run
    from megatron_resilient.telemetry import EVENTS_FILE, read_events
    from megatron_resilient.telemetry.atomic import write_text_atomically

    events = read_events(args.run_dir)
    if not events:
        raise TelemetryError(
            f"{args.run_dir / EVENTS_FILE}: holds no events yet; wait until the run has started"
        )
    whole = Run.of(str(args.run_dir), events)
    write_text_atomically(output, build_page(whole))
    summary = whole.summary
    if args.json:
        print(json.dumps({"report": str(output), **summary.to_json()}, allow_nan=False))
    else:
        print(
            f"{output}: {len(events):,} events, {summary.steps:,} steps, "
            f"{len(summary.recoveries):,} recoveries, {len(summary.errors):,} errors"
        )
    return 0
