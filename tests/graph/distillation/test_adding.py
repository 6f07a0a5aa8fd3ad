"""Distillation: equal to a torch loop by hand, in every layout, with any teacher; the export is the student alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as torch_functions

from onward.artifacts.trained_model import export_checkpoint
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast.plan_forecast import forecast
from onward.errors import ModelError
from onward.parameters import Parameters
from onward.plan.topology import Topology
from onward.runner import TrainingRunner
from tests.graph.exported import export
from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, tensor_difference, train
from tests.invariants.rank_pool import end_ranks
from tests.mlp import FEATURES, HIDDEN, batches_of, build_mlp, data, start, weights, write_sgd_run
from tests.parameters.test_checks import refusal

TEMPERATURE, ALPHA = 3.0, 0.7


def build_teacher(
    *, softmax: bool = False, dtype: type = np.float32, opset: int = 17, extra: str = ""
) -> onnx.ModelProto:
    """`x [batch, 6]` -> 16 features, normalized and with dropout -> `scores [batch, 4]`; maybe probabilities."""
    draw = np.random.default_rng(5).standard_normal
    tensors = {
        "w1": draw((FEATURES, HIDDEN)), "b1": draw(HIDDEN), "scale": np.ones(HIDDEN), "shift": np.zeros(HIDDEN),
        "mean": draw(HIDDEN) / 9, "var": np.full(HIDDEN, 2.0), "w2": draw((HIDDEN, 4)), "b2": draw(4),
    }  # fmt: skip
    last = "scores_before" if softmax else "scores"
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h1"], name="first"),
        helper.make_node("BatchNormalization", ["h1", "scale", "shift", "mean", "var"], ["normed"], name="norm"),
        helper.make_node("Tanh", ["normed"], ["hidden"], name="tanh"),
        helper.make_node("Dropout", ["hidden"], ["kept"], name="dropout"),
        helper.make_node("Gemm", ["kept", "w2", "b2"], [last], name="second"),
    ]
    inputs = ["x"]
    if softmax:
        nodes.append(helper.make_node("Softmax", [last], ["scores"], axis=-1, name="softmax"))
    if extra:
        nodes[-1].output[0] = "scores_alone"
        nodes.append(helper.make_node("Add", ["scores_alone", extra], ["scores"], name="shifted"))
        inputs.append(extra)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "teacher",
        [helper.make_tensor_value_info(name, kind, ["n", FEATURES if name == "x" else 4]) for name in inputs],
        [helper.make_tensor_value_info("scores", kind, ["n", 4])],
        [numpy_helper.from_array(array.astype(dtype), name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def save_teacher(folder: Path, **options: Any) -> Path:
    onnx.save(build_teacher(**options), folder / "teacher.onnx")
    return folder / "teacher.onnx"


def build_wide_teacher() -> onnx.ModelProto:
    """The same with hidden features of another width: 12."""
    model = build_teacher()
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if HIDDEN not in array.shape:
            continue
        axis = array.shape.index(HIDDEN)
        wide = np.concatenate([array, array.take(range(4), axis) / 2], axis)
        tensor.CopyFrom(numpy_helper.from_array(wide.astype(np.float32), tensor.name))
    return model


def teach(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher by torch: hidden values and logits."""
    t = {one.name: torch.tensor(numpy_helper.to_array(one)).to(dtype) for one in build_teacher().graph.initializer}
    normed = torch_functions.batch_norm(x.to(dtype) @ t["w1"] + t["b1"], t["mean"], t["var"], t["scale"], t["shift"])
    hidden = torch.tanh(normed)
    return hidden.float(), (hidden @ t["w2"] + t["b2"]).float()


