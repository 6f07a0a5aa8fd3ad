"""Every loss, at old and new opsets, is torch's own number when ONNX Runtime computes it, and torch's own gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from onward.errors import ModelError
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from tests.graph.loss_models import OPSETS, Shape, pass_through, run_loss

RELATIVE = 1e-6
RNG = np.random.default_rng(0)


def _logits(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape, scale=2.0).astype(np.float32)


def _close(value: np.ndarray, reference: torch.Tensor) -> None:
    assert value.shape == ()
    assert value.dtype == np.float32
    assert value == pytest.approx(float(reference), rel=RELATIVE)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [None, -100, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("opset", OPSETS)
def test_sparse_cross_entropy(opset: int, weighted: bool, ignore_index: int | None, reduction: str, tmp_path: Path):
    """Classes last, [batch, sequence, classes], with class weights and ignored labels."""
    logits = _logits(3, 5, 7)
    labels = RNG.integers(0, 7, size=(3, 5))
    if ignore_index is not None:
        labels[0, :3] = ignore_index
    weights = tuple(RNG.uniform(0.2, 2.0, size=7).astype(np.float32).tolist()) if weighted else None
    spec = LossSpec(
        type="softmax_cross_entropy", prediction="logits", label="labels",
        ignore_index=ignore_index, class_weights=weights, reduction=reduction,
    )  # fmt: skip
    outputs, names = run_loss(
        pass_through(opset, {"logits": ["batch", "sequence", 7]}),
        spec,
        {"logits_in": logits, "labels": labels},
        tmp_path,
    )
    reference = F.cross_entropy(
        torch.from_numpy(logits).reshape(-1, 7),
        torch.from_numpy(labels).reshape(-1),
        weight=torch.tensor(weights) if weighted else None,
        ignore_index=-100 if ignore_index is None else ignore_index,
        reduction=reduction,
    )
    _close(outputs["loss"], reference)
    kept = np.ones_like(labels, bool) if ignore_index is None else labels != ignore_index
    assert outputs[names.correct] == ((logits.argmax(-1) == labels) & kept).sum()
    assert outputs[names.counted] == kept.sum()


@pytest.mark.parametrize(
    ("sizes", "class_axis"),
    [
        ((4, 6), 1),
        ((4, 6), -1),
        ((6, 4), 0),
        ((2, 6, 3), 1),
        ((2, 6, 3, 4), 1),
        ((2, 3, 6, 4), 2),
        ((6, 2, 3), 0),
        ((6,), 0),
    ],
)
@pytest.mark.parametrize("opset", [7, 12, 13, 23])
@pytest.mark.parametrize("dense", [False, True])
def test_class_axis(opset: int, sizes: tuple[int, ...], class_axis: int, dense: bool, tmp_path: Path):
    """Classes on any axis, sparse and dense labels, all axes fixed."""
    logits = _logits(*sizes)
    rest = [size for axis, size in enumerate(sizes) if axis != class_axis % len(sizes)]
    moved = torch.from_numpy(logits).movedim(class_axis, -1).reshape(-1, 6)
    weights = tuple(RNG.uniform(0.5, 1.5, size=6).astype(np.float32).tolist())
    if dense:
        labels = RNG.dirichlet(np.ones(6), size=rest).astype(np.float32)
        reference = F.cross_entropy(moved, torch.from_numpy(labels).reshape(-1, 6), weight=torch.tensor(weights))
        labels = np.ascontiguousarray(np.moveaxis(labels, -1, class_axis))
    else:
        labels = RNG.integers(0, 6, size=rest)
        reference = F.cross_entropy(moved, torch.from_numpy(labels).reshape(-1), weight=torch.tensor(weights))
    spec = LossSpec(
        type="softmax_cross_entropy",
        prediction="logits",
        label="labels",
        class_axis=class_axis,
        class_weights=weights,
        dense_labels=dense,
    )
    feeds = {"logits_in": logits, "labels": labels}
    outputs, names = run_loss(pass_through(opset, {"logits": sizes}), spec, feeds, tmp_path)
    _close(outputs["loss"], reference)
    best = labels.argmax(class_axis) if dense else labels
    assert outputs[names.correct] == (logits.argmax(class_axis) == best).sum()
    assert outputs[names.counted] == best.size


@pytest.mark.parametrize("opset", [7, 11, 12, 18])
def test_out_of_range_label_is_never_a_plausible_number(opset: int, tmp_path: Path):
    """A label that is no class gives NaN where nodes are spelled out, and an error where the operator checks."""
    feeds = {"logits_in": _logits(3, 4), "labels": np.array([0, 9, 1])}
    spec = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels", ignore_index=1)
    model = pass_through(opset, {"logits": ["N", 4]})
    if opset < 12:
        assert np.isnan(run_loss(model, spec, feeds, tmp_path)[0]["loss"])
    else:
        from onward import to_torch

        write_model_with_loss(model, spec, tmp_path / "m.onnx")
        net = to_torch(tmp_path / "m.onnx")
        with pytest.raises(ModelError, match="label 9 is out of range for 4 classes"):
            net(torch.from_numpy(feeds["logits_in"]), torch.from_numpy(feeds["labels"]))


ELEMENTWISE = {
    "mean_squared_error": F.mse_loss,
    "l1": F.l1_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "logits": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("shape", "declared"), [(["batch", 4], True), ([6, 4], True), (["batch", 4], False)])
@pytest.mark.parametrize("kind", list(ELEMENTWISE))
@pytest.mark.parametrize("opset", OPSETS)
def test_elementwise_losses(opset: int, kind: str, shape: Shape, declared: bool, reduction: str, tmp_path: Path):
    """Squared and absolute error and both binary cross entropies; probabilities of exactly 0 and 1 included."""
    prediction = _logits(6, 4)
    labels = RNG.uniform(size=(6, 4)).astype(np.float32)
    if kind == "binary_cross_entropy":
        prediction = 1 / (1 + np.exp(-prediction))
        prediction[0, :2], labels[0, :2] = (0.0, 1.0), (0.75, 0.0)
    if kind == "logits":
        prediction[0] = [0.0, 90.0, -90.0, 30.0]
    spec = LossSpec(
        type="binary_cross_entropy" if kind == "logits" else kind,
        prediction="out", label="target", reduction=reduction, from_logits=kind == "logits",
    )  # fmt: skip
    model = pass_through(opset, {"out": shape}, declare_shapes=declared)
    outputs, _ = run_loss(model, spec, {"out_in": prediction, "target": labels}, tmp_path)
    reference = ELEMENTWISE[kind](torch.from_numpy(prediction), torch.from_numpy(labels), reduction=reduction)
    _close(outputs["loss"], reference)


@pytest.mark.parametrize("opset", OPSETS)
def test_bert_loss(opset: int, tmp_path: Path):
    """Masked language model (padding id 0 ignored) plus next sentence, by torch's cross entropy on gathered rows."""
    logits, pair = _logits(2, 6, 11), _logits(2, 2)
    positions = np.array([[1, 4, 0], [5, 2, 2]])
    ids = np.array([[3, 10, 0], [1, 7, 0]])
    next_sentence = np.array([1, 0])
    sequence = 6 if opset < 11 else "sequence"
    model = pass_through(opset, {"output1": ["batch", sequence, 11], "output2": ["batch", 2]})
    feeds = {
        "output1_in": logits, "output2_in": pair,
        "masked_lm_positions": positions, "masked_lm_ids": ids, "next_sentence_labels": next_sentence,
    }  # fmt: skip
    outputs, names = run_loss(model, LossSpec(type="bert"), feeds, tmp_path)
    gathered = torch.from_numpy(np.take_along_axis(logits, positions[..., None], axis=1))
    mlm = F.cross_entropy(gathered.reshape(-1, 11), torch.from_numpy(ids).reshape(-1), ignore_index=0)
    nsp = F.cross_entropy(torch.from_numpy(pair), torch.from_numpy(next_sentence))
    assert names.parts == ("mlm_loss", "nsp_loss")
    _close(outputs["mlm_loss"], mlm)
    _close(outputs["nsp_loss"], nsp)
    _close(outputs["total_loss"], mlm + nsp)


