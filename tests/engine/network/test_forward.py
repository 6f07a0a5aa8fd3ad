"""A forward pass over features: checked, by name, through a program of the batch's shape."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.engine.network import forward as module
from onward.engine.network.forward import Forward
from onward.engine.network.network import unsplit_network
from onward.engine.network.precision import Precision
from onward.errors import DataError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program

FLOAT = TensorProto.FLOAT


def classifier(features: int = 4, extra: float = 0.0) -> onnx.ModelProto:
    weight = np.random.default_rng(0).standard_normal((features, 3)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Shape", ["h"], ["shape"]),
        helper.make_node("Expand", ["shift", "shape"], ["wide"]),
        helper.make_node("Add", ["h", "wide"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", features])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 3])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.full(1, extra, np.float32), "shift")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


SPEC = LossSpec(type="softmax_cross_entropy", prediction="y", label="labels")


def network(extra: float = 0.0) -> OnnxModule:
    return OnnxModule(make_training_graph(classifier(extra=extra), weights_to_train=["w"], loss=SPEC))


def batch(size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(size)
    return {
        "x": random.random((size, 4), dtype=np.float32),
        "labels": random.integers(0, 3, size),
        "more": np.zeros(size),
    }


def test_outputs_by_name_and_gradients() -> None:
    net = network()
    forward = Forward(unsplit_network(net), ("loss", "y"), Precision(None))
    assert forward.reader.inputs == ("x", "labels")
    features = forward.reader.to_tensors(batch(6))
    assert list(features) == ["x", "labels"]
    outputs = forward(features)
    logits = features["x"] @ net.weights["w"]
    torch.testing.assert_close(outputs["y"], logits)
    torch.testing.assert_close(outputs["loss"], torch.nn.functional.cross_entropy(logits, features["labels"]))
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, features["labels"]), [net.weights["w"]])
    outputs["loss"].backward()
    torch.testing.assert_close(net.weights["w"].grad, expected)


def test_one_program_for_each_shape_and_then_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = [], []
    specialize = module.specialize

    def counted(*arguments: object) -> Program:
        made.append(1)
        return specialize(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "specialize", counted)
    net = network()

    def instrument(program: Program) -> Program:
        run.append(program)
        return program

    forward = Forward(unsplit_network(net), ("y",), Precision(None), instrument=instrument)
    for size in (2, 3, 2, 3, 2):
        forward({name: torch.from_numpy(value) for name, value in batch(size).items()})
    assert len(made) == 2
    for size in range(1, 14):
        features = {name: torch.from_numpy(value) for name, value in batch(size).items()}
        torch.testing.assert_close(forward(features)["y"], features["x"] @ net.weights["w"])
    assert len(made) == module.MOST_SPECIALIZED_SHAPES
    assert run[-1] is run[-2]


def test_weights_are_read_at_every_call() -> None:
    net = network()
    forward = Forward(unsplit_network(net), ("y",), Precision(None))
    features = forward.reader.to_tensors(batch(5))
    before = forward(features)["y"].detach()
    with torch.no_grad():
        net.weights["w"].mul_(2)
    torch.testing.assert_close(forward(features)["y"], 2 * before)


def test_a_separate_graph_reads_the_weights_by_name_and_keeps_its_constants() -> None:
    net, other = network(), network(extra=10.0)
    with torch.no_grad():
        net.weights["w"].fill_(1)
    forward = Forward(unsplit_network(net), ("y",), Precision(None), graph_net=other)
    features = forward.reader.to_tensors(batch(5))
    torch.testing.assert_close(forward(features)["y"], features["x"].sum(1, keepdim=True).expand(5, 3) + 10)


def test_features_take_the_type_of_the_model() -> None:
    forward = Forward(unsplit_network(network()), ("loss",), Precision(None))
    given = batch(4)
    given["x"] = given["x"].astype(np.float64)
    given["labels"] = given["labels"].astype(np.int32)
    features = forward.reader.to_tensors(given)
    assert (features["x"].dtype, features["labels"].dtype) == (torch.float32, torch.int64)


def test_features_that_do_not_fit() -> None:
    forward = Forward(unsplit_network(network()), ("loss",), Precision(None))
    with pytest.raises(
        DataError,
        match=r"the data have no feature 'labels', which the model or its loss reads; they have 'x'\. Correct the name",
    ):
        forward.reader.to_tensors({"x": np.zeros((2, 4), np.float32)})
    with pytest.raises(DataError, match=r"'x' has shape \[5\] per sample; the model expects \[4\]\. Only axes"):
        forward.reader.to_tensors({**batch(2), "x": np.zeros((2, 5), np.float32)})
    with pytest.raises(DataError, match=r"'x' has shape \[4, 2\] per sample"):
        forward.reader.to_tensors({**batch(2), "x": np.zeros((2, 4, 2), np.float32)})
    with pytest.raises(
        DataError, match=r"'labels' is float32 in the data; the model expects int64. Convert it to that type in"
    ):
        forward.reader.to_tensors({**batch(2), "labels": np.zeros(2, np.float32)})
    mapped = Forward(unsplit_network(network()), ("loss",), Precision(None), dimensions={"batch": 8})
    with pytest.raises(DataError, match=r"'x' has shape \[2, 4\] \(batch axis first\); the model expects \[8, 4\]"):
        mapped.reader.to_tensors(batch(2))
