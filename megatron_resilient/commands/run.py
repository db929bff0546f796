"""Runs an elastic training job: starts this node's workers and keeps them in the job.

Every node runs this command with the address of one coordinator. Without --coordinator the job is
on this machine alone and gets a coordinator of its own. SIGTERM makes the node leave at the next
step, its state handed over first.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_resilient.errors import ConfigError

if TYPE_CHECKING:
    from megatron_resilient.elastic.agent import AgentSettings
    from megatron_resilient.elastic.launcher import JobSettings

HELP = "run the workers of this node, or of several emulated ones"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    from megatron_resilient.elastic.limits import Limits

    parser.add_argument(
        "--nnodes",
        type=_node_range,
        metavar="MIN:MAX",
        help="fewest and most nodes that train, or one number for both (default: all that there "
        "are with --emulate-nodes, any number with --coordinator, else 1)",
    )
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="workers a node (default: 1)"
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where `megatron-resilient coordinator` listens"
    )
    parser.add_argument(
        "--node-id",
        metavar="ID",
        help="unique name of this node (default: node<SLURM_NODEID>, else the host's name)",
    )
    parser.add_argument(
        "--emulate-nodes",
        type=int,
        metavar="K",
        help="K nodes on this machine, node0 to node<K-1>, on the CPU; each may be killed alone",
    )
    parser.add_argument(
        "--rejoin-after",
        type=float,
        metavar="S",
        help="an emulated node that was killed starts again after S seconds (default: never)",
    )
    parser.add_argument(
        "--token-file", metavar="F", help="file with the secret that all nodes of the job share"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="R",
        help="how often workers that failed are started again, to join anew (default: 3)",
    )
    parser.add_argument(
        "--log-dir",
        metavar="D",
        help="write what workers print to D/<node>/<worker>.<stream>.log instead of showing it",
    )
    Limits.add_flags(parser)
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if training finished or the node left as asked, 2 after wrong usage, else 1."""
    from megatron_resilient.elastic import launcher

    command = [_script(args.script), *args.arguments]
    if args.coordinator and not args.emulate_nodes:
        if args.rejoin_after is not None:
            raise ConfigError("--rejoin-after: is for emulated nodes; add --emulate-nodes K")
        return launcher.run_agent(_settings(args), launcher.exec_body(command)).code
    if args.emulate_nodes is None:
        return launcher.run_job(_local_job(args), launcher.exec_body(command))
    _keep_to_the_cpu()
    from megatron_resilient.mcore.preload import preload

    return launcher.run_job(_local_job(args), launcher.fork_body(command), preload)


def _local_job(args: argparse.Namespace) -> "JobSettings":
    from megatron_resilient.elastic import launcher

    own = args.coordinator is None
    settings = _settings(args, launcher.free_port() if own else None)
    if args.emulate_nodes is not None:
        nodes = launcher.emulated(settings, args.emulate_nodes)
    else:
        nodes = (settings,)
    command = _coordinator_command(args, settings.port, len(nodes)) if own else None
    return launcher.JobSettings(nodes, command, args.rejoin_after)


def _settings(args: argparse.Namespace, own_port: int | None = None) -> "AgentSettings":
    """Returns the settings of this node; a coordinator of our own listens on `own_port`."""
    from megatron_resilient.elastic import launcher
    from megatron_resilient.elastic.agent import AgentSettings
    from megatron_resilient.elastic.limits import Limits
    from megatron_resilient.elastic.node_id import default_node_id
    from megatron_resilient.elastic.protocol import read_token, split_address

    if own_port is None:
        host, port = split_address(args.coordinator)
        token = read_token(path=args.token_file)
    else:
        host, port, token = launcher.LOOPBACK, own_port, launcher.new_token()
    low, _ = args.nnodes or _default_range(args)
    return AgentSettings(
        node=args.node_id or default_node_id(),
        host=host,
        port=port,
        token=token,
        workers=args.nproc_per_node,
        min_nodes=low,
        max_restarts=args.max_restarts,
        limits=Limits.from_args(args),
        log_dir=Path(args.log_dir) if args.log_dir else None,
    )


def _coordinator_command(args: argparse.Namespace, port: int, nodes: int) -> tuple[str, ...]:
    from megatron_resilient.elastic.limits import Limits

    low, high = args.nnodes or _default_range(args)
    return (
        *(sys.executable, "-m", "megatron_resilient.cli", "coordinator"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--nnodes", f"{low}:{high or nodes}"),
        *Limits.from_args(args).flags(),
        *_run_dir(args.arguments),
    )


def _run_dir(arguments: Sequence[str]) -> tuple[str, ...]:
    """Has the coordinator write its events where the training writes its own."""
    flag = "--resilient-run-dir"
    values = [after for before, after in itertools.pairwise(arguments) if before == flag]
    values += [one.partition("=")[2] for one in arguments if one.startswith(f"{flag}=")]
    return ("--run-dir", values[-1]) if values else ()


def _default_range(args: argparse.Namespace) -> tuple[int, int | None]:
    if args.coordinator is not None:
        return 1, None
    return 1, args.emulate_nodes or 1


def _node_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    values = int(low), int(high if colon else low)
    if not 1 <= values[0] <= values[1]:
        raise argparse.ArgumentTypeError(f"{text}: give MIN:MAX with 1 <= MIN <= MAX")
    return values


def _script(path: str) -> str:
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: there is no such script")
    return path


def _keep_to_the_cpu() -> None:
    """Sets what has to stand before torch is imported, for a process that forks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
