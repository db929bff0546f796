"""Says how an elastic job is: its members, step, speed, and what it could lose now."""

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from megatron_resilient.commands.leave import add_coordinator_flags

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "show the members and the state of an elastic job"
_WIDTH_OF_FILES = 120


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_coordinator_flags(parser)
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="go on and show it anew every so many seconds (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the coordinator answered."""
    from rich.console import Console

    from megatron_resilient.elastic.messages import StatusQuery
    from megatron_resilient.elastic.protocol import read_token
    from megatron_resilient.elastic.query import ask
    from megatron_resilient.errors import ConfigError

    if args.watch is not None and (args.json or not args.watch > 0):
        raise ConfigError("--watch needs a positive number of seconds, and goes without --json")
    token = read_token(path=args.token_file)

    def now() -> dict[str, Any]:
        return ask(args.coordinator, token, StatusQuery())

    if args.json:
        print(json.dumps(now(), indent=2))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_FILES)
    if args.watch is None:
        console.print(render(now()))
        return 0
    from rich.live import Live

    try:
        with Live(render(now()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(args.watch)
                live.update(render(now()), refresh=True)
    except KeyboardInterrupt:
        return 0


def render(status: dict[str, Any]) -> "RenderableType":
    """Returns what people see of the coordinator's answer."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in _facts(status):
        facts.add_row(name, Text(value))
    nodes = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("node", "is", "ranks", "pids", "agent"):
        nodes.add_column(heading)
    for heading in ("step", "heard of"):
        nodes.add_column(heading, justify="right")
    for node in status["nodes"]:
        nodes.add_row(
            Text(node["node"]),
            node["role"] + (", slow" if node["straggler"] else ""),
            _list(node["ranks"]),
            _list(node["pids"]),
            _value(node["agent_pid"]),
            _value(node["step"]),
            _value(node["silent_seconds"], "{:.1f} s ago"),
        )
    return Group(facts, "", nodes)


def _facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    waiting = [node["node"] for node in status["nodes"] if node["role"] in ("joining", "starting")]
    spares = [node["node"] for node in status["nodes"] if node["role"] == "spare"]
    return [
        ("phase", status["phase"]),
        ("generation", f"{status['generation']}, {status['world_size']} ranks"),
        ("step", _value(status["step"])),
        ("tokens/s", _value(status["tokens_per_second"], "{:,.0f}")),
        ("expert imbalance", _value(status["imbalance"], "{:.2f} max/mean")),
        ("survives now", _value(status["guaranteed_losses"], "any {} nodes lost at once")),
        ("joining", _list(waiting)),
        ("spare", _list(spares)),
        ("stragglers", _list(status["stragglers"])),
        ("last recovery", _recovery(status["last_recovery"])),
    ]


def _recovery(last: dict[str, Any] | None) -> str:
    if last is None:
        return "none"
    parts = [time.strftime("%H:%M:%S", time.localtime(last["time"])), last["cause"]]
    if last["lost_nodes"]:
        parts.append(f"without {', '.join(last['lost_nodes'])}")
    if last["joined_nodes"]:
        parts.append(f"with {', '.join(last['joined_nodes'])}")
    parts.append(f"formed in {last['seconds_to_form']:.2f} s")
    return ", ".join(parts)


def _value(value: Any, shown: str = "{}") -> str:
    if value is None:
        return "-"
    try:
        return shown.format(value)
    except ValueError:  # a trainer may report what it likes
        return str(value)


def _list(values: list[Any]) -> str:
    return ", ".join(map(str, values)) or "-"