def by_hand(updates: int, asked: Mapping[str, Any], ignored: int | None = None) -> dict[str, torch.Tensor]:
    """The student's weights after plain SGD on the sum of the losses, written with torch's own functions."""
    held = {name: torch.tensor(array, requires_grad=True) for name, array in weights().items()}
    optimizer = torch.optim.SGD(held.values(), lr=0.1)
    for batch in batches_of(data(4 * updates), 4):
        x, label = torch.from_numpy(batch["x"]), torch.from_numpy(batch["label"])
        with torch.no_grad():
            taught_hidden, taught = teach(x)
        hidden = torch.relu(x @ held["w1"] + held["b1"])
        logits = hidden @ held["w2"] + held["b2"]
        counts = torch.ones(len(label), dtype=torch.bool) if ignored is None else label != ignored
        soft = torch_functions.kl_div(
            torch_functions.log_softmax(logits[counts] / TEMPERATURE, 1),
            torch_functions.log_softmax(taught[counts] / TEMPERATURE, 1),
            reduction="batchmean", log_target=True,
        )  # fmt: skip
        hard = torch_functions.cross_entropy(logits, label, ignore_index=-100 if ignored is None else ignored)
        loss = (1 - asked["alpha"]) * hard + asked["alpha"] * TEMPERATURE**2 * soft
        if asked.get("pairs"):
            loss = loss + asked["pairs_weight"] * torch_functions.mse_loss(hidden, taught_hidden)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in held.items()}


def distilled(folder: Path, teacher: Path, loss: Mapping[str, Any] | None = None, **asked: Any) -> TrainingRunner:
    section = {"teacher_path": teacher, "temperature": TEMPERATURE, "alpha": ALPHA, **asked}
    more = (
        {}
        if loss is None
        else {"loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label", **loss}}
    )
    runner, _ = start(folder, distillation=section, training={"num_train_steps": 20},
                      paths={"output_dir": folder / "out"}, **more)  # fmt: skip
    runner.run(InMemoryDataLoader(data(80)))
    return runner


def assert_weights(runner: TrainingRunner, expected: Mapping[str, torch.Tensor], bound: float = 1e-5) -> None:
    assert runner.net.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(runner.net.weights[name].detach(), tensor, rtol=bound, atol=bound)


@pytest.mark.parametrize("with_pairs", [False, True], ids=["soft targets", "and pairs"])
def test_twenty_updates_equal_a_loop_by_hand(tmp_path: Path, with_pairs: bool) -> None:
    """A teacher with batch normalization and dropout, which stay in inference mode; and what is exported."""
    pairs = {"pairs": {"active": "hidden"}, "pairs_weight": 0.5} if with_pairs else {}
    runner = distilled(tmp_path, save_teacher(tmp_path), **pairs)
    assert_weights(runner, by_hand(20, {"alpha": ALPHA, **pairs}))
    report = runner.end_training(InMemoryDataLoader(data(16)))
    assert report is not None
    shares = {"label_loss": 1 - ALPHA, "soft_loss": ALPHA * TEMPERATURE**2}
    shares |= {"pairs_loss": 0.5} if with_pairs else {}
    assert report.metrics.keys() == {"loss", "accuracy", *shares}
    total = sum(report.metrics[name] * share for name, share in shares.items())
    assert report.metrics["loss"] == pytest.approx(total, rel=1e-6)
    written, given = onnx.load(tmp_path / "out" / "mlp_trained.onnx"), build_mlp()
    for one in (written, given):
        del one.graph.initializer[:], one.graph.value_info[:]
    assert written.graph == given.graph