@pytest.mark.parametrize("opset", [7, 13, 18])
@pytest.mark.parametrize("shape", [[], [1], ["batch"]])
def test_an_output_of_the_model_is_the_loss(opset: int, shape: Shape, tmp_path: Path):
    """A rank-0 float32 output is used as it is; anything else is reduced."""
    value = np.array([0.5, 2.0], np.float32) if shape == ["batch"] else np.full(shape, 0.5, np.float32)
    outputs, names = run_loss(
        pass_through(opset, {"cost": shape}), LossSpec(type="output", prediction="cost"), {"cost_in": value}, tmp_path
    )
    assert names.loss == ("cost" if shape == [] else "loss")
    assert outputs[names.loss] == pytest.approx(value.mean(), rel=RELATIVE)


@pytest.mark.parametrize(
    ("shape", "reduction", "words"),
    [
        ([], "mean", None),
        ([1], "mean", None),
        (["batch"], "mean", "has shape [batch]: the mean of its numbers is minimized. If they are predictions, choose"),
        (["batch", 10], "sum", "'cost' has shape [batch, 10]: the sum of its numbers is minimized."),
    ],
)
def test_an_output_of_several_numbers_is_reported(shape: Shape, reduction: str, words: str | None):
    """Predictions that are taken for a loss train, too: to minus infinity."""
    notes = make_training_graph(
        pass_through(18, {"cost": shape}), loss=LossSpec(type="output", prediction="cost", reduction=reduction)
    ).notes
    assert [words in note for note in notes] == ([] if words is None else [True])


