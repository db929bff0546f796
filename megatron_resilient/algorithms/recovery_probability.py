"""The probability that every expert keeps a live replica when nodes are lost.

A placement enters as its minimal fatal sets: sets of nodes whose common loss loses an expert. The
sets of several layers together give the probability that all these layers stay recoverable.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb, sqrt

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms import loss_sweep, node_sets
from megatron_resilient.algorithms.topology import NO_RACK, Topology
from megatron_resilient.errors import PlanError

DEFAULT_SAMPLES = 20_000
_SAMPLES_AT_A_TIME = 2_048


@dataclass(frozen=True)
class Estimate:
    """A probability and how far it may be off.

    Attributes:
        value: The probability.
        standard_error: One standard error if it was sampled, else a bound: 0 if exact.
    """

    value: float
    standard_error: float = 0.0


def holders(slots: npt.NDArray[np.integer], experts: int) -> npt.NDArray[np.bool_]:
    """Returns which nodes hold which experts of one layer, [experts, nodes].

    Args:
        slots: Expert in every slot, [nodes, slots per node].
        experts: Number of experts E; slots hold 0 .. E-1.
    """
    nodes, slots_per_node = slots.shape
    held = np.zeros((experts, nodes), dtype=np.bool_)
    held[slots.ravel(), np.repeat(np.arange(nodes), slots_per_node)] = True
    return held


def fatal_node_sets(
    slots: npt.NDArray[np.integer], experts: int, max_size: int | None = None
) -> list[int]:
    """Returns the minimal fatal sets of one layer, as integers with a bit per node.

    Lazarus (arXiv 2407.04656), section 4.1: a plan is recoverable if and only if the nodes alive
    hold all experts together.

    Args:
        slots: Expert in every slot, [nodes, slots per node].
        experts: Number of experts.
        max_size: Leave out larger sets; they do not matter when fewer nodes are lost.
    """
    held = holders(slots, experts)
    if max_size is not None:
        held = held[held.sum(axis=1) <= max_size]
    return node_sets.minimal(node_sets.from_rows(held))


def guaranteed_losses(fatal_sets: Iterable[int], nodes: int) -> int:
    """Returns the largest m such that any m nodes may be lost at once; -1 if an expert is nowhere.

    Exact: m + 1 is the size of the smallest fatal set.
    """
    return min((s.bit_count() for s in fatal_sets), default=nodes + 1) - 1


def recovery_probability(
    fatal_sets: Sequence[int],
    nodes: int,
    losses: Iterable[int],
    *,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    state_limit: int = loss_sweep.DEFAULT_STATE_LIMIT,
) -> dict[int, Estimate]:
    """Returns the probability that nothing is lost with k nodes, for every k asked for.

    The k lost nodes are drawn uniformly from all nodes. Exact wherever few fatal sets are open at a
    time (see `loss_sweep`), which holds for all placements of this package; sampled otherwise.

    Args:
        fatal_sets: Minimal fatal sets of one layer, or of several for their joint probability.
        nodes: Number of nodes N.
        losses: The numbers k of nodes lost at once, 0 <= k <= N.
        samples: Draws per k where sampling is needed.
        seed: Of the draws.
        state_limit: Effort that is spent on the exact answer.
    """
    wanted = sorted(set(losses))
    if not wanted:
        return {}
    if wanted[0] < 0 or wanted[-1] > nodes:
        raise PlanError(f"{wanted[-1]} lost nodes of {nodes}: losses must be in 0 .. {nodes}")
    relevant = node_sets.minimal(s for s in fatal_sets if s.bit_count() <= wanted[-1])
    counts = loss_sweep.count_survivable(relevant, nodes, wanted[-1], state_limit)
    if counts is not None:
        return {k: Estimate(counts[k] / comb(nodes, k)) for k in wanted}
    return {k: _sample_losses(relevant, nodes, k, samples, seed) for k in wanted}


def survival_probability(
    fatal_sets: Sequence[int],
    topology: Topology,
    *,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    state_limit: int = loss_sweep.DEFAULT_STATE_LIMIT,
) -> Estimate:
    """Returns the probability that nothing is lost when nodes and racks fail as the topology says.

    Exact but for an error of at most 1e-6, which is stated (mostly it is far smaller), or sampled,
    as in `recovery_probability`.
    """
    relevant = node_sets.minimal(fatal_sets)
    swept = loss_sweep.survival_probability(relevant, topology, state_limit)
    if swept is not None:
        return Estimate(*swept)
    return _sample_failures(relevant, topology, samples, seed)


def grouped_recovery_probability(block_sizes: Iterable[int], nodes: int, losses: int) -> float:
    """Closed form for disjoint blocks of nodes: each block keeps at least one of its nodes.

    This is the recovery probability of Lazarus' grouped and nested plans (arXiv 2407.04656,
    section 4.1): the share of the sets of `losses` nodes that contain no whole block.
    O(blocks * losses^2).
    """
    sizes = list(block_sizes)
    ways = [1] + [0] * losses  # ways[k]: to lose k nodes of the blocks so far, none of them whole
    for size in sizes:
        ways = [
            sum(ways[k - own] * comb(size, own) for own in range(min(size - 1, k) + 1))
            for k in range(losses + 1)
        ]
    free = nodes - sum(sizes)
    if free < 0:
        raise PlanError(f"blocks of {sum(sizes)} nodes do not fit into {nodes} nodes")
    survivable = sum(ways[k] * comb(free, losses - k) for k in range(losses + 1))
    return survivable / comb(nodes, losses)


def _sample_losses(
    fatal_sets: Sequence[int], nodes: int, losses: int, samples: int, seed: int
) -> Estimate:
    rng = np.random.default_rng([seed, losses])
    fatal = 0
    for start in range(0, samples, _SAMPLES_AT_A_TIME):
        count = min(_SAMPLES_AT_A_TIME, samples - start)
        order = rng.random((count, nodes)).argpartition(max(losses - 1, 0), axis=1)
        lost = np.zeros((count, nodes), dtype=np.bool_)
        np.put_along_axis(lost, order[:, :losses], True, axis=1)
        fatal += _count_fatal(fatal_sets, lost)
    return _from_counts(samples - fatal, samples)


def _sample_failures(
    fatal_sets: Sequence[int], topology: Topology, samples: int, seed: int
) -> Estimate:
    rng = np.random.default_rng(seed)
    node_failure = np.array(topology.failure_probability)
    # The last entry stands for `NO_RACK` (-1), which never fails.
    rack_failure = np.array([*topology.rack_failure_probability, 0.0])
    rack_of = np.array(topology.rack_of)
    assert NO_RACK == -1
    fatal = 0
    for start in range(0, samples, _SAMPLES_AT_A_TIME):
        count = min(_SAMPLES_AT_A_TIME, samples - start)
        racks_down = rng.random((count, len(rack_failure))) < rack_failure
        lost = (rng.random((count, topology.nodes)) < node_failure) | racks_down[:, rack_of]
        fatal += _count_fatal(fatal_sets, lost)
    return _from_counts(samples - fatal, samples)


def _count_fatal(fatal_sets: Sequence[int], lost: npt.NDArray[np.bool_]) -> int:
    """Returns how many rows of `lost` [samples, nodes] contain a fatal set."""
    fatal = np.zeros(len(lost), dtype=np.bool_)
    for fatal_set in fatal_sets:
        fatal |= lost[:, list(node_sets.members(fatal_set))].all(axis=1)
    return int(fatal.sum())


def _from_counts(successes: int, samples: int) -> Estimate:
    # Agresti and Coull: two more of each outcome, so that the error is never stated as zero.
    adjusted = (successes + 2) / (samples + 4)
    return Estimate(successes / samples, sqrt(adjusted * (1 - adjusted) / samples))
