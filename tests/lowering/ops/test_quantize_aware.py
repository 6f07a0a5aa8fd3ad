"""How scales are found: gradients of LSQ, averages of torch.ao."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.ao.quantization import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

from onward.lowering.ops.quantization import dequantize_linear, quantize_linear
from onward.lowering.ops.quantize_aware import moving_scale, scale_gradient


@pytest.mark.parametrize("zero", [0, -128])
def test_the_gradient_of_a_scale_is_that_of_lsq(zero: int) -> None:
    """Equation 3: -v/s + round(v/s) inside of the range, -Qn and Qp beyond it; times 1 / sqrt(N Qp).

    Whether a number is inside is judged after rounding, as torch's own learnable quantizer does.
    """
    generator = torch.Generator().manual_seed(0)
    v = (torch.randn(200, generator=generator) * 4).requires_grad_()
    s, upstream = torch.tensor(0.021, requires_grad=True), torch.randn(200, generator=generator)
    low, high = -128 - zero, 127 - zero
    factor = (200 * high) ** -0.5
    scale, shift = scale_gradient(s, factor=factor), torch.tensor(zero, dtype=torch.int8)
    kind = int(ir.DataType.INT8)
    q = quantize_linear(v, scale, shift, element_types=(1, 1, kind), only_dequantized=True)
    dequantize_linear(q, scale, shift).backward(upstream)
    ratio = (v / s).detach()
    inside = (torch.round(ratio) >= low) & (torch.round(ratio) <= high)
    expected = torch.where(inside, torch.round(ratio) - ratio, torch.where(ratio < low, float(low), float(high)))
    assert 20 < int(inside.sum()) < 180
    assert s.grad is not None
    assert v.grad is not None
    assert float(s.grad) == pytest.approx(float((expected * upstream).sum() * factor), rel=1e-4)
    torch.testing.assert_close(v.grad, torch.where(inside, upstream, 0.0))
    own, theirs = v.detach().clone().requires_grad_(), s.detach().reshape(1).clone().requires_grad_()
    by_torch = torch._fake_quantize_learnable_per_tensor_affine(
        own, theirs, torch.tensor([float(zero)]), -128, 127, factor
    )
    by_torch.backward(upstream)
    assert theirs.grad is not None
    assert float(s.grad) == pytest.approx(float(theirs.grad), rel=1e-2)  # it multiplies by 1 / s


@pytest.mark.parametrize("axis", [None, 1])
def test_a_moving_average_is_that_of_torch_ao(axis: int | None) -> None:
    """Of values whose range is the same on both sides, where torch's two averages are one."""
    kind = {"dtype": torch.qint8, "averaging_constant": 0.01}
    observer: Any = (
        MovingAverageMinMaxObserver(qscheme=torch.per_tensor_symmetric, **kind)
        if axis is None
        else MovingAveragePerChannelMinMaxObserver(ch_axis=axis, qscheme=torch.per_channel_symmetric, **kind)
    )
    running = torch.zeros(() if axis is None else (3,))
    for step in range(6):
        half = torch.randn(20, 3, generator=torch.Generator().manual_seed(step)) * (1 + step)
        x = torch.cat([half, -half])
        observer(x)
        found = moving_scale(x, running, span=127.5, axis=axis, training=True, replica_group="")
    expected = observer.calculate_qparams()[0].reshape(running.shape)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        moving_scale(x * 9, running, span=127.5, axis=axis, training=False, replica_group=""), found
    )


def test_a_scale_goes_up_to_the_largest() -> None:
    scale = torch.tensor([0.5, -3.0], requires_grad=True)
    found = scale_gradient(scale, factor=0.5, largest=2.0)
    found.sum().backward()
    assert found.tolist() == [0.5, 2.0]
    assert scale.grad is not None
    assert scale.grad.tolist() == [0.5, -0.5]
    running = torch.tensor(3.0)
    moving = moving_scale(torch.ones(2), running, span=1.0, largest=2.0, training=False, replica_group="")
    assert (float(moving), float(running)) == (2.0, 3.0)