def test_features_of_another_width_are_projected(tmp_path: Path) -> None:
    """Twenty updates of student and projection equal a loop by hand; the exported model is the student alone."""
    onnx.save(build_wide_teacher(), tmp_path / "teacher.onnx")
    checkpoints = {"checkpoints_dir": tmp_path / "checkpoints"}
    asked = {"pairs": {"active": "hidden"}, "pairs_weight": 0.5}
    section = {"teacher_path": tmp_path / "teacher.onnx", "alpha": 0.0, **asked}
    runner, _ = start(tmp_path, distillation=section, training={"num_train_steps": 20}, checkpoint=checkpoints,
                      paths={"output_dir": tmp_path / "out"}, averaging={"kind": "ema"})  # fmt: skip
    name = "distillation.projection/active"
    held = {key: weight.detach().clone().requires_grad_() for key, weight in runner.net.weights.items()}
    assert held.keys() == {*weights(), name}
    assert held[name].shape == (HIDDEN, 12)
    assert 0.2 < float(held[name].abs().max()) < HIDDEN**-0.5
    runner.run(InMemoryDataLoader(data(80)))
    session = onnxruntime.InferenceSession(with_output(tmp_path / "teacher.onnx", "hidden"))
    optimizer = torch.optim.SGD(held.values(), lr=0.1)
    for batch in batches_of(data(80), 4):
        x, label = torch.from_numpy(batch["x"]), torch.from_numpy(batch["label"])
        taught = torch.from_numpy(session.run(["hidden"], {"x": batch["x"]})[0])
        hidden = torch.relu(x @ held["w1"] + held["b1"])
        loss = torch_functions.cross_entropy(hidden @ held["w2"] + held["b2"], label)
        loss = loss + 0.5 * torch_functions.mse_loss(hidden @ held[name], taught)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_weights(runner, {key: tensor.detach() for key, tensor in held.items()})
    runner.end_training()
    written, given = onnx.load(tmp_path / "out" / "mlp_trained.onnx"), build_mlp()
    assert [one.name for one in written.graph.initializer] == [one.name for one in given.graph.initializer]
    assert written.graph.node == given.graph.node
    export_checkpoint(tmp_path / "mlp.onnx", tmp_path / "checkpoints", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "out" / "mlp_trained.onnx").read_bytes()


def with_output(path: Path, name: str) -> bytes:
    model = onnx.load(path)
    model.graph.output.append(onnx.ValueInfoProto(name=name))
    return model.SerializeToString()


def test_channels_are_projected(tmp_path: Path) -> None:
    """The one axis that differs, wherever it is: a convolution of one by one."""
    x = torch.rand(4, 1, 6, 6)
    shallow, deep = nn.Conv2d(1, 3, 3), nn.Conv2d(1, 5, 3)
    names = {"input_names": ["images"], "output_names": ["maps"], "dynamic_axes": {"images": {0: "n"}}}
    for module, name in ((shallow, "mlp"), (deep, "teacher")):
        export(module.eval(), (x,), tmp_path / f"{name}.onnx", 17, False, **names)
    squares = {"type": "mean_squared_error", "prediction": "maps", "label": "target"}
    asked = {"teacher_path": tmp_path / "teacher.onnx", "alpha": 0.0, "pairs": {"maps": "maps"}}
    runner, _ = start(tmp_path, distillation=asked, loss=squares)
    report = runner.evaluate(InMemoryDataLoader({"images": x.numpy(), "target": np.zeros((4, 3, 4, 4), np.float32)}))
    projection = runner.net.weights["distillation.projection/maps"]
    projected = torch_functions.conv2d(shallow(x), projection.T[:, :, None, None])
    expected = float(torch_functions.mse_loss(projected, deep(x)))
    assert report.metrics["pairs_loss"] == pytest.approx(expected, rel=1e-5)
    export(nn.Conv2d(1, 5, 2).eval(), (x,), tmp_path / "teacher.onnx", 17, False, **names)
    words = (
        "distillation.pairs: 'maps' of the student is [n, 3, 4, 4], but 'maps' of the teacher [n, 5, 5, 5]. Choose "
        "values whose shapes are the same, or differ in one axis, for which a projection is learned."
    )
    with pytest.raises(ModelError, match=re.escape(words)):
        start(tmp_path, distillation=asked, loss=squares)


@pytest.mark.parametrize("options", [{"softmax": True}, {"opset": 13}, {"dtype": np.float64}, {"dtype": np.float16}],
                         ids=str)  # fmt: skip
