"""Training that a model carries itself: initialization, algorithm and bindings, against the same steps in torch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.errors import ModelError
from onward.graph.training_graph import make_training_graph
from onward.lowering.training_info import load_training_info

DOMAIN = "ai.onnx.preview.training"
WEIGHT = np.array([[1, 2], [3, 4], [5, 6]], np.float32) / 4


def info(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def bind(field: object, **bindings: str) -> None:
    for key, value in bindings.items():
        field.add(key=key, value=value)  # type: ignore[attr-defined]


def make_model(inference: list[onnx.NodeProto] | None = None, **constants: np.ndarray) -> onnx.ModelProto:
    """y = x @ w, trained by squared error and momentum; the algorithm counts its steps."""
    graph = helper.make_graph(
        inference or [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "inference",
        [info("x", "n", 3)],
        [info("y", "n", 2)],
        [numpy_helper.from_array(array, name) for name, array in {"w": WEIGHT, **constants}.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    momentum = {"alpha": 0.9, "beta": 1.0, "mode": "standard", "norm_coefficient": 0.0}
    algorithm = helper.make_graph(
        [
            helper.make_node("Sub", ["y", "target"], ["difference"]),
            helper.make_node("ReduceSumSquare", ["difference"], ["loss"], keepdims=0),
            helper.make_node(
                "Gradient", ["w", "x", "target"], ["slope"], domain=DOMAIN, xs=["w"], zs=["x", "target"], y="loss"
            ),
            helper.make_node(
                "Momentum", ["rate", "count", "w", "slope", "v"], ["w_new", "v_new"], domain=DOMAIN, **momentum
            ),
            helper.make_node("Add", ["count", "one"], ["count_new"]),
        ],
        "algorithm",
        [info("target", "n", 2), info("rate")],
        [info("loss"), info("w_new", 3, 2), info("v_new", 3, 2), info("count_new", dtype=TensorProto.INT64)],
        [
            numpy_helper.from_array(np.array(0.05, np.float32), "rate"),
            numpy_helper.from_array(np.array(7), "count"),
            numpy_helper.from_array(np.array(1), "one"),
            numpy_helper.from_array(np.full((3, 2), 9, np.float32), "v"),
        ],
    )
    initialization = helper.make_graph(
        [
            helper.make_node("Constant", [], ["zeros"], value=numpy_helper.from_array(np.zeros((3, 2), np.float32))),
            helper.make_node("Constant", [], ["zero"], value_int=0),
        ],
        "initialization",
        [],
        [info("zeros", 3, 2), info("zero", dtype=TensorProto.INT64)],
    )
    one = model.training_info.add()
    one.algorithm.CopyFrom(algorithm)
    one.initialization.CopyFrom(initialization)
    bind(one.update_binding, w="w_new", v="v_new", count="count_new")
    bind(one.initialization_binding, v="zeros", count="zero")
    return model


def features() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(4, 3, generator=generator), "target": torch.randn(4, 2, generator=generator)}


def torchs_steps(rates: list[float]) -> tuple[list[float], torch.Tensor]:
    """Losses before every step, and the weight after them."""
    weight = torch.from_numpy(WEIGHT.copy()).requires_grad_()
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    losses = []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = ((features()["x"] @ weight - features()["target"]) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, weight.detach()


def test_steps_equal_those_of_torch() -> None:
    """Stored values first, then those of the initialization graph; an input with an initializer may be overruled."""
    training = load_training_info(make_model())
    assert training.inputs == ("x", "target")
    assert training.outputs == ("loss", "w_new", "v_new", "count_new", "y")
    assert int(training.variables["count"]) == 7
    assert float(training.variables["v"].max()) == 9.0
    training.initialize()
    assert int(training.variables["count"]) == 0
    assert float(training.variables["v"].abs().max()) == 0.0
    losses, weight = torchs_steps([0.05] * 5 + [0.01] * 5)
    for step, expected in enumerate(losses):
        rate = {} if step < 5 else {"rate": torch.tensor(0.01)}
        results = training.step({**features(), **rate})
        assert float(results["loss"]) == pytest.approx(expected, rel=1e-5)
        assert results["y"].shape == (4, 2)
    torch.testing.assert_close(training.variables["w"], weight, rtol=1e-5, atol=1e-6)
    assert int(training.variables["count"]) == 10


def test_a_file_with_external_data(tmp_path: Path) -> None:
    onnx.save(make_model(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data")
    training = load_training_info(tmp_path / "m.onnx")
    training.initialize()
    for _ in range(3):
        training.step(features())
    torch.testing.assert_close(training.variables["w"], torchs_steps([0.05] * 3)[1], rtol=1e-5, atol=1e-6)


def test_several_algorithms_are_executed_one_after_the_other() -> None:
    """The second halves its own number, and reads the weight that the first has assigned."""
    model = make_model()
    second = model.training_info.add()
    second.algorithm.CopyFrom(
        helper.make_graph(
            [helper.make_node("Mul", ["c", "half"], ["c_new"]), helper.make_node("ReduceMax", ["w"], ["largest"])],
            "second",
            [],
            [info("c_new"), info("largest")],
            [numpy_helper.from_array(np.array(v, np.float32), n) for n, v in (("c", 8.0), ("half", 0.5))],
        )
    )
    bind(second.update_binding, c="c_new")
    training = load_training_info(model)
    training.initialize()
    results = training.step(features())
    assert float(training.variables["c"]) == 4.0
    assert float(results["largest"]) == float(training.variables["w"].max())


@pytest.mark.parametrize(("mode", "drops"), [(None, False), (False, False), (True, True)])
def test_dropout_does_what_its_node_says(mode: bool | None, drops: bool) -> None:
    inputs = ["h", "ratio"] + ([] if mode is None else ["mode"])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Dropout", inputs, ["y"])]
    constants = {"ratio": np.array(0.5, np.float32)} | ({} if mode is None else {"mode": np.array(mode)})
    training = load_training_info(make_model(nodes, **constants))
    torch.manual_seed(0)
    y = training.step(features())["y"]
    expected = features()["x"] @ torch.from_numpy(WEIGHT)
    assert bool((y == 0).any()) == drops
    if not drops:
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("training_mode", [0, 1])
def test_batch_normalization_does_what_its_node_says(training_mode: int) -> None:
    """Its stored statistics are not assigned to, since no binding says so."""
    names = ["scale", "shift", "mean", "variance"]
    outputs = ["y", "mean_new", "variance_new"][: 3 if training_mode else 1]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("BatchNormalization", ["h", *names], outputs, training_mode=training_mode),
    ]
    constants = {name: np.full(2, value, np.float32) for name, value in zip(names, (1, 0, 0.5, 4), strict=True)}
    training = load_training_info(make_model(nodes, **constants))
    h = features()["x"] @ torch.from_numpy(WEIGHT)
    mean, variance = (h.mean(0), h.var(0, correction=0)) if training_mode else (0.5, torch.tensor(4.0))
    for _ in range(2):  # the same again: nothing was updated
        y = training.step({**features(), "rate": torch.tensor(0.0)})["y"]
        torch.testing.assert_close(y, (h - mean) / torch.sqrt(variance + 1e-5), rtol=1e-5, atol=1e-6)


def test_inspection_says_that_a_model_carries_its_own_training() -> None:
    words = "the model has its own training_info"
    model = make_model()
    assert [note for note in make_training_graph(model).notes if note.startswith(words)]
    del model.training_info[:]
    assert not make_training_graph(model).notes


def broken(change: str) -> onnx.ModelProto:
    model = make_model()
    one = model.training_info[0]
    if change == "none":
        del model.training_info[:]
    elif change == "unknown variable":
        bind(one.update_binding, u="w_new")
    elif change == "unknown value":
        one.update_binding[0].value = "w_newer"
    elif change == "twice":
        bind(one.update_binding, w="v_new")
    elif change == "first value":
        one.initialization_binding[0].value = "ones"
    elif change == "initialization input":
        one.initialization.input.append(info("seed"))
    elif change == "computed twice":
        one.algorithm.node[0].output[0] = "y"
    elif change == "dangling":
        one.algorithm.node[0].input[0] = "z"
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("none", "carries no training_info (TrainingInfoProto). `onward export MODEL --run RUN.yaml --training-info"),
        ("unknown variable", "training_info[0]: update_binding assigns to 'u', which is no initializer of the model"),
        ("unknown value", "takes the new 'w' from 'w_newer', which is no output of the algorithm graph"),
        ("twice", "update_binding names 'w' twice; a variable is assigned at most once a step"),
        ("first value", "takes the new 'v' from 'ones', which is no output of the initialization graph"),
        ("initialization input", "its initialization graph has the input 'seed'; the standard gives it none"),
        (
            "computed twice",
            "training_info[0]: node 'y' (Sub) computes 'y', which is also an output of node 'y' (MatMul)",
        ),
        ("dangling", "(Sub) reads 'z' as input 0, which is neither an input, nor an initializer"),
    ],
)
def test_what_is_wrong_with_a_training_info_is_named(change: str, words: str) -> None:
    with pytest.raises(ModelError, match=re.escape(words)):
        load_training_info(broken(change))


def test_inputs_of_a_step_are_checked() -> None:
    training = load_training_info(make_model())
    with pytest.raises(ModelError, match="a step takes x, target; missing: target"):
        training.step({"x": features()["x"]})
    with pytest.raises(ModelError, match="a step has no input 'label'; it takes x, target"):
        training.step({**features(), "label": torch.zeros(1)})
    with pytest.raises(ModelError, match="input 'x' is float64; the model expects float32"):
        training.step({**features(), "x": features()["x"].double()})


def test_a_value_that_does_not_fit_its_variable_is_named() -> None:
    model = make_model()
    model.training_info[0].update_binding[0].value = "loss"
    training = load_training_info(model)
    with pytest.raises(
        ModelError, match=re.escape("assigns 'loss', float32 of shape [], to 'w', which is float32 of shape [3, 2]")
    ):
        training.step(features())
    torch.testing.assert_close(training.variables["w"], torch.from_numpy(WEIGHT))
