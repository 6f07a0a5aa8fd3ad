"""16-bit files as fp32 modules: they train where fp16 gives NaN, and the exported file keeps its own types."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

import onward
from onward.errors import ModelError, ParametersError
from onward.models import create_model
from tests.artifacts.trained_run import convolutional_model
from tests.mlp import build_mlp

MODELS: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "mlp": (lambda: build_mlp(), {"x": torch.linspace(-1, 1, 24).reshape(4, 6)}),
    "convolutional": (convolutional_model, {"image": torch.linspace(0, 1, 256).reshape(4, 1, 8, 8)}),
    "gpt2": (
        lambda: create_model("gpt2", size="tiny", layers=1, heads=2, width=16, vocab_size=32, context_length=8),
        {"input_ids": torch.arange(16).reshape(2, 8)},
    ),
}
CASES = [(name, keeps) for name in MODELS for keeps in (False, True)]


def half(name: str, keeps_io_types: bool) -> onnx.ModelProto:
    model = MODELS[name][0]()
    return convert_float_to_float16(
        model if isinstance(model, onnx.ModelProto) else onward_proto(model), keep_io_types=keeps_io_types
    )


def onward_proto(model: Any) -> onnx.ModelProto:
    import onnx_ir as ir

    return ir.to_proto(model)


def nodes_of(model: onnx.ModelProto) -> list[bytes]:
    """In any order, since the converter leaves them in one that no runtime could follow."""
    return sorted(node.SerializeToString() for node in model.graph.node)


def inputs_of(name: str, model: onnx.ModelProto) -> list[torch.Tensor]:
    narrow = model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    return [t.half() if narrow and t.is_floating_point() else t for t in MODELS[name][1].values()]


def steps_of_adam(net: Any, inputs: list[torch.Tensor], count: int) -> list[float]:
    optimizer, losses = torch.optim.Adam(net.weights.values(), lr=1e-2), []
    net.train()
    for _ in range(count):
        result = net(*inputs)
        loss = ((result[0] if isinstance(result, tuple) else result).float() - 0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    net.eval()
    return losses


@pytest.mark.parametrize(("name", "keeps_io_types"), CASES)
def test_fp32_trains_and_the_file_keeps_its_types(name: str, keeps_io_types: bool, tmp_path: Path) -> None:
    model = half(name, keeps_io_types)
    inputs = inputs_of(name, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = onward.to_torch(model, dtype=torch.float32)
    assert {tensor.dtype for tensor in net.tensors_by_name().values() if tensor.is_floating_point()} == {torch.float32}
    result = net(*inputs)
    assert (result[0] if isinstance(result, tuple) else result).dtype == torch.float32
    losses = steps_of_adam(net, inputs, 12)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.7 * losses[0]
    onward.export(net, tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(written, full_check=True)
    types = {t.name: t.data_type for t in model.graph.initializer}
    assert {t.name: t.data_type for t in written.graph.initializer} == types
    assert nodes_of(written) == nodes_of(model)
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {value.name: t.numpy() for value, t in zip(session.get_inputs(), inputs, strict=True)})[0]
    with torch.no_grad():
        expected = net(*inputs)
    expected = (expected[0] if isinstance(expected, tuple) else expected).numpy()
    assert np.abs(found.astype(np.float32) - expected).max() <= 2e-2 * max(1.0, np.abs(expected).max())


def test_fp16_itself_warns_once_and_then_gives_nan() -> None:
    """What the warning says is true: 4 steps of Adam and the weights are NaN."""
    model = half("mlp", False)
    with pytest.warns(UserWarning, match=r"4 of the 4 trainable weights are fp16, the first 'w1'\.") as caught:
        net = onward.to_torch(model)
    (warning,) = (w for w in caught if "fp16" in str(w.message))
    assert warning.filename == __file__
    assert "Pass dtype=torch.float32 to onward.to_torch to train in fp32" in str(warning.message)
    steps_of_adam(net, inputs_of("mlp", model), 4)
    assert any(weight.isnan().any() for weight in net.weights.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onward.to_torch(model, weights_not_to_train=["*"])
        onward.to_torch(build_mlp())


def test_either_input_type_gives_the_same_and_another_is_refused() -> None:
    net = onward.to_torch(half("mlp", False), dtype=torch.float32)
    x = MODELS["mlp"][1]["x"].half()
    assert torch.equal(net(x), net(x.float()))
    with pytest.raises(ModelError, match="input 'x' is float64; the model expects float32"):
        net(x.double())


def test_constants_casts_and_nested_graphs_are_widened() -> None:
    """Every place that holds a type: stored tensors, Constant, ConstantOfShape, Cast, If, a generator of numbers."""
    draw = np.random.default_rng(0).standard_normal

    def branch(name: str) -> onnx.GraphProto:
        value = helper.make_tensor(
            f"{name}_value", TensorProto.FLOAT16, [4], np.ones(4, np.float16).tobytes(), raw=True
        )
        nodes = [
            helper.make_node("Constant", [], [f"{name}_c"], value=value),
            helper.make_node("Mul", ["h", f"{name}_c"], [f"{name}_y"]),
        ]
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT16, None)]
        )

    fill = helper.make_tensor("fill", TensorProto.FLOAT16, [1], np.full(1, 0.5, np.float16).tobytes(), raw=True)
    nodes = [
        helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["x16", "w"], ["m"]),
        helper.make_node("Shape", ["m"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["halves"], value=fill),
        helper.make_node("Add", ["m", "halves"], ["h"]),
        helper.make_node("If", ["which"], ["chosen"], then_branch=branch("then"), else_branch=branch("else")),
        helper.make_node("EyeLike", ["h"], ["eye"], dtype=TensorProto.FLOAT16),
        helper.make_node("Add", ["chosen", "eye"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "types",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("which", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["n", 4])],
        [numpy_helper.from_array(draw((3, 4)).astype(np.float16), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    net = onward.to_torch(model, dtype=torch.float32)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    expected = (
        x @ torch.from_numpy(numpy_helper.to_array(graph.initializer[0]).astype(np.float32)) + 0.5 + torch.eye(2, 4)
    )
    for which in (True, False):
        found = net(x, torch.tensor(which))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_bfloat16_files_too(tmp_path: Path) -> None:
    import ml_dtypes

    model = build_mlp()
    for tensor in model.graph.initializer:
        wide = numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.BFLOAT16, wide.shape, wide.tobytes(), raw=True))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    net = onward.to_torch(model, dtype=torch.float32)
    losses = steps_of_adam(net, [MODELS["mlp"][1]["x"].bfloat16()], 8)
    assert losses[-1] < losses[0]
    onward.export(net, tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx").graph.initializer
    assert {t.data_type for t in written} == {TensorProto.BFLOAT16}


def test_what_fp16_cannot_hold_is_named_when_it_is_written(tmp_path: Path) -> None:
    net = onward.to_torch(half("mlp", False), dtype=torch.float32)
    with torch.no_grad():
        net.weights["b2"][:2] = 1e5
    with pytest.warns(UserWarning, match=r"2 elements of the weight 'b2' are beyond the range of fp16"):
        onward.export(net, tmp_path / "trained.onnx")


def test_other_types_are_refused() -> None:
    with pytest.raises(ParametersError, match=r"dtype is torch\.float64; pass torch\.float32, or leave it out"):
        onward.to_torch(build_mlp(), dtype=torch.float64)
