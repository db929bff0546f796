"""What travels narrow arrives within its error bound; registration of hooks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_resilient
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import layer_hooks
from megatron_resilient.mcore.wire import E4M3_MAX, Pack, Unpack, pack_rows, unpack_rows, wire_hooks


class Layer:
    class config:
        params_dtype = torch.float32

    layer_number = 1


def there_and_back(dtype, rows):
    (hooks,) = wire_hooks(dtype)
    sent = hooks.before_dispatch(rows, Layer)
    return sent, hooks.after_dispatch(sent, Layer)


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-20, 20))
def test_error_bounds(seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randn(5, 32, generator=generator).exp() * 2.0**exponent
    rows = magnitudes * torch.randn(5, 32, generator=generator)
    _, arrived = there_and_back("bf16", rows)
    assert ((arrived - rows).abs() <= 2.0**-8 * rows.abs()).all()
    sent, arrived = there_and_back("fp8", rows)
    largest = rows.abs().amax(dim=1, keepdim=True)
    bound = torch.maximum(2.0**-4 * rows.abs(), 2.0**-10 * largest / E4M3_MAX)
    assert ((arrived - rows).abs() <= bound * (1 + 1e-6)).all()
    # A fourth of the bytes of fp32, and a scale.
    assert sent.numel() * sent.element_size() == rows.numel() + 4 * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_keeps_zeros_types_and_empty_parts(dtype):
    for rows in (torch.zeros(2, 4), torch.zeros(0, 4), torch.full((1, 4), 1e-30)):
        rows = rows.to(dtype)
        arrived = unpack_rows(pack_rows(rows), dtype)
        assert (arrived.shape, arrived.dtype) == (rows.shape, dtype)
        assert torch.allclose(arrived, rows, rtol=2.0**-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_become_finite(bad):
    rows = torch.ones(2, 4)
    rows[1, 2] = bad
    arrived = unpack_rows(pack_rows(rows), torch.float32)
    assert (arrived[0] == 1).all()
    assert arrived[1].isnan().any()


def test_gradients_travel_in_the_same_form():
    rows = torch.randn(3, 8, requires_grad=True)
    upstream = torch.randn(3, 8)
    Unpack.apply(Pack.apply(rows), torch.float32).backward(upstream)
    assert torch.equal(rows.grad, unpack_rows(pack_rows(upstream), torch.float32))
    rows.grad = None
    there_and_back("bf16", rows)[1].backward(upstream)
    assert torch.equal(rows.grad, upstream.bfloat16().float())


def test_nothing_is_done_unless_asked_for():
    assert wire_hooks("model") == ()
    assert layer_hooks.registered() == ()


def test_registration():
    def same(tensor, layer):
        return tensor

    first = megatron_resilient.register_moe_hooks(before_dispatch=same)
    second = megatron_resilient.register_moe_hooks(after_combine=same)
    try:
        found = layer_hooks.registered()
        assert [hooks.before_dispatch for hooks in found] == [same, None]
    finally:
        for each in (first, second, second):
            each.remove()
    assert layer_hooks.registered() == ()
    with pytest.raises(ConfigError, match="no function given"):
        megatron_resilient.register_moe_hooks()
    layer_hooks.set_built(True)
    try:
        with pytest.raises(ConfigError, match="the model is built already"):
            megatron_resilient.register_moe_hooks(before_moe_end=same)
    finally:
        layer_hooks.set_built(False)
