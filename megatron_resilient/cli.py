"""The `megatron-resilient` program: one module per command under `megatron_resilient.commands`.

A command module imports the standard library only at its top, so that `--help` answers at once;
whatever is heavy is imported inside its `run`.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from megatron_resilient import __version__
from megatron_resilient.errors import ResilientError

PROGRAM = "megatron-resilient"
COMMANDS = (
    "checkpoint",
    "coordinator",
    "doctor",
    "leave",
    "metrics",
    "patches",
    "plan",
    "prepare-data",
    "report",
    "run",
    "schedule",
    "simulate",
    "status",
)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each command configures its own sub-parser."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Resilient, elastic and fast Mixture-of-Experts training on Megatron-Core.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"megatron_resilient.commands.{name.replace('-', '_')}")
        sub = subparsers.add_parser(
            name, help=module.HELP, description=module.__doc__, allow_abbrev=False
        )
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        module.configure(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 done; 1 the answer is "no" (drift, a damaged file, an impossible plan); 2 wrong usage.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except BrokenPipeError:  # `... | head` closed our output: not an error of ours
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except MemoryError as error:
        if args.debug:
            raise
        print(f"{PROGRAM} {args.command}: out of memory: ask for less: {error}", file=sys.stderr)
        return 2
    except (ResilientError, OSError) as error:
        if args.debug:
            raise
        print(f"{PROGRAM} {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
