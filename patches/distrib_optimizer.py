"""megatron.core.optimizer.distrib_optimizer: resuming with torch's own AdamW.

With Apex or Transformer Engine the fused Adam keeps one step counter per parameter group. Without
them torch's AdamW keeps one per parameter, and three places of the loading path overlook it.
"""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON

_MODULE = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def _state_dict(original):
    @functools.wraps(original)
    def state_dict(self):
        import torch

        inner = self.optimizer
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and not inner.state:
            # The state of step zero: what the first step would create, before it.
            for group in inner.param_groups:
                for parameter in group["params"]:
                    inner.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return original(self)

    return state_dict


def _load_state_dict(original):
    @functools.wraps(original)
    def load_state_dict(self, state_dict):
        import torch

        original(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone()

    return load_state_dict


def _get_main_param_and_optimizer_states(original):
    @functools.wraps(original)
    def _get_main_param_and_optimizer_states(self, model_param):
        tensors = original(self, model_param)
        # Saved once per parameter group; see fixes.adam-step-in-buckets.
        tensors.pop("step", None)
        return tensors

    return _get_main_param_and_optimizer_states


def _set_main_param_and_optimizer_states(original):
    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        import torch

        # In fp32 the main parameter is a view of the model's, which requires grad.
        with torch.no_grad():
            # Not a tensor: the original skips it, and the step that load_state_dict set stays.
            original(self, model_param, {"step": None, **tensors})

    return _set_main_param_and_optimizer_states


def _fix(id: str, method: str, make, reason: str, removable_when: str) -> Patch:
    return Patch(
        id=f"fixes.{id}",
        group="fixes",
        target=f"{_MODULE}.{method}",
        kind="wrap",
        make=make,
        reason=reason,
        no_seam="DistributedOptimizer is built inside get_megatron_optimizer.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when=removable_when,
    )


PATCHES = (
    _fix(
        "adam-state-before-load",
        "state_dict",
        _state_dict,
        "Loading into a fresh optimizer asks for its state dict first, which asserts that there "
        "is exactly one step count: with torch's AdamW there is none yet. A resume with the "
        "distributed optimizer dies with a bare AssertionError.",
        "state_dict() of a fresh optimizer works without Apex and Transformer Engine.",
    ),
    _fix(
        "adam-step-shared",
        "load_state_dict",
        _load_state_dict,
        "It gives every parameter the same `step` tensor, which AdamW then counts up once per "
        "parameter: the bias correction is wrong from the second step on, silently.",
        "load_state_dict clones the step for each parameter.",
    ),
    _fix(
        "adam-step-in-buckets",
        "_get_main_param_and_optimizer_states",
        _get_main_param_and_optimizer_states,
        "It hands out AdamW's scalar `step` beside the moments, and a dp-reshardable checkpoint "
        "takes it for a shard of a flat buffer: after a load AdamW counts from 0 again, and every "
        "update is wrong, silently.",
        "It hands out optimizer_state_keys only.",
    ),
    _fix(
        "optimizer-state-copy",
        "_set_main_param_and_optimizer_states",
        _set_main_param_and_optimizer_states,
        "A fully reshardable checkpoint has no `step` per parameter; looking for one raises "
        "KeyError: 'step'. And in fp32 a dp-reshardable one, the default, is copied into a view "
        "of a parameter with gradients on: RuntimeError.",
        "It copies only what the checkpoint holds, under no_grad.",
    ),
)
