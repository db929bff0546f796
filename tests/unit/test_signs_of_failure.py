"""Which exceptions show that a peer has failed, however they are wrapped."""

import pytest
import torch.distributed as dist

from megatron_resilient.elastic.member import Fenced
from megatron_resilient.errors import CheckpointError, LostStateError
from megatron_resilient.mcore.recovery.signs import shows_a_failed_peer

RESET = RuntimeError("[gloo/transport/tcp/pair.cc:538] Read error: Connection reset by peer")


def wrapped(inner, outer, cause=True):
    """Raises as libraries do that catch everything."""
    try:
        try:
            raise inner
        except BaseException as error:
            if cause:
                raise outer from error
            raise outer  # noqa: B904 - this is what is tested
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        RESET,
        Fenced("another node is lost"),
        dist.DistNetworkError("the store is gone"),
        ConnectionResetError("connection reset by peer"),
        wrapped(RESET, Exception("MockGPTDataset failed to build as a mock data generator")),
        wrapped(Fenced("over"), CheckpointError("the checkpoint cannot be loaded"), cause=False),
        wrapped(wrapped(RESET, ValueError("a")), RuntimeError("b")),
    ],
)
def test_signs(error):
    assert shows_a_failed_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("gloo"),
        RuntimeError("shape mismatch"),
        OSError("no space left on device"),
        LostStateError("no live rank has expert 3"),
        wrapped(ValueError("a"), RuntimeError("b")),
        KeyboardInterrupt(),
    ],
)
def test_faults_of_our_own(error):
    assert not shows_a_failed_peer(error)


def test_what_was_dealt_with_does_not_count():
    with pytest.raises(ValueError, match="another") as caught:  # noqa: PT012
        try:
            raise RESET
        except RuntimeError:
            raise ValueError("another thing") from None
    assert not shows_a_failed_peer(caught.value)
