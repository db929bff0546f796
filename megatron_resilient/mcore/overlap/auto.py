"""Plans the overlap of a model's layers while it trains, and plans anew when reality has changed.

FSMoE (arXiv 2501.10714), sections 4 and 5: costs are measured at the start (`profile.py`). The
second step shows what the layers have to do with the real routing; from it every rank makes the
same plan (`schedule_layers`). Every so many steps one is looked at again: if operations take
longer or shorter than their costs say, the costs are corrected by what was seen, and with them or
with the work of now a new plan is made. Steps between are not looked at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import get_args, print_rank_0
from torch import nn

from megatron_resilient.algorithms.cost_model import Profile
from megatron_resilient.algorithms.lanes import lane_records
from megatron_resilient.algorithms.layer_schedule import LayerSchedule, schedule_layers
from megatron_resilient.algorithms.pipelining import PhasePlan
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.comm.drift import DriftLimits, DriftMonitor
from megatron_resilient.config import OverlapConfig
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore.overlap.gradient_slices import GradientSlices
from megatron_resilient.mcore.overlap.observed import (
    LayerTimes,
    Observation,
    Pass,
    agree,
    observations,
    records,
    scaled,
)
from megatron_resilient.mcore.overlap.plan import PassPlan
from megatron_resilient.mcore.overlap.profile import measure_profile, profile_of, stage_group
from megatron_resilient.mcore.overlap.setup import overlapped_layers

# The first step has what comes once: buffers, connections, compilation.
_FIRST = 2
# Every operation of a few layers is seen in one step.
_LIMITS = DriftLimits(window=256, least=8)

# Writes an event.
Write = Callable[..., None]


class AutoOverlap:
    """Plans for the layers of this rank.

    Args:
        layers: with overlap, connected.
        profile: costs of this job; the same on all ranks of the stage.
        slices: sends dense gradients in the layers' windows; None: Megatron reduces them alone.
        config: flags.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        profile: Profile,
        slices: GradientSlices | None,
        config: OverlapConfig,
    ) -> None:
        self._layers, self._profile, self._config = layers, profile, config
        self._slices = slices
        self._gradient_bytes: Mapping[int, int] = (
            slices.bytes_made() if slices else {layer.layer_number: 0 for layer in layers}
        )
        self._observation = Observation(layers)
        self._monitor = self._new_monitor()
        self._schedules: list[LayerSchedule] = []
        self._windows: tuple[dict[int, int], dict[int, int]] | None = None
        self._step = 0
        self._next = _FIRST
        self._is_watching = False

    @classmethod
    def attach(cls, model: list[nn.Module], config: OverlapConfig) -> "AutoOverlap | None":
        """Begins to plan for a new model, if that is asked for.

        Collective over the ranks of a pipeline stage: costs are measured, for some seconds.
        """
        layers = overlapped_layers(model)
        if config.overlap != "auto" or not layers:
            return None
        args = get_args()
        tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
        if args.sequence_parallel:
            tokens //= args.tensor_model_parallel_size
        folder = None if config.overlap_profiles is None else Path(config.overlap_profiles)
        with _without_parameter_gathers(model):
            measured = measure_profile(layers[0], tokens, folder)
        profile = profile_of(measured)
        for text in profile.distrust():
            print_rank_0(f"overlap: {text}")
        return cls(layers, profile, _slices(model, profile), config)

    def before_step(self) -> None:
        """Looks at the step that begins, if it is time. Local."""
        self._step += 1
        if self._step >= self._next:
            self._is_watching = True
            self._observation.start()

    def after_step(self, write: Write | None) -> None:
        """Makes a plan, or looks whether it holds. Collective if the step was looked at.

        Args:
            write: writes an event; None: another rank does.
        """
        if not self._is_watching:
            return
        self._is_watching = False
        passes = self._observation.stop()
        for operation, units, seconds in observations(passes):
            self._monitor.observe(operation, units, seconds)
        times = agree(passes, self._gradient_bytes, stage_group())
        if times is None:
            return  # a step that was done before a recovery: nothing ran
        if self._schedules:
            self._tell_measured(passes, times, write)
            self._correct()
        changed = self._plan([own.work for own in times])
        if changed and write is not None:
            for one in self._passes(self._schedules):
                write("schedule", **_event(*one))
        self._next = self._step + (1 if changed else self._config.overlap_interval)

    def soon(self) -> None:
        """Has the next step looked at: experts have moved. On all ranks of the stage."""
        self._next = min(self._next, self._step + 1)

    def _plan(self, work: Sequence[LayerWork]) -> bool:
        """Plans; returns whether a layer's plan is another one now."""
        schedules = schedule_layers(
            self._profile, work, self._config.overlap_max_degree, uneven=True
        )
        changed = False
        for layer, own, name, plan in self._passes(schedules):
            wanted = _carried_out(layer, own, name, plan)
            changed |= wanted != getattr(layer.overlap, name)
            setattr(layer.overlap, name, wanted)
        if self._slices is not None:
            changed |= self._set_windows(self._slices, schedules)
        is_first, self._schedules = not self._schedules, schedules
        return changed or is_first

    def _set_windows(self, slices: GradientSlices, schedules: Sequence[LayerSchedule]) -> bool:
        """Has slices sent as planned; returns whether they are others now."""
        numbered = {
            layer.layer_number: own.gradients
            for layer, own in zip(self._layers, schedules, strict=True)
        }
        windows = (
            {layer: own.moe_bytes for layer, own in numbered.items()},
            {layer: own.dense_bytes for layer, own in numbered.items()},
        )
        if windows == self._windows:
            return False
        self._windows = windows
        slices.set_windows(*windows, replicas=True)
        for layer in self._layers:
            layer.overlap.gradient_window = slices.window(layer.layer_number)
        return True

    def _correct(self) -> None:
        """Corrects the costs of operations that take another time than planned. Collective."""
        drifted = self._monitor.drifted(self._profile.operations, stage_group())
        if not drifted:
            return
        costs = {name: scaled(self._profile.cost(name), ratio) for name, ratio in drifted.items()}
        self._profile = replace(self._profile, **costs)
        self._monitor = self._new_monitor()
        said = ", ".join(f"{name} {ratio:.2f} times" for name, ratio in sorted(drifted.items()))
        print_rank_0(f"overlap: operations take another time than their profile says: {said}")

    def _new_monitor(self) -> DriftMonitor:
        profile = self._profile

        def predict_ms(operation: str, units: float) -> float:
            return profile.cost(operation).time_ms(units)

        return DriftMonitor(predict_ms, limits=_LIMITS)

    def _tell_measured(
        self, passes: Sequence[Pass], times: Sequence[LayerTimes], write: Write | None
    ) -> None:
        if write is None:
            return
        # Of several microbatches the last: its backward pass has the gradients' windows.
        last = {(own.layer, own.name): own for own in passes}
        took = {
            layer.layer_number: own.pass_seconds
            for layer, own in zip(self._layers, times, strict=True)
        }
        for layer, own, name, plan in self._passes(self._schedules):
            number = layer.layer_number
            if (number, name) in last:
                write(
                    "schedule",
                    **_event(layer, own, name, plan),
                    measured_seconds=took[number][name],
                    measured=records(last[number, name]),
                )

    def _passes(
        self, schedules: Sequence[LayerSchedule]
    ) -> Iterator[tuple[MoELayer, LayerSchedule, str, PhasePlan]]:
        """Yields layer, its schedule, the pass's name and plan: two for each layer."""
        for layer, own in zip(self._layers, schedules, strict=True):
            yield layer, own, "forward", own.forward
            yield layer, own, "backward", own.backward


