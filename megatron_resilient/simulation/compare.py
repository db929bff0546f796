"""Several systems on one trace: how each would save, and what comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_resilient.algorithms.checkpoint_tuning import save_interval
from megatron_resilient.algorithms.cost_model import Profile
from megatron_resilient.algorithms.layer_schedule import schedule_layers
from megatron_resilient.algorithms.lost_tokens import DynamicK
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.simulation.costs import Costs
from megatron_resilient.simulation.job import Job, Outcome, Settings
from megatron_resilient.simulation.policy import Policy
from megatron_resilient.simulation.systems import System
from megatron_resilient.simulation.trace import Trace
from megatron_resilient.simulation.workload import Workload

# Saves are never further apart than this, however rare failures are.
LONGEST_SECONDS_BETWEEN_SAVES = 4 * 3600.0
LOST_TOKENS = 0.0375


@dataclass(frozen=True)
class Options:
    """What a user decides for all systems; 0 and None: chosen for each.

    Attributes:
        min_replicas: nodes that ours keeps each expert on, as far as slots suffice.
        exact: whether ours goes back as a whole when an expert is gone.
        interval: steps between two saves.
        k: experts of each layer in a partial save.
        lost_tokens: share of lost tokens that partial saves may cost.
    """

    min_replicas: int = 2
    exact: bool = False
    interval: int = 0
    k: int = 0
    lost_tokens: float = LOST_TOKENS


@dataclass(frozen=True)
class Result:
    """What one system makes of a trace.

    Attributes:
        system: which.
        policy: what it did.
        settings: how it saved.
        outcome: what came of it.
        seconds: of the trace.
    """

    system: System
    policy: Policy
    settings: Settings
    outcome: Outcome
    seconds: float

    @property
    def steps(self) -> int:
        """Steps that were kept."""
        return self.outcome.accounts.steps

    @property
    def goodput(self) -> float:
        """Kept steps over those of the same system, undisturbed on all nodes, without saves."""
        return self.steps * self.policy.undisturbed_step_seconds / self.seconds

    @property
    def ettr(self) -> float:
        """Share of the time that was spent on steps that were kept."""
        return self.outcome.accounts.productive / self.seconds


def simulate(
    trace: Trace, system: System, workload: Workload, costs: Costs, options: Options
) -> Result:
    """Runs one system through a trace.

    O(changes x (layers x experts x nodes)), beside one plan for each size of the cluster.

    Raises:
        PlanError: the system cannot run this workload.
    """
    policy = Policy(system, workload, costs, min_replicas=options.min_replicas, exact=options.exact)
    settings = choose_settings(trace, policy, options)
    return Result(system, policy, settings, Job(trace, policy, settings).run(), trace.seconds)


def choose_settings(trace: Trace, policy: Policy, options: Options) -> Settings:
    """Returns how a system saves: as often as pays, and as few experts as may be.

    The interval is that of `algorithms.checkpoint_tuning` for the failures of the trace. K is the
    least for which `DynamicK` expects few enough lost tokens, if every failure that may cost an
    expert does.
    """
    experts, nodes = policy.workload.experts, policy.most_nodes
    step = policy.step_seconds(nodes)
    faults = step / trace.mean_seconds_between_losses

    def interval(k: int) -> int:
        if options.interval:
            return options.interval
        return save_interval(
            policy.persist_seconds(k, nodes),
            step,
            faults,
            policy.stall_seconds(k, nodes),
            longest=max(1, int(LONGEST_SECONDS_BETWEEN_SAVES / step)),
        )

    if not policy.system.pec:
        return Settings(interval(experts), experts, adapts=not options.interval)
    if options.k:
        return Settings(interval(options.k), options.k, options.lost_tokens, not options.interval)
    steps = max(1, int(trace.seconds / step))
    restores = sum(1 for change in trace.changes if policy.may_restore(len(change.lost)))
    k = 1
    while True:
        enough = DynamicK(experts, k, options.lost_tokens).plan(interval(k), steps, restores)
        if enough == k:
            return Settings(interval(k), k, options.lost_tokens, not options.interval)
        k = min(2 * k, experts)


def planned_overlap(profile: Profile, layers: Sequence[LayerWork], max_degree: int) -> float:
    """Returns how much less MoE layers take as scheduled, against one stage after the other."""
    schedule = schedule_layers(profile, layers, max_degree)
    planned = sum(own.forward.predicted_ms + own.backward.predicted_ms for own in schedule)
    alone = sum(
        own.forward_costs.sequential_ms + own.backward_costs.sequential_ms for own in schedule
    )
    return alone / planned if planned else 1.0
