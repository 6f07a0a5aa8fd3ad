"""Models of a single node, for tests of lowerings: made, run by onward and onnxruntime, differentiated numerically."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import onward

IR_VERSION_BY_OPSET = ((8, 3), (10, 5), (13, 7), (18, 8), (20, 9), (22, 10), (24, 11), (27, 13))
"""Opset up to which an IR version is enough; newer opsets take 14."""

_BIT_VIEW: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}


def normal(random: np.random.Generator) -> Callable[..., np.ndarray[Any, Any]]:
    """Draws normally distributed arrays of the sizes that it is given, in float32 by default."""
    return lambda *shape, dtype=np.float32, spread=1.0: (random.standard_normal(shape) * spread).astype(dtype)


def ints(*values: int) -> np.ndarray[Any, Any]:
    """A vector of int64."""
    return np.array(values, dtype=np.int64)


def to_array(value: Any) -> np.ndarray[Any, Any]:
    """A numpy array of a tensor (bfloat16 and float8 included), an array, a number or nested lists."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    if value.dtype in _BIT_VIEW:
        bits, dtype = _BIT_VIEW[value.dtype]
        return value.view(bits).numpy().view(dtype)
    return value.numpy()


def make_model(
    op_type: str,
    inputs: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
    opset: int = 28,
    output_count: int = 1,
    initializers: Mapping[str, Any] | None = None,
    domain: str = "",
) -> onnx.ModelProto:
    """A model of one node; its outputs are `output_0`, `output_1`, ...

    `inputs` holds the node's inputs in order: an array or tensor gives type and rank of a graph input, None leaves
    an optional input out. `initializers` holds stored tensors: one whose name is also in `inputs` takes that place,
    the others follow after the inputs. An attribute that is a tensor or an array becomes a tensor attribute.
    """
    initializers = initializers or {}
    names = [name if value is not None or name in initializers else "" for name, value in inputs.items()]
    names += [name for name in initializers if name not in inputs]
    while names and not names[-1]:
        names.pop()
    outputs = [f"output_{index}" for index in range(output_count)]
    node = helper.make_node(op_type, names, outputs, name="node", domain=domain)
    for name, value in (attributes or {}).items():
        if isinstance(value, np.ndarray | torch.Tensor):
            value = numpy_helper.from_array(to_array(value), name)
        node.attribute.append(helper.make_attribute(name, value))
    graph = helper.make_graph(
        [node],
        "one_node",
        [_describe(name, value) for name, value in inputs.items() if value is not None and name not in initializers],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(to_array(value), name) for name, value in initializers.items()],
    )
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = next((ir for newest, ir in IR_VERSION_BY_OPSET if opset <= newest), 14)
    try:
        return onnx.shape_inference.infer_shapes(model)
    except Exception:
        return model  # a node that is wrong on purpose


def _describe(name: str, value: Any) -> onnx.ValueInfoProto:
    array = to_array(value)
    axes = [f"{name}_{axis}" for axis in range(array.ndim)]
    if array.dtype == object or array.dtype.kind == "U":
        return helper.make_tensor_value_info(name, TensorProto.STRING, axes)
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), axes)


def run(model: onnx.ModelProto, *tensors: Any, training: bool = False) -> Any:
    """The model's outputs by onward: one tensor, or a tuple. Arrays become tensors."""
    net = onward.to_torch(model).train(training)
    return net(*(torch.from_numpy(np.array(t)) if isinstance(t, np.ndarray | np.generic) else t for t in tensors))


def run_onnxruntime(model: onnx.ModelProto, *tensors: Any) -> list[np.ndarray[Any, Any]]:
    """The model's outputs by onnxruntime on the CPU, without graph optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return list(session.run(None, dict(zip(names, map(to_array, tensors), strict=True))))


def check_against_onnxruntime(model: onnx.ModelProto, *tensors: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Asserts that onward and onnxruntime agree in shape, type and value on every output."""
    expected = run_onnxruntime(model, *tensors)
    actual = run(model, *tensors)
    for left, right in zip(expected, actual if isinstance(actual, tuple) else (actual,), strict=True):
        array = to_array(right)
        assert array.shape == left.shape, f"shape {array.shape}, onnxruntime gives {left.shape}"
        assert array.dtype == left.dtype, f"type {array.dtype}, onnxruntime gives {left.dtype}"
        np.testing.assert_allclose(array, left, rtol=rtol, atol=atol)


def check_gradients(
    model: onnx.ModelProto, *tensors: Any, outputs: Sequence[int] = (0,), training: bool = False
) -> None:
    """Asserts by finite differences (`torch.autograd.gradcheck`) that gradients through `outputs` are right.

    Every float64 tensor among `tensors` is differentiated; the rest is passed as it is.
    """
    net = onward.to_torch(model).train(training)
    given = [torch.from_numpy(np.array(t)) if isinstance(t, np.ndarray | np.generic) else t for t in tensors]
    places = [i for i, t in enumerate(given) if isinstance(t, torch.Tensor) and t.dtype == torch.float64]
    assert places, "give at least one float64 tensor"

    def compute(*varied: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = list(given)
        for place, tensor in zip(places, varied, strict=True):
            arguments[place] = tensor
        results = net(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(results[index] for index in outputs)

    assert torch.autograd.gradcheck(compute, [given[i].detach().clone().requires_grad_() for i in places])
