"""All patches of upstream code, one file per patched upstream module; `reliances` has the rest.

`REGISTRY` collects them when it is first asked for; neither that nor importing this package imports
torch or Megatron. What each patch is for stands in docs/patches.md.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_resilient.patching.registry import Registry

    REGISTRY: Registry


@functools.cache
def _registry() -> "Registry":
    from megatron_resilient.patching.registry import collect

    return collect(__name__)


def __getattr__(name: str) -> Any:
    if name != "REGISTRY":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _registry()
