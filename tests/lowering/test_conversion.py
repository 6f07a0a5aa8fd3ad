"""`onward.to_torch`: what it refuses and warns of, and types that it widens."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch

import onward
from onward.errors import ModelError, ParametersError


def model_of(body: str = "y = MatMul(x, w)", kind: str = "float", x: str = "n, 2") -> onnx.ModelProto:
    text = f'<ir_version: 8, opset_import: ["": 18]> g ({kind}[{x}] x) => ({kind}[{x}] y) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    dtype = np.float16 if kind == "float16" else np.float32
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[1, 2], [3, 4]], dtype), "w"))
    return proto


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, "float32"])
def test_other_types_are_refused(dtype: object) -> None:
    with pytest.raises(ParametersError, match=r"dtype is .*; pass torch\.float32, or leave it out for the file's own"):
        onward.to_torch(model_of(), dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_fp16_weights_are_warned_of_and_widened() -> None:
    with pytest.warns(
        UserWarning, match=r"1 of the 1 trainable weights are fp16, the first 'w'\. In your own training"
    ):
        onward.to_torch(model_of(kind="float16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = onward.to_torch(model_of(kind="float16"), dtype=torch.float32)
    assert net.weights["w"].dtype is torch.float32
    assert net(torch.ones(1, 2)).tolist() == [[4.0, 6.0]]


def test_any_batch_size() -> None:
    net = onward.to_torch(model_of(x="1, 2"), any_batch_size=True)
    assert tuple(net(torch.ones(5, 2)).shape) == (5, 2)
    mixed = model_of("a = MatMul(x, w) m = ReduceMax(a) y = Sub(a, m)", x="3, 2")
    with pytest.raises(
        ModelError, match=r"the batch size in the model is fixed to 3, and the graph cannot be rewritten"
    ):
        onward.to_torch(mixed, any_batch_size=True)