@pytest.mark.parametrize("element_type", [TensorProto.FLOAT16, TensorProto.DOUBLE])
@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("kind", ["softmax_cross_entropy", "mean_squared_error"])
def test_the_loss_is_float32_for_every_type_of_model(element_type: int, opset: int, kind: str, tmp_path: Path):
    """fp16 predictions are cast up before the loss, float64 ones computed as they are; the loss is float32."""
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    prediction = _logits(5, 3).astype(dtype)
    wide = torch.from_numpy(prediction).to(torch.float32 if dtype == np.float16 else torch.float64)
    if kind == "softmax_cross_entropy":
        labels = RNG.integers(0, 3, size=5)
        reference = F.cross_entropy(wide, torch.from_numpy(labels))
    else:
        labels = RNG.normal(size=(5, 3)).astype(np.float32 if dtype == np.float16 else np.float64)
        reference = F.mse_loss(wide, torch.from_numpy(labels))
    model = pass_through(opset, {"y": ["N", 3]}, element_type)
    outputs, _ = run_loss(
        model, LossSpec(type=kind, prediction="y", label="t"), {"y_in": prediction, "t": labels}, tmp_path
    )
    _close(outputs["loss"], reference)


def test_column_labels_do_not_broadcast(tmp_path: Path):
    """A [batch] feature against a [batch, 1] prediction is compared row by row, not as [batch, batch]."""
    from onward import to_torch

    write_model_with_loss(
        pass_through(13, {"y": ["N", 1]}),
        LossSpec(type="mean_squared_error", prediction="y", label="t"),
        tmp_path / "m.onnx",
    )
    net = to_torch(tmp_path / "m.onnx")
    prediction, target = torch.randn(4, 1), torch.randn(4)
    loss = net(prediction, target)[-1]
    assert torch.allclose(loss, F.mse_loss(prediction[:, 0], target), rtol=RELATIVE)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("kind", ["sparse", "dense", "mse", "l1", "bce", "bce_logits"])
def test_gradients_are_those_of_torch(opset: int, kind: str, tmp_path: Path):
    """Through onward.to_torch, the gradient of each loss in its prediction, at saturated points too."""
    from onward import to_torch

    prediction = torch.from_numpy(_logits(4, 5))
    prediction[0, :2] = 0.0
    labels = torch.from_numpy(RNG.uniform(size=(4, 5)).astype(np.float32))
    if kind == "bce":
        prediction = prediction.sigmoid()
    if kind == "dense":
        labels = labels / labels.sum(1, keepdim=True)
    if kind == "sparse":
        labels = torch.tensor([0, 4, 2, 2])
    spec, reference = {
        "sparse": (LossSpec(type="softmax_cross_entropy", prediction="y", label="t"), F.cross_entropy),
        "dense": (
            LossSpec(type="softmax_cross_entropy", prediction="y", label="t", dense_labels=True),
            F.cross_entropy,
        ),
        "mse": (LossSpec(type="mean_squared_error", prediction="y", label="t"), F.mse_loss),
        "l1": (LossSpec(type="l1", prediction="y", label="t"), F.l1_loss),
        "bce": (LossSpec(type="binary_cross_entropy", prediction="y", label="t"), F.binary_cross_entropy),
        "bce_logits": (
            LossSpec(type="binary_cross_entropy", prediction="y", label="t", from_logits=True),
            F.binary_cross_entropy_with_logits,
        ),
    }[kind]
    write_model_with_loss(pass_through(opset, {"y": ["N", 5]}), spec, tmp_path / "m.onnx")
    net = to_torch(tmp_path / "m.onnx")
    ours, theirs = prediction.clone().requires_grad_(), prediction.clone().requires_grad_()
    net(ours, labels)[1].backward()
    reference(theirs, labels).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_a_saturated_probability_gives_no_nan(tmp_path: Path):
    """sigmoid(200) is exactly 1: torch's loss of 100, and a finite gradient in the logit."""
    from onward import to_torch

    write_model_with_loss(
        pass_through(13, {"y": ["N"]}),
        LossSpec(type="binary_cross_entropy", prediction="y", label="t"),
        tmp_path / "m.onnx",
    )
    net = to_torch(tmp_path / "m.onnx")
    logit = torch.tensor([200.0, -200.0], requires_grad=True)
    loss = net(logit.sigmoid(), torch.tensor([0.0, 1.0]))[1]
    loss.backward()
    assert loss.item() == pytest.approx(100.0)
    assert torch.equal(logit.grad, torch.zeros(2))
