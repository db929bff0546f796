"""Holds the membership of a job: who takes part, in which generation, with which rank.

One such process a job, on a machine that does not fail with the nodes; it needs no GPU. It may be
killed and started again at its address while training goes on. Nodes prove with a shared token,
from MEGATRON_RESILIENT_TOKEN or a file, that they belong to the job.
"""

import argparse
import asyncio
import json

HELP = "hold the membership of an elastic job"
DEFAULT_PORT = 29400


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    from megatron_resilient.elastic.limits import Limits

    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to bind to; 0.0.0.0 for all, with a token (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port to listen on; 0 for any free one (default: %(default)s)",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file that holds the shared token")
    parser.add_argument(
        "--nnodes",
        metavar="MIN:MAX",
        default="1",
        help="fewest nodes that train, and how many the start waits for (default: %(default)s)",
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="write failures, joins and leaves to DIR/events.jsonl"
    )
    parser.add_argument(
        "--json", action="store_true", help="print {host, port} as JSON when it listens"
    )
    Limits.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the job's exit code: 0 when training is done, 1 when it ended with an error."""
    from megatron_resilient.elastic.coordinator import Coordinator, run_coordinator
    from megatron_resilient.elastic.limits import Limits
    from megatron_resilient.elastic.protocol import read_token
    from megatron_resilient.elastic.rules import Rules

    fewest, most = _range(args.nnodes)
    coordinator = Coordinator(
        Rules(limits=Limits.from_args(args), min_nodes=fewest, max_nodes=most),
        args.host,
        args.port,
        read_token(path=args.token_file),
        run_dir=args.run_dir,
    )

    def announce(port: int) -> None:
        if args.json:
            print(json.dumps({"host": args.host, "port": port}), flush=True)
        else:
            print(f"coordinator listens on {args.host}:{port}", flush=True)

    return asyncio.run(run_coordinator(coordinator, announce))


def _range(text: str) -> tuple[int, int | None]:
    from megatron_resilient.errors import ConfigError

    low, colon, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() or not colon)):
        raise ConfigError(f"--nnodes {text!r} is not MIN or MIN:MAX, such as 2:4")
    fewest, most = int(low), int(high) if colon else None
    if fewest < 1 or (most is not None and most < fewest):
        raise ConfigError(f"--nnodes {text}: MIN must be at least 1, and MAX at least MIN")
    return fewest, most
