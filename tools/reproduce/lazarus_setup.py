"""The testbed of the Lazarus paper (arXiv 2407.04656, section 6.1), as a simulation needs it.

The paper gives: 10 GPUs, each a node; 12 layers; experts, slots, state of a replica; storage over
10 Gb/s; reconfiguration in 20 to 40 s; saves every 50 steps (DS) and 250 (DS(FT)) when a node fails
every 5 minutes, four times that at 40 minutes.

It does not give loads; here they are drawn: Zipf with exponent 1, as no trace of its routing is
public. Three numbers are fitted, and therefore no results: the step time of each model, from the
steps that Lazarus finished; the share of a step that loads matter to, from 45 against 34 samples/s
without failures (GPT-M); and the time in which all processes of DS start again, from one ratio
(GPT-S, a failure every 5 minutes: 2.8 times the samples of DS). The other ratios to DS follow, but
not smoothly: where a job comes to few saves between two failures, they jump. From 155 to 165 s that
of GPT-S goes from 2.8 to 3.0, and that of GPT-L from 5.1 to 6.2.
"""

from dataclasses import dataclass, replace

from megatron_resilient.simulation.compare import Options, Result, simulate
from megatron_resilient.simulation.costs import GIB, Costs, SaveCost
from megatron_resilient.simulation.policy import Policy
from megatron_resilient.simulation.systems import parse_system
from megatron_resilient.simulation.trace import Trace
from megatron_resilient.simulation.workload import Workload, zipf_loads

NODES = 10
SLOTS = 6
MOE_LAYERS = 12
STATE_BYTES = 14  # of a parameter: fp16 weight, fp32 copy, two moments
BATCH = 4 * NODES
STORAGE_BYTES_PER_SECOND = 1.25e9
START_SECONDS = 156.0  # fitted, see above
RECOVERY_SECONDS = 30.0
JOIN_WINDOW_SECONDS = 120.0
NEVER = 10**9  # steps: the paper's Lazarus saves in the spot run only
# Names of systems here, as in the paper. Ours has the runtime costs that the paper gives Lazarus.
SYSTEMS = {"DS": "restart", "DS(FT)": "groups", "ours": "ours"}


@dataclass(frozen=True)
class Model:
    """A model of the paper.

    Attributes:
        name: of it.
        hidden: size.
        experts: of a layer.
        parameters: all of them.
        step_seconds: of ours on all nodes; fitted.
    """

    name: str
    hidden: int
    experts: int
    parameters: float
    step_seconds: float

    @property
    def expert_bytes(self) -> float:
        """State of one replica: 63 MiB for GPT-S and 112 MiB for GPT-L in the paper."""
        return 8.0 * self.hidden**2 * STATE_BYTES

    @property
    def bytes(self) -> float:
        """State of the model."""
        return self.parameters * STATE_BYTES


# Steps of 30 minutes with five recoveries of 30 s: 2926 and 1996; GPT-M: 45 samples/s.
GPT_S = Model("GPT-S", 768, 8, 521e6, (1800 - 5 * RECOVERY_SECONDS) / 2926)
GPT_M = Model("GPT-M", 1024, 12, 1.3e9, BATCH / 45)
GPT_L = Model("GPT-L", 1024, 16, 1.7e9, (1800 - 5 * RECOVERY_SECONDS) / 1996)


def workload(model: Model, seed: int, nodes: int = NODES) -> Workload:
    """Returns a model on the testbed, with loads drawn."""
    experts = MOE_LAYERS * model.experts * model.expert_bytes
    return Workload(
        nodes=nodes,
        ranks_per_node=1,
        loads=zipf_loads(4, model.experts, 1.0, seed),
        slots_per_node=SLOTS,
        moe_layers=MOE_LAYERS,
        expert_bytes=model.expert_bytes,
        dense_bytes=model.bytes - experts,
    )


def costs(model: Model, seed: int) -> Costs:
    """Returns what things cost there."""
    storage = model.bytes / STORAGE_BYTES_PER_SECOND
    save = SaveCost(stall_seconds=storage)  # DeepSpeed's saves block
    share = expert_share(seed)
    found = Costs(
        expert_share=share,
        resilience_overhead=0.0,
        restart_seconds=START_SECONDS,
        recovery_seconds=RECOVERY_SECONDS,
        join_seconds=RECOVERY_SECONDS,
        join_window_seconds=JOIN_WINDOW_SECONDS,
        load_seconds_per_gib=NODES * GIB / STORAGE_BYTES_PER_SECOND,
        refill_seconds_per_gib=0.0,  # it is in the 30 s
        stock_save=save,
        our_save=save,
    )
    ours = Policy(parse_system("ours"), workload(model, seed), found)
    own = 1 - share + share * ours.placements.imbalance(NODES)
    return replace(found, step_seconds=model.step_seconds / own)


def expert_share(seed: int) -> float:
    """Returns the share of a step that loads matter to, such that GPT-M gives 45 against 34."""
    own = workload(GPT_M, seed)
    ours, theirs = (
        Policy(parse_system(name), own, Costs()).placements.imbalance(NODES)
        for name in ("ours", "groups")
    )
    ratio = 45 / 34
    # (1 - s + s * theirs) / (1 - s + s * ours) = ratio
    return min(1.0, (ratio - 1) / ((theirs - 1) - ratio * (ours - 1)))


def run(system: str, trace: Trace, model: Model, seed: int, interval: int) -> Result:
    """Runs a system of the paper through a trace, with saves every so many steps."""
    return simulate(
        trace,
        parse_system(SYSTEMS[system]),
        workload(model, seed),
        costs(model, seed),
        Options(interval=interval, exact=True),
    )


def samples_over_time(
    system: str, trace: Trace, model: Model, seed: int, interval: int, minutes: list[float]
) -> list[float]:
    """Returns the samples that are trained, and kept, after so many minutes."""
    return [
        BATCH * run(system, trace.window(0.0, 60 * at), model, seed, interval).steps
        for at in minutes
    ]
