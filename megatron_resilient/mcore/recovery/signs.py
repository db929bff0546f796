"""Whether an exception is a sign that a peer has failed, and not a fault of this process."""

from collections.abc import Iterator

import torch.distributed as dist

from megatron_resilient.elastic.member import Fenced

# What gloo, NCCL and the store say when a peer is gone. torch has no class for it with gloo.
_BROKEN = ("gloo", "nccl", "connection reset", "connection closed", "broken pipe", "socket")


def shows_a_failed_peer(error: BaseException) -> bool:
    """Tells whether the exception, or one that it came from, is what a failed peer leads to.

    Others catch such exceptions and raise their own: a dataset that could not be built, a
    checkpoint that could not be loaded.
    """
    return any(_shows(each) for each in _origins(error))


def _shows(error: BaseException) -> bool:
    if isinstance(error, Fenced | dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(word in text for word in _BROKEN)


def _origins(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        yield here
        here = here.__cause__ or (None if here.__suppress_context__ else here.__context__)
