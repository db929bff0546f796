"""Small clusters, and costs that are easy to add up."""

from megatron_resilient.simulation.compare import Options, Result, simulate
from megatron_resilient.simulation.costs import Costs, SaveCost
from megatron_resilient.simulation.systems import parse_system
from megatron_resilient.simulation.trace import Change, Trace
from megatron_resilient.simulation.workload import Workload, zipf_loads

# A step of a second, a stall of two, a save that is durable half a second after it.
PLAIN = Costs(
    step_seconds=1.0,
    expert_share=0.0,
    resilience_overhead=0.0,
    restart_seconds=20.0,
    in_process_seconds=10.0,
    recovery_seconds=5.0,
    join_seconds=5.0,
    join_window_seconds=3.0,
    load_seconds_per_gib=0.0,
    refill_seconds_per_gib=0.0,
    stock_save=SaveCost(stall_seconds=2.0, persist_seconds=0.5),
    our_save=SaveCost(stall_seconds=2.0, persist_seconds=0.5),
)


def workload(nodes=4, experts=4, slots=4, layers=2, **more):
    values = {
        "nodes": nodes,
        "ranks_per_node": 1,
        "loads": zipf_loads(layers, experts, 1.0),
        "slots_per_node": slots,
        "moe_layers": layers,
        "expert_bytes": 2.0**20,
        "dense_bytes": 2.0**21,
    }
    return Workload(**values | more)


def trace(nodes, seconds, *changes):
    """A trace of nodes n0, n1, .. and changes (seconds, lost, joined, left)."""
    return Trace(
        tuple(f"n{i}" for i in range(nodes)),
        tuple(
            Change(at, tuple(lost), tuple(more[1]) if len(more) > 1 else (), tuple(joined))
            for at, lost, joined, *more in ((a, b, c, None, *d) for a, b, c, *d in changes)
        ),
        seconds,
        "a test",
    )


def outcome(name, events, work=None, costs=PLAIN, **options) -> Result:
    """Runs one system through a trace."""
    return simulate(
        events, parse_system(name), work or workload(), costs, Options(**{"interval": 10} | options)
    )
