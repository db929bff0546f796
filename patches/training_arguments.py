"""megatron.training.arguments: our flags beside Megatron's, and one line for what is wrong."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _parse_and_validate_args(original):
    @functools.wraps(original)
    def parse_and_validate_args(extra_args_provider=None, *args, **kwargs):
        from megatron_resilient.mcore import arguments

        names = ("ignore_unknown_args", "args_defaults")
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        return arguments.parse_and_validate(original, extra_args_provider, **options)

    return parse_and_validate_args


PATCHES = (
    Patch(
        id="core.parse-and-validate-args",
        group="core",
        target="megatron.training.arguments:parse_and_validate_args",
        kind="wrap",
        make=_parse_and_validate_args,
        reason="Adds the --resilient-* flags and checks them before Megatron's own validation.",
        no_seam="`extra_args_provider` is the user's: using it would cost a line in every script, "
        "and what it adds cannot be checked before Megatron's validation.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when="Megatron takes several extra_args_providers and a validation hook.",
    ),
)
