"""Simulates training through failures of nodes, for several systems on one list of events.

A simulation: what it prints is computed from costs that were measured before; nothing is run. The
events come from a file of failures, or are drawn. docs/simulation.md says what is modelled, and
what is left out.
"""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_resilient.commands.flag_types import above_0, at_least, count

if TYPE_CHECKING:
    from megatron_resilient.simulation.costs import Costs
    from megatron_resilient.simulation.trace import Trace
    from megatron_resilient.simulation.workload import Workload

HELP = "simulate goodput, cost and lost work of several systems under failures"

_MIB = float(1 << 20)
_DEFAULT_HOURS = 24.0
_REPAIR_MINUTES = 10.0
_EXPERTS = 64
_MOST_NODES = 20_000  # what moves between nodes is a table of nodes by nodes
_MOST_EXPERTS = 65_536
_MOST_SEED = 2**63 - 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    failures = parser.add_argument_group("failures")
    source = failures.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", metavar="FILE", help="who comes and goes: our CSV, or a public one"
    )
    source.add_argument(
        "--mtbf",
        type=above_0(),
        metavar="MIN",
        help="draw failures: minutes between two of them in the whole cluster, in the mean",
    )
    failures.add_argument(
        "--hours", type=above_0(), metavar="H", help="how long (default: the trace, or 24)"
    )
    failures.add_argument(
        "--start-minute",
        type=at_least(0),
        default=0.0,
        metavar="MIN",
        help="of the trace (default: 0)",
    )
    failures.add_argument(
        "--repair",
        type=at_least(0),
        metavar="MIN",
        help="with --mtbf: until a lost node is replaced (default: 10)",
    )
    failures.add_argument(
        "--no-repair", action="store_true", help="with --mtbf: lost nodes are not replaced"
    )
    failures.add_argument(
        "--nodes-per-failure",
        type=at_least(1),
        metavar="X",
        help="with --mtbf: nodes lost at once, in the mean (default: 1)",
    )
    failures.add_argument(
        "--seed", type=count(0, _MOST_SEED), default=0, metavar="S", help="of what is drawn"
    )

    cluster = parser.add_argument_group("cluster and model")
    cluster.add_argument(
        "--nodes",
        type=count(most=_MOST_NODES),
        metavar="N",
        help="of the cluster; others of a trace are spares (default: all of a trace, or 16)",
    )
    cluster.add_argument(
        "--ranks-per-node", type=count(), default=1, metavar="G", help="default: 1"
    )
    cluster.add_argument(
        "--slots-per-node",
        type=count(),
        metavar="C",
        help="experts of a layer that a node has memory for; with --recommend the most that may be "
        "used (default: three for each expert)",
    )
    cluster.add_argument("--min-replicas", type=count(), default=2, metavar="F", help="default: 2")
    cluster.add_argument("--min-nodes", type=count(), default=1, metavar="M", help="default: 1")
    cluster.add_argument(
        "--loads", metavar="PATH", help="tokens per expert and layer, as for `plan`; some layers do"
    )
    cluster.add_argument(
        "--experts",
        type=count(most=_MOST_EXPERTS),
        metavar="E",
        help="without --loads (default: 64)",
    )
    cluster.add_argument(
        "--zipf",
        type=at_least(0),
        metavar="S",
        help="without --loads: the i-th hottest expert gets tokens like i^-S (default: 1)",
    )
    cluster.add_argument(
        "--moe-layers", type=count(), metavar="L", help="of the model (default: those of the loads)"
    )
    cluster.add_argument(
        "--expert-mib",
        type=at_least(0),
        default=2.25,
        metavar="X",
        help="state of one expert of one layer, moments included (default: 2.25)",
    )
    cluster.add_argument(
        "--dense-mib",
        type=at_least(0),
        default=15.0,
        metavar="X",
        help="all other state (default: 15)",
    )
    cluster.add_argument(
        "--microbatches",
        type=count(0),
        default=0,
        metavar="M",
        help="of a step (default: share evenly)",
    )
    cluster.add_argument(
        "--distributed-optimizer",
        action="store_true",
        help="dense optimizer state is kept by one rank, and by its guardian",
    )
    cluster.add_argument(
        "--price", type=at_least(0), default=0.0, metavar="X", help="of one node for an hour"
    )

    costs = parser.add_argument_group("costs")
    costs.add_argument(
        "--calibration",
        metavar="PATH",
        help="measured costs: a JSON file, or the folder of a run of ours",
    )
    costs.add_argument(
        "--step-seconds",
        type=above_0(),
        metavar="S",
        help="a step of stock on all nodes, with even loads (default: the calibration's)",
    )
    costs.add_argument("--profile", metavar="FILE", help="as for `schedule`: what overlap gains")
    costs.add_argument("--layers", metavar="FILE", help="as for `schedule`; with --profile")

    systems = parser.add_argument_group("systems")
    systems.add_argument(
        "--system",
        nargs="+",
        metavar="NAME",
        help="restart, in-process, groups, no-replicas, ours; the last two with +pec, +overlap "
        "(default: all but groups)",
    )
    systems.add_argument(
        "--save-interval", type=count(), metavar="STEPS", help="default: what pays for each"
    )
    systems.add_argument(
        "--checkpoint-experts",
        type=count(),
        metavar="K",
        help="in saves of +pec (default: as few as --lost-tokens allows)",
    )
    systems.add_argument(
        "--lost-tokens", type=at_least(0), default=0.0375, metavar="X", help="default: 0.0375"
    )
    systems.add_argument(
        "--require-exact",
        action="store_true",
        help="ours goes back to a checkpoint as a whole when an expert is gone",
    )
    systems.add_argument(
        "--recommend",
        action="store_true",
        help="propose slots, minimum of replicas, checkpoint interval and K",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Returns 0; what cannot be simulated raises."""
    from megatron_resilient.commands.simulate_output import describe, show
    from megatron_resilient.simulation.compare import Options, simulate
    from megatron_resilient.simulation.recommendation import recommend
    from megatron_resilient.simulation.systems import DEFAULT_SYSTEMS, parse_system

    started = time.perf_counter()
    _refuse_contradictions(args)
    systems = [parse_system(name) for name in args.system or DEFAULT_SYSTEMS]
    costs = _costs(args)
    trace = _trace(args)
    workload = _workload(args, trace)
    options = Options(
        args.min_replicas,
        args.require_exact,
        args.save_interval or 0,
        min(args.checkpoint_experts or 0, workload.experts),
        args.lost_tokens,
    )
    results = [simulate(trace, system, workload, costs, options) for system in systems]
    proposal = None
    if args.recommend:
        overlap = any(system.overlap for system in systems)
        proposal = recommend(trace, workload, costs, options, overlap=overlap)
    document = describe(trace, workload, costs, options, results, proposal, args.price)
    document["seconds"] = time.perf_counter() - started
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        show(document)
    return 0


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Refuses flags that another one makes meaningless, rather than passing over them.

    Raises:
        ConfigError: there are some.
    """
    from megatron_resilient.errors import ConfigError

    drawn = {
        "--repair": args.repair,
        "--no-repair": args.no_repair or None,
        "--nodes-per-failure": args.nodes_per_failure,
    }
    made_up = {"--experts": args.experts, "--zipf": args.zipf}
    for given, by, flags in (("--trace", args.trace, drawn), ("--loads", args.loads, made_up)):
        useless = [name for name, value in flags.items() if value is not None]
        if by and useless:
            raise ConfigError(f"{' and '.join(useless)}: {given} says that; leave one of them out")
    if args.no_repair and args.repair is not None:
        raise ConfigError("--repair and --no-repair: give one of them")


def _costs(args: argparse.Namespace) -> "Costs":
    from dataclasses import replace

    from megatron_resilient.errors import ConfigError
    from megatron_resilient.simulation.calibration import costs_of_run
    from megatron_resilient.simulation.costs import Costs, read_costs

    costs = Costs()
    if args.calibration:
        is_run = Path(args.calibration).is_dir()
        costs = (
            costs_of_run(args.calibration, args.ranks_per_node)
            if is_run
            else read_costs(args.calibration)
        )
    if args.step_seconds:
        costs = replace(costs, step_seconds=args.step_seconds)
    if bool(args.profile) != bool(args.layers):
        raise ConfigError("--profile and --layers: give both, or neither")
    if args.profile:
        from megatron_resilient.algorithms.schedule_files import read_layers, read_profile
        from megatron_resilient.simulation.compare import planned_overlap

        max_degree, layers = read_layers(args.layers)
        speedup = planned_overlap(read_profile(args.profile), layers, max_degree)
        costs = replace(costs, overlap_speedup=speedup)
    return costs


def _trace(args: argparse.Namespace) -> "Trace":
    from megatron_resilient.errors import TraceError
    from megatron_resilient.simulation.failures import draw_failures
    from megatron_resilient.simulation.trace_files import read_trace

    begin, seconds = args.start_minute * 60, (args.hours or 0.0) * 3600
    if args.trace:
        trace = read_trace(args.trace, args.seed)
        if not seconds:
            seconds = trace.seconds - begin
        if seconds <= 0:
            raise TraceError(
                f"{args.trace}: ends after {trace.seconds / 60:g} minutes: use --hours"
            )
        trace = trace.window(begin, seconds)
        trace = trace.capped(args.nodes) if args.nodes else trace
        if not trace.most_nodes:
            raise TraceError(f"{args.trace}: there is never a node")
        return trace
    trace = draw_failures(
        args.nodes or 16,
        args.mtbf * 60,
        begin + (seconds or _DEFAULT_HOURS * 3600),
        seed=args.seed,
        repair_seconds=None if args.no_repair else _given(args.repair, _REPAIR_MINUTES) * 60,
        nodes_per_failure=_given(args.nodes_per_failure, 1.0),
    )
    return trace.window(begin, trace.seconds - begin) if begin else trace


def _workload(args: argparse.Namespace, trace: "Trace") -> "Workload":
    from megatron_resilient.algorithms.plan_files import read_loads
    from megatron_resilient.simulation.workload import Workload, zipf_loads

    if args.loads:
        loads = tuple(tuple(round(load) for load in row) for row in read_loads(args.loads))
    else:
        layers = min(4, args.moe_layers or 4)
        experts, exponent = _given(args.experts, _EXPERTS), _given(args.zipf, 1.0)
        loads = zipf_loads(layers, int(experts), exponent, args.seed)
    nodes, own = args.nodes or trace.most_nodes, args.ranks_per_node
    slots = args.slots_per_node
    if slots is None:  # three replicas of each expert, on the ranks that there are
        slots = own * min(len(loads[0]), -(-3 * len(loads[0]) // (nodes * own)))
    return Workload(
        nodes,
        own,
        loads,
        slots,
        args.moe_layers or len(loads),
        args.expert_mib * _MIB,
        args.dense_mib * _MIB,
        args.microbatches,
        args.min_nodes,
        args.distributed_optimizer,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
