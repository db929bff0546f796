"""megatron.training.checkpointing: tracker files that are honest, RNG states that are whole."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _read_metadata(original):
    @functools.wraps(original)
    def read_metadata(tracker_filename):
        from megatron_resilient.mcore import tracker_file

        tracker_file.check(tracker_filename)
        return original(tracker_filename)

    return read_metadata


def _load_checkpoint(original):
    @functools.wraps(original)
    def load_checkpoint(
        ddp_model, optimizer, opt_param_scheduler, load_arg="load", *args, **kwargs
    ):
        from megatron_resilient.mcore import expert_rng, tracker_file

        tracker_file.check_load_folder(load_arg)
        seeded = expert_rng.own_stream()
        result = original(ddp_model, optimizer, opt_param_scheduler, load_arg, *args, **kwargs)
        expert_rng.take_own(seeded)
        return result

    return load_checkpoint


def _get_rng_state(original):
    @functools.wraps(original)
    def get_rng_state(*args, **kwargs):
        from megatron_resilient.mcore import expert_rng

        return expert_rng.with_all_expert_states(original(*args, **kwargs))

    return get_rng_state


def _fix(id: str, name: str, make, reason: str, no_seam: str, removable_when: str, bound_in=()):
    return Patch(
        id=f"fixes.{id}",
        group="fixes",
        target=f"megatron.training.checkpointing:{name}",
        kind="wrap",
        make=make,
        reason=reason,
        no_seam=no_seam,
        upstream="megatron-core",
        versions=MEGATRON,
        bound_in=bound_in,
        removable_when=removable_when,
    )


PATCHES = (
    _fix(
        "tracker-malformed",
        "read_metadata",
        _read_metadata,
        "A tracker file that holds no number (an interrupted write) ends the job with exit "
        "status 0: to a scheduler the run is complete.",
        "It calls sys.exit() itself.",
        "read_metadata raises.",
    ),
    _fix(
        "load-checkpoint",
        "load_checkpoint",
        _load_checkpoint,
        "Checkpoints without their tracker file, or no checkpoint where --load points: training "
        "starts from random weights, with a warning among a thousand lines. Also gives back each "
        "expert-parallel rank its own RNG state (see fixes.expert-rng).",
        "--exit-on-missing-checkpoint exits with status 0, and refuses the usual first start "
        "with --load and --save on the same empty folder.",
        "A missing tracker file beside checkpoints is an error upstream.",
        bound_in=("megatron.training.training:load_checkpoint",),
    ),
    _fix(
        "expert-rng",
        "get_rng_state",
        _get_rng_state,
        "RNG states are saved per pipeline and tensor rank only: after a resume with EP > 1 every "
        "rank draws from the expert stream of expert-parallel rank 0.",
        "The state is collected inside save_checkpoint.",
        "get_rng_state is keyed by the expert-parallel rank.",
    ),
)
