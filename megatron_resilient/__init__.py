"""megatron_resilient: resilient, elastic and fast Mixture-of-Experts training on Megatron-Core.

A pretrain script needs three lines::

    import megatron_resilient

    megatron_resilient.enable()  # before the first import of megatron
    ...
    megatron_resilient.run(main)  # instead of main()

Importing this package imports neither torch nor Megatron and patches nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["disable", "enable", "patched", "register_moe_hooks", "run"]

_HOMES = {
    "enable": "megatron_resilient.plugin",
    "disable": "megatron_resilient.plugin",
    "patched": "megatron_resilient.plugin",
    "register_moe_hooks": "megatron_resilient.mcore.layer_hooks",
    "run": "megatron_resilient.mcore.main",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
