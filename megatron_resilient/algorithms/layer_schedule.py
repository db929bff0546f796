"""The schedule of a whole model: degree, order and gradient slices of every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_resilient.algorithms.cost_model import Profile
from megatron_resilient.algorithms.gradient_partition import Window, partition_gradients
from megatron_resilient.algorithms.lanes import Operation, planned_lanes
from megatron_resilient.algorithms.pipelining import PhasePlan, phase_options
from megatron_resilient.algorithms.stage_costs import LayerWork, StageCosts, stage_costs
from megatron_resilient.algorithms.stream_model import ORDERS


@dataclass(frozen=True)
class GradientSlices:
    """Gradient bytes that are sent during the backward pass of one generalised layer.

    They belong to layers that were through before, except `after_bytes`.

    Attributes:
        moe_bytes: Between the dispatches and the combines of its MoE layer.
        dense_bytes: Beside its dense backward work, which comes after the MoE layer's.
        after_bytes: After the whole backward pass: only the first layer of a model has these.
    """

    moe_bytes: int
    dense_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class LayerSchedule:
    """What one generalised layer does.

    Attributes:
        forward: Its forward pass.
        backward: Its backward pass, the gradient slice of `gradients.moe_bytes` included.
        gradients: What is sent meanwhile.
        exposed_gradient_ms: By how much that prolongs the step.
        forward_costs: What `forward` was made with.
        backward_costs: What `backward` was made with.
    """

    forward: PhasePlan
    backward: PhasePlan
    gradients: GradientSlices
    exposed_gradient_ms: float
    forward_costs: StageCosts
    backward_costs: StageCosts

    def lanes(self, *, backward: bool = False) -> Mapping[str, tuple[Operation, ...]]:
        """Returns the operations of each stream, in order, with their planned times."""
        if backward:
            return planned_lanes(self.backward_costs, self.backward)
        return planned_lanes(self.forward_costs, self.forward)


def schedule_layers(
    profile: Profile,
    layers: Sequence[LayerWork],
    max_degree: int,
    *,
    orders: Sequence[str] = ORDERS,
    uneven: bool = False,
) -> list[LayerSchedule]:
    """Schedules a model.

    FSMoE (arXiv 2501.10714), sections 4 and 5, with every integer degree played through instead of
    its four formulas, several orders of the intra-node stream, and gradients distributed by dynamic
    programming. Pure: the same on every rank for the same numbers.

    Args:
        profile: Costs of this cluster.
        layers: In forward order.
        max_degree: Most chunks of a pass.
        orders: Orders of the intra-node stream to choose from.
        uneven: Whether chunks may be of unequal size where that gains at least 1 %.

    Returns:
        The schedule of every layer, in forward order.

    Raises:
        PlanError: A degree below 1 or negative bytes.
    """
    forward_costs = [stage_costs(profile, layer) for layer in layers]
    backward_costs = [stage_costs(profile, layer, backward=True) for layer in layers]
    options = phase_options(
        [*forward_costs, *backward_costs], max_degree, orders=orders, uneven=uneven
    )
    forward, backward = options[: len(layers)], options[len(layers) :]
    # Equal layers share their window: what is computed for it is computed once.
    windows: dict[int, Window] = {}
    for own in backward:
        if id(own) not in windows:
            windows[id(own)] = Window.of_moe(own)
    row: list[Window] = []
    made: list[int] = []
    for layer, own in zip(reversed(layers), reversed(backward), strict=True):
        row += [windows[id(own)], Window.of_dense(layer.dense_backward_ms)]
        made += [0, layer.gradient_bytes]
    parts = partition_gradients(row, made, profile.allreduce)
    schedules = []
    for index in range(len(layers)):
        moe = 2 * (len(layers) - 1 - index)
        after = parts.slices_bytes[-1] if index == 0 else 0
        schedules.append(
            LayerSchedule(
                forward[index].choose(),
                backward[index].choose(parts.slices_ms[moe]),
                GradientSlices(parts.slices_bytes[moe], parts.slices_bytes[moe + 1], after),
                parts.exposed_ms[moe]
                + parts.exposed_ms[moe + 1]
                + (parts.exposed_ms[-1] if index == 0 else 0.0),
                forward_costs[index],
                backward_costs[index],
            )
        )
    return schedules
