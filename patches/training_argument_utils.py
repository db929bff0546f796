"""megatron.training.argument_utils: the parser's help texts are found once in a process."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _get_field_docstrings(original):
    found: dict[type, dict[str, str]] = {}

    @functools.wraps(original)
    def get_field_docstrings(self, src_cfg_class):
        if src_cfg_class not in found:
            found[src_cfg_class] = original(self, src_cfg_class)
        return dict(found[src_cfg_class])

    return get_field_docstrings


PATCHES = (
    Patch(
        id="core.field-docstrings",
        group="core",
        target="megatron.training.argument_utils:ArgumentGroupFactory._get_field_docstrings",
        kind="wrap",
        make=_get_field_docstrings,
        reason="The command line is parsed anew in every generation of an elastic run, twice, and "
        "each time the sources of 26 classes are read and parsed for the help texts: 0.3 s of a "
        "recovery.",
        no_seam="It is called wherever Megatron builds its parser.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when="Help texts are kept, or the parser is.",
    ),
)
