"""Softmax cross entropy and negative log likelihood against torch and onnxruntime; gradients; what they refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

import onward
from onward.errors import ModelError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run

RANDOM = np.random.default_rng(0)
SHAPES = [(4, 5), (2, 5, 3), (2, 5, 3, 2), (2, 5, 2, 1, 3)]


def _case(shape: tuple[int, ...], ignored: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scores = RANDOM.standard_normal(shape)
    labels = RANDOM.integers(0, shape[1], (shape[0], *shape[2:]))
    if ignored is not None:
        labels.flat[::3] = ignored
    return scores, labels, RANDOM.uniform(0.5, 2.0, shape[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignored", [None, 2, -1])
@pytest.mark.parametrize("weighted", [False, True])
def test_values_and_gradients(shape: tuple[int, ...], reduction: str, ignored: int | None, weighted: bool) -> None:
    """Equal to onnxruntime's in float32; finite differences in float64; with and without the log probabilities."""
    scores, labels, weights = _case(shape, ignored)
    attributes: dict[str, Any] = {"reduction": reduction}
    if ignored is not None:
        attributes["ignore_index"] = ignored
    given = [scores, labels] + ([weights] if weighted else [])
    inputs = dict(zip(("scores", "labels", "weights"), given, strict=False))
    single = [value.astype(np.float32) if value.dtype == np.float64 else value for value in given]
    types = dict(zip(inputs, single, strict=True))
    for opset in (12, 13):
        check_against_onnxruntime(make_model("SoftmaxCrossEntropyLoss", types, attributes, opset), *single)
    both = make_model("SoftmaxCrossEntropyLoss", types, attributes, 13, output_count=2)
    check_against_onnxruntime(both, *single)
    likelihood = make_model("NegativeLogLikelihoodLoss", types, attributes, 13)
    check_against_onnxruntime(likelihood, *single)
    if weighted or len(shape) < 4:
        check_gradients(make_model("SoftmaxCrossEntropyLoss", inputs, attributes, 13), *given)
        two = make_model("SoftmaxCrossEntropyLoss", inputs, attributes, 13, output_count=2)
        check_gradients(two, *given, outputs=(0, 1))
        check_gradients(make_model("NegativeLogLikelihoodLoss", inputs, attributes, 22), *given)


def test_classes_last_in_memory_are_used_as_they_are() -> None:
    """Scores [N, C, d] that are a transposed view give the same loss and gradient as contiguous ones."""
    base = torch.randn(3, 4, 7, requires_grad=True)
    labels = torch.randint(0, 7, (3, 4))
    view = base.transpose(1, 2)
    for reduction in ("none", "mean"):
        model = make_model("SoftmaxCrossEntropyLoss", {"scores": view, "labels": labels}, {"reduction": reduction}, 13)
        loss = run(model, view, labels)
        expected = F.cross_entropy(view, labels, reduction=reduction)
        torch.testing.assert_close(loss, expected)
        (gradient,) = torch.autograd.grad(loss.sum(), base)
        (reference,) = torch.autograd.grad(expected.sum(), base)
        torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_normalized_in_float32(dtype: torch.dtype) -> None:
    """The loss differs from the float32 loss of the same scores by no more than one rounding."""
    scores, labels = (torch.randn(64, 1000) * 5).to(dtype), torch.randint(0, 1000, (64,))
    loss = run(make_model("SoftmaxCrossEntropyLoss", {"scores": scores, "labels": labels}, {}, 13), scores, labels)
    assert loss.dtype == dtype
    expected = F.cross_entropy(scores.float(), labels)
    assert abs(loss.float() - expected) <= torch.finfo(dtype).eps / 2 * expected * 1.01


def test_a_label_of_minus_100_is_not_ignored_unless_asked_for() -> None:
    """torch ignores -100 by default, the standard nothing."""
    scores, labels = torch.randn(2, 3), torch.tensor([0, -100])
    with pytest.raises(ModelError, match="label -100 is out of range for 3 classes"):
        run(make_model("SoftmaxCrossEntropyLoss", {"scores": scores, "labels": labels}, {}, 13), scores, labels)
    model = make_model("SoftmaxCrossEntropyLoss", {"scores": scores, "labels": labels}, {"ignore_index": -100}, 13)
    torch.testing.assert_close(run(model, scores, labels), F.cross_entropy(scores, labels))


def test_mean_over_no_label_is_nan_as_in_onnxruntime_with_a_gradient_of_zero() -> None:
    scores, labels = torch.randn(2, 3, requires_grad=True), torch.tensor([1, 1])
    model = make_model("SoftmaxCrossEntropyLoss", {"scores": scores, "labels": labels}, {"ignore_index": 1}, 13)
    check_against_onnxruntime(model, scores.detach(), labels)
    loss = run(model, scores, labels)
    assert torch.isnan(loss)
    loss.backward()
    assert torch.equal(scores.grad, torch.zeros(2, 3))


def test_int32_labels() -> None:
    scores, labels = torch.randn(2, 3), torch.tensor([2, 0], dtype=torch.int32)
    loss = run(make_model("SoftmaxCrossEntropyLoss", {"scores": scores, "labels": labels}, {}, 13), scores, labels)
    torch.testing.assert_close(loss, F.cross_entropy(scores, labels.long()))


REFUSED = [
    (
        (4, 10),
        [1, 12, 3, 99],
        {},
        "label 12 is out of range for 10 classes (0 to 9; no label is ignored); 2 of 4 labels are, the first at [1]",
    ),
    (
        (4, 10),
        [1, -1, 3, 9],
        {"ignore_index": 7},
        "label -1 is out of range for 10 classes (0 to 9; only 7 is ignored)",
    ),
    ((4, 10), [1, 2, 3], {}, "labels are [3]; with scores [4, 10], classes on axis 1, they must be [4]"),
    ((4,), [1, 2, 3, 0], {}, "scores are [4]; expected [N, C] or [N, C, d1, ...]"),
    ((4, 10), [1, 2, 3, 0], {"reduction": "average"}, "reduction is 'average'; it must be one of none, sum, mean"),
]


@pytest.mark.parametrize(("shape", "labels", "attributes", "words"), REFUSED)
@pytest.mark.parametrize("op_type", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_refused_in_words(
    shape: tuple, labels: list[int], attributes: dict[str, Any], words: str, op_type: str
) -> None:
    scores, given = np.zeros(shape, np.float32), np.array(labels)
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        run(make_model(op_type, {"scores": scores, "labels": given}, attributes, 13), scores, given)
    assert f"node 'node' ({op_type})" in str(caught.value)


def test_class_weights_of_the_wrong_length() -> None:
    scores, labels, weights = np.zeros((2, 3), np.float32), np.array([0, 1]), np.ones(4, np.float32)
    model = make_model("SoftmaxCrossEntropyLoss", {"s": scores, "l": labels, "w": weights}, {}, 13)
    with pytest.raises(ModelError, match=re.escape("class weights are [4]; 3 classes need [3]")):
        run(model, scores, labels, weights)


def _compiled(model: onnx.ModelProto, *inputs: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(onward.to_torch(model), fullgraph=True, backend="eager")(*inputs)


def test_traced_without_a_break() -> None:
    scores, labels = torch.randn(4, 5), torch.randint(0, 5, (4,))
    model = make_model("SoftmaxCrossEntropyLoss", {"scores": scores, "labels": labels}, {"ignore_index": -1}, 13)
    torch.testing.assert_close(_compiled(model, scores, labels), F.cross_entropy(scores, labels))
