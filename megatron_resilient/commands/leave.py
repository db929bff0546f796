"""Has a node leave the job at the next step boundary, when its state has been handed over.

SIGTERM to the node's agent does the same.
"""

import argparse
import json
import os

HELP = "have a node leave an elastic job as planned"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--node-id", required=True, metavar="ID", help="the node")
    add_coordinator_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_coordinator_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where the coordinator is."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        default=os.environ.get("MEGATRON_RESILIENT_COORDINATOR", "127.0.0.1:29400"),
        help="the coordinator's address; default: MEGATRON_RESILIENT_COORDINATOR, or %(default)s",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file that holds the shared token")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the coordinator knows now; whether it left, `status` says."""
    from megatron_resilient.elastic.messages import Leave
    from megatron_resilient.elastic.protocol import read_token
    from megatron_resilient.elastic.query import ask

    answer = ask(args.coordinator, read_token(path=args.token_file), Leave(args.node_id))
    if args.json:
        print(json.dumps(answer))
    else:
        print(f"node {args.node_id} leaves at the next step boundary")
    return 0
