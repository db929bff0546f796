"""Pools of training processes that live as long as the test session."""

import pytest
from hypothesis import settings

from tests.support.pretrain_pool import PretrainPool

# A busy machine is no error: no test judges time. The same examples every time: what fails here is
# there to be mended, and not gone in the next run. `--hypothesis-profile search` draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("same")


class Pools:
    """Pools of four ranks, started when first asked for, and again after one had to be closed."""

    def __init__(self):
        self._pools = {}

    @property
    def plugin(self) -> PretrainPool:
        """Megatron with the plugin enabled."""
        return self._get(plugin=True)

    @property
    def stock(self) -> PretrainPool:
        """Stock Megatron with the CPU group of the patches alone."""
        return self._get(plugin=False)

    def _get(self, plugin: bool) -> PretrainPool:
        if plugin not in self._pools or not self._pools[plugin].is_open:
            self._pools[plugin] = PretrainPool(4, plugin=plugin)
        return self._pools[plugin]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools():
    every = Pools()
    yield every
    every.close()