def test_any_teacher(tmp_path: Path, options: dict[str, Any]) -> None:
    """Probabilities at its end, another opset, another type, in which it is computed."""
    runner = distilled(tmp_path, save_teacher(tmp_path, **options))
    bound = 1e-5 if options.get("dtype") is not np.float16 else 5e-3
    assert_weights(runner, by_hand(20, {"alpha": ALPHA}), bound)
    if "dtype" in options:
        kinds = {
            value.dtype for value in runner.graph.model.graph.initializers.values() if "teacher/w" in str(value.name)
        }
        assert kinds == {ir.DataType.DOUBLE if options["dtype"] is np.float64 else ir.DataType.FLOAT16}


def test_labels_that_do_not_count_have_no_soft_targets(tmp_path: Path) -> None:
    runner = distilled(tmp_path, save_teacher(tmp_path), {"ignore_index": 2})
    assert_weights(runner, by_hand(20, {"alpha": ALPHA}, ignored=2))


def test_a_label_weighs_its_soft_targets_too(tmp_path: Path) -> None:
    """With all of the weight on two classes, the others count nothing."""
    weighted = distilled(tmp_path, save_teacher(tmp_path), {"class_weights": [0.0, 1.0, 1.0, 1.0]})
    ignoring = distilled(tmp_path, tmp_path / "teacher.onnx", {"ignore_index": 0})
    assert_weights(weighted, {name: weight.detach() for name, weight in ignoring.net.weights.items()})


def test_an_input_that_only_the_teacher_has_is_a_feature(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path, extra="hint")
    runner, recorder = start(tmp_path, distillation={"teacher_path": teacher})
    assert runner.graph.loss_names is not None
    assert runner.graph.loss_names.labels == ("label", "hint")
    runner.run(InMemoryDataLoader({**data(32), "hint": np.zeros((32, 4), np.float32)}))
    assert any("the teacher 'teacher.onnx' with 124 parameters in 8 tensors" in text for text in recorder.messages)


def test_distillation_of_a_regression_by_pairs(tmp_path: Path) -> None:
    squares = {"type": "mean_squared_error", "prediction": "logits", "label": "target"}
    asked = {"teacher_path": save_teacher(tmp_path), "alpha": 0.0, "pairs": {"logits": "scores"}, "pairs_weight": 2.0}
    runner, _ = start(tmp_path, distillation=asked, loss=squares)
    report = runner.evaluate(InMemoryDataLoader(data(16)))
    x = torch.from_numpy(data(16)["x"])
    held = {name: weight.detach() for name, weight in runner.net.weights.items()}
    logits = torch.relu(x @ held["w1"] + held["b1"]) @ held["w2"] + held["b2"]
    expected = torch_functions.mse_loss(logits, teach(x)[1])
    assert report.metrics["pairs_loss"] == pytest.approx(float(expected), rel=1e-5)
    total = report.metrics["label_loss"] + 2 * report.metrics["pairs_loss"]
    assert report.metrics["loss"] == pytest.approx(total, rel=1e-6)


# -------------------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "replicas": Layout(2, 1, 1),
    "replicas, ZeRO 3": Layout(2, 1, 1, {"zero_stage": 3}),
    "tensor parallel": Layout(1, 2, 1),
    "pipeline": Layout(1, 1, 2),
}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "teacher.onnx"
    model = CASES["tied_words"].model()
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.Tensor(value.const_value.numpy() * np.float32(1.5), name=value.name)
    ir.save(model, path)
    return path


PAIRS = {"pairs": {"normed": "normed", "bent0": "wide_sum0", "bent1": "embedded"}, "pairs_weight": 0.1}
"""The last one is projected."""


def spread(layout: Layout, teacher: Path, **options: Any) -> Result:
    asked = {"teacher_path": str(teacher), **PAIRS}
    given: dict[str, Any] = {"accumulation": 2, "test_samples": 5, **options}
    return train(CASES["tied_words"], layout, sections={"distillation": asked}, **given)