@contextmanager
def _without_parameter_gathers(model: list[nn.Module]) -> Iterator[None]:
    """Lets modules be called outside a step: hooks of --overlap-param-gather would begin one."""
    hooked = [
        chunk
        for chunk in model
        if isinstance(chunk, DistributedDataParallel) and chunk.remove_forward_pre_hook_handles
    ]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def _slices(model: list[nn.Module], profile: Profile) -> GradientSlices | None:
    if "allreduce" not in profile.operations:
        return None  # there is but one data-parallel rank
    try:
        return GradientSlices(model)
    except ConfigError as error:
        print_rank_0(f"overlap: dense gradients are left to Megatron: {error}")
        return None


def _carried_out(layer: MoELayer, own: LayerSchedule, name: str, plan: PhasePlan) -> PassPlan:
    if layer.token_dispatcher.tp_size > 1:
        return PassPlan.planned(plan, own.lanes(backward=name == "backward"))
    return PassPlan(plan.degree, plan.fractions if plan.is_uneven else None, plan.order)


def _event(layer: MoELayer, own: LayerSchedule, name: str, plan: PhasePlan) -> dict[str, Any]:
    backward = name == "backward"
    return {
        "layer": layer.layer_number,
        "phase": name,
        "degree": plan.degree,
        "planned_seconds": plan.predicted_ms / 1000,
        "order": plan.order,
        "gradient_bytes": own.gradients.moe_bytes if backward else 0,
        "planned": lane_records(own.lanes(backward=backward)),
    }
