"""Proposes slots, minimum of replicas, interval and K for a cluster, a model and its failures."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.recovery_probability import fatal_node_sets, guaranteed_losses
from megatron_resilient.simulation.compare import Options, Result, simulate
from megatron_resilient.simulation.costs import Costs
from megatron_resilient.simulation.placements import planned
from megatron_resilient.simulation.systems import System
from megatron_resilient.simulation.trace import Trace
from megatron_resilient.simulation.workload import Workload

# Choices are made on so many changes of the trace, the first ones.
_CHANGES = 300
# Of choices that are this close, the one with less memory, and then the safer one, is taken.
_CLOSE = 0.005
_MOST_SLOT_CHOICES = 6
_MOST_MIN_REPLICAS = 4
_INTERVAL_FACTORS = (0.5, 2.0)


@dataclass(frozen=True)
class Choice:
    """One combination that was simulated.

    Attributes:
        slots_per_node: expert slots of a node, per layer.
        min_replicas: nodes that each expert should be on.
        k: experts of each layer in a save.
        interval: steps between two saves.
        steps_per_hour: that were kept.
        lost_tokens: share of tokens whose updates were lost.
    """

    slots_per_node: int
    min_replicas: int
    k: int
    interval: int
    steps_per_hour: float
    lost_tokens: float

    @classmethod
    def of(cls, result: Result, options: Options) -> "Choice":
        """Takes the numbers of one run."""
        return cls(
            result.policy.workload.slots_per_node,
            options.min_replicas,
            result.settings.k,
            result.settings.interval,
            result.steps / result.seconds * 3600,
            result.outcome.lost_tokens,
        )


@dataclass(frozen=True)
class Recommendation:
    """What is proposed.

    Attributes:
        choice: the proposal.
        guaranteed_losses: any so many nodes may be lost at once without needing a checkpoint.
        tried: all that was simulated.
        result: the proposal on the whole trace.
    """

    choice: Choice
    guaranteed_losses: int
    tried: tuple[Choice, ...]
    result: Result


def recommend(
    trace: Trace,
    workload: Workload,
    costs: Costs,
    options: Options,
    *,
    overlap: bool = False,
) -> Recommendation:
    """Tries combinations by simulation, one thing after the other.

    First slots and minimum of replicas with full saves, then K, then half and twice the interval.

    Args:
        trace: the failures.
        workload: its `slots_per_node` is the most that memory has room for.
        costs: what things cost.
        options: what is decided already: an interval or a K that is given stays. Choices that lose
            more than `lost_tokens` are taken only if all do.
        overlap: whether communication and experts overlap.
    """
    part = trace
    if len(trace.changes) > _CHANGES:
        part = trace.window(0.0, trace.changes[_CHANGES].seconds)
    tried: list[Choice] = []

    def run(slots: int, chosen: Options, pec: bool) -> Choice:
        own = replace(workload, slots_per_node=slots)
        result = simulate(part, System("ours", pec, overlap), own, costs, chosen)
        tried.append(Choice.of(result, chosen))
        return tried[-1]

    best = _best(
        [
            run(slots, replace(options, min_replicas=least, k=0), False)
            for slots in _slot_choices(workload)
            for least in _min_replicas(workload, slots)
        ],
        options.lost_tokens,
    )
    fixed = replace(options, min_replicas=best.min_replicas)
    partial = [options.k] if options.k else _powers(workload.experts)
    if not options.exact:
        # K stays what it is: a choice is judged by what it loses itself.
        found = [
            run(best.slots_per_node, replace(fixed, k=k, lost_tokens=0.0), True) for k in partial
        ]
        best = _best(found if options.k else [best, *found], options.lost_tokens)
    pec = best.k < workload.experts
    fixed = replace(fixed, k=best.k if pec else 0)
    if not options.interval:
        near = [
            run(best.slots_per_node, replace(fixed, interval=round(best.interval * factor)), pec)
            for factor in _INTERVAL_FACTORS
            if round(best.interval * factor) >= 1
        ]
        # Far rarer saves win by luck where no failure was fatal: what pays by formula stays.
        better = [own for own in near if own.steps_per_hour > (1 + _CLOSE) * best.steps_per_hour]
        best = _best([best, *better], options.lost_tokens)
    fixed = replace(fixed, interval=best.interval)
    final = replace(workload, slots_per_node=best.slots_per_node)
    result = simulate(trace, System("ours", pec, overlap), final, costs, fixed)
    return Recommendation(best, survivable(final, best.min_replicas), tuple(tried), result)


def survivable(workload: Workload, min_replicas: int) -> int:
    """Returns how many nodes, whichever, may be lost at once from the whole cluster."""
    slots = planned(workload, workload.slots_per_rank, min_replicas).slots(workload.nodes)
    fatal: set[int] = set()
    for layer in slots:
        fatal.update(fatal_node_sets(layer.reshape(workload.nodes, -1), workload.experts))
    return guaranteed_losses(node_sets.minimal(fatal), workload.nodes)


def _best(choices: list[Choice], lost_tokens: float) -> Choice:
    """Returns the fastest; of those that are close to it, the one with least memory and risk."""
    allowed = [own for own in choices if own.lost_tokens <= lost_tokens] or choices
    most = max(own.steps_per_hour for own in allowed)
    near = [own for own in allowed if own.steps_per_hour >= (1 - _CLOSE) * most]
    return min(near, key=lambda own: (own.slots_per_node, -own.min_replicas, -own.k))


def _slot_choices(workload: Workload) -> list[int]:
    own = workload.ranks_per_node
    # Room for two replicas of each expert, or as near to it as memory allows: who asks for a plan
    # does not want the loss of one node to cost anything.
    least = min(-(-2 * workload.experts // workload.nodes), workload.slots_per_node)
    possible = [n for n in range(own, workload.slots_per_node + 1, own) if n >= least]
    if len(possible) <= _MOST_SLOT_CHOICES:
        return possible
    last = _MOST_SLOT_CHOICES - 1
    return [possible[round(i * (len(possible) - 1) / last)] for i in range(last + 1)]


def _min_replicas(workload: Workload, slots: int) -> Iterator[int]:
    room = min(workload.nodes * slots // workload.experts, workload.nodes, _MOST_MIN_REPLICAS)
    yield from range(min(2, room), room + 1)


def _powers(experts: int) -> list[int]:
    return [1 << power for power in range(experts.bit_length()) if 1 << power < experts]