@pytest.fixture(scope="module")
def one_process(teacher: Path) -> Result:
    return spread(Layout(), teacher)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_follows_one_process(name: str, one_process: Result, teacher: Path) -> None:
    """Replicas count unequal numbers of labels, by which the label's losses are weighed and the pairs' are not."""
    actual = spread(LAYOUTS[name], teacher)
    assert "weights/distillation.projection/bent1" in actual.tensors
    assert tensor_difference(actual, one_process, ("weights/",)) < 5e-6
    assert actual.losses == pytest.approx(one_process.losses, rel=1e-6)
    assert actual.metrics[-1] == pytest.approx(one_process.metrics[-1], rel=1e-5)
    assert actual.metrics[-1]["soft_loss"] > 0


def test_accumulated_micro_batches_are_one_batch(one_process: Result, teacher: Path) -> None:
    """Of unequal numbers of labels."""
    expected = spread(Layout(), teacher, global_batch=16, accumulation=1)
    assert tensor_difference(one_process, expected, ("weights/",)) < 5e-6
    assert one_process.losses == pytest.approx(expected.losses, rel=1e-6)


def test_a_plan_forecasts_the_teacher(tmp_path: Path) -> None:
    run = write_sgd_run(tmp_path, loss={"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"})
    constants = []
    for fields in ({}, {"distillation.teacher_path": str(save_teacher(tmp_path))}):
        asked = Parameters.load(run, fields)
        graph = read_training_graph(asked)
        found = forecast(asked, graph, plan_run(asked, Topology(), graph, {}))
        assert not found.footprints[0].problem
        constants.append(found.ranks[0].memory.kinds["constants"])
    assert constants[1] - constants[0] == pytest.approx(4 * 124, abs=64)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"teacher_logits": "score"},
            "distillation.teacher_logits is 'score', which is no value of distillation.teacher_path",
        ),
        ({"pairs": {"h2": "hidden"}}, "distillation.pairs names 'h2', which is no value of the trained model."),
        ({"pairs": {"active": "hiden"}}, "distillation.pairs['active'] is 'hiden', which is no value of"),
    ],
)
def test_values_that_are_not_there_or_do_not_fit(tmp_path: Path, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        start(tmp_path, distillation={"teacher_path": save_teacher(tmp_path), **asked})
    assert words in str(caught.value)


def test_a_teacher_of_other_inputs(tmp_path: Path) -> None:
    model = build_teacher()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    onnx.save(model, tmp_path / "teacher.onnx")
    with pytest.raises(ModelError, match=r"its input 'x' is \[n, 5\], but the trained model's is \[batch, 6\]"):
        start(tmp_path, distillation={"teacher_path": tmp_path / "teacher.onnx"})
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    onnx.save(model, tmp_path / "teacher.onnx")
    with pytest.raises(ModelError, match="its input 'x' is"):
        start(tmp_path, distillation={"teacher_path": tmp_path / "teacher.onnx"})


def test_a_teacher_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.onnx"):
        start(tmp_path, distillation={"teacher_path": tmp_path / "none.onnx"})


@pytest.mark.parametrize(
    ("asked", "loss", "words"),
    [
        (
            {"alpha": 0.5},
            {"type": "l1", "prediction": "p", "label": "t"},
            "distillation.alpha is 0.5, but loss.type 'l1' has no class probabilities; set it to 0 and give "
            "distillation.pairs, or use loss.type 'softmax_cross_entropy'.",
        ),
        (
            {"alpha": 0.0},
            {"type": "l1", "prediction": "p", "label": "t"},
            "distillation.alpha is 0 and distillation.pairs is empty, so that nothing is learned from the teacher",
        ),
        ({}, {"type": "bert", "prediction": None, "label": None}, "a loss of type 'bert' cannot be distilled"),
        ({"temperature": 0.0}, {}, "distillation.temperature is 0.0"),
        ({"alpha": 1.5}, {}, "distillation.alpha is 1.5"),
        ({"teacher_path": "m.onnx"}, {}, "distillation.teacher_path is the trained model itself; give another file."),
    ],
)
def test_what_is_refused(asked: dict[str, Any], loss: dict[str, Any], words: str) -> None:
    assert words in refusal(distillation={"teacher_path": "t.onnx", **asked}, loss=loss)
