"""Traced code in ONNX, computed by onnxruntime, against the function that was traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from onward.artifacts.joint_segments import SegmentCode
from onward.artifacts.onnx_translation import translate


def first(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Asks for a count of elements and for strides, and changes a tensor in place."""
    changed = x.clone()
    changed.mul_(3)
    return changed.t().reshape(x.numel()), x / x.stride(0), torch.sort(x, stable=True).values


def second(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Has a constant of its own, and an operator that ONNX lacks."""
    return (torch.ops.aten.gelu_backward(x, x) + torch.tensor([[1.5]]),)


def third(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The backward pass of a normalization of features, which asks for no gradient of them."""
    mean, deviation = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
    weight, mask = x.new_ones(x.shape[-1]), [False, True, True]
    found = torch.ops.aten.native_layer_norm_backward(x, x, [x.shape[-1]], mean, deviation, weight, weight, mask)
    return found[1], found[2]


def traced(mode: FakeTensorMode, function: Any) -> SegmentCode:
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    example = mode.from_tensor(torch.zeros(5, 7), symbolic_context=context)
    with mode:
        code = make_fx(function, tracing_mode="symbolic")(example)
    return SegmentCode(code=code, examples=(example,), has_gradient=())


def test_codes_next_to_each_other_compute_what_was_traced_for_any_sizes(tmp_path: Path) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    model = translate([traced(mode, function) for function in (first, second, third)], 18)
    ir.save(model, tmp_path / "codes.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "codes.onnx")
    names = [value.name for value in session.get_inputs()]
    x, y, z = torch.randn(3, 4), torch.randn(2, 9), torch.randn(4, 3)
    results = session.run(None, dict(zip(names, (x.numpy(), y.numpy(), z.numpy()), strict=True)))
    for result, expected in zip(results, (*first(x), *second(y), *third(z)), strict=True):
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=1e-6)
