"""Linear models of ai.onnx.ml, Scaler included, as matmuls and sums with trainable weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.classical.rewriting import DOMAIN, NodeRewriter

TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")
"""The values of the attribute `post_transform`."""


def rewrite_scaler(at: NodeRewriter) -> None:
    """`(x - offset) * scale`, with one number for every feature or one for all."""
    value = at.float_input()
    for attribute, operator in (("offset", "Sub"), ("scale", "Mul")):
        count = len(at.floats(attribute))
        if count:
            value = at.apply(operator, value, at.weight(attribute, (count,)))
    at.finish(value)


def rewrite_linear_regressor(at: NodeRewriter) -> None:
    """`x coefficients^T + intercepts`; onnxruntime leaves a single target as it is but for PROBIT."""
    targets = at.integer("targets", 1)
    scores = linear_scores(at, targets)
    transform = post_transform(at)
    if targets == 1 and transform != "PROBIT":
        transform = "NONE"
    at.finish(transformed(at, scores, transform), width=targets)


def rewrite_linear_classifier(at: NodeRewriter) -> None:
    """A score for every class and the label of the highest; a single score stands for two classes."""
    classes = len(at.floats("intercepts")) or len(at.ints("classlabels_ints")) or len(at.strings("classlabels_strings"))
    scores = linear_scores(at, classes)
    transform = post_transform(at)
    named = len(at.ints("classlabels_ints")) or len(at.strings("classlabels_strings"))
    labels: ir.Value | None = None
    if at.is_used(0):
        known = at.ints("classlabels_ints")
        if classes == 1:
            labels = label_by_sign(at, scores, known if len(known) == 2 else (0, 1))
        else:
            labels = label_of_highest(at, scores, known)
    if classes == 1 and named == 2:
        at.finish(labels, two_classes(at, scores, transform), width=2)
    else:
        at.finish(labels, transformed(at, scores, transform), width=classes)


def post_transform(at: NodeRewriter) -> str:
    """The node's `post_transform`.

    Raises:
        ModelError: it is none of the standard's.
    """
    found = at.text("post_transform", "NONE")
    if found not in TRANSFORMS:
        raise ModelError(f"{at.what}: its post_transform is {found!r}; expected one of {', '.join(TRANSFORMS)}.")
    return found


def linear_scores(at: NodeRewriter, targets: int) -> ir.Value:
    """`x coefficients^T + intercepts`, shape [N, targets]."""
    count = len(at.floats("coefficients"))
    if targets < 1 or count % targets:
        raise ModelError(
            f"{at.what}: its {count} coefficients cannot be divided among {targets} targets. Export it again."
        )
    rows = at.rows()
    coefficients = at.weight("coefficients", (targets, count // targets))
    if at.floats("intercepts"):
        return at.apply("Gemm", rows, coefficients, at.weight("intercepts", (targets,)), what="scores", transB=1)
    turned = at.apply("Transpose", coefficients, perm=[1, 0])
    return at.apply("MatMul", rows, turned, what="scores")


def label_by_sign(at: NodeRewriter, scores: ir.Value, labels: tuple[int, ...]) -> ir.Value:
    """The second of two labels where the one score is positive, else the first."""
    positive = at.apply("Greater", scores, at.constant(0.0, "zero"))
    index = at.cast(positive, ir.DataType.INT64)
    flat = at.apply("Reshape", index, at.constant([-1], "flat", np.int64))
    return at.apply("Gather", at.constant(labels, "labels", np.int64), flat, axis=0, what="label")


def label_of_highest(at: NodeRewriter, scores: ir.Value, labels: tuple[int, ...]) -> ir.Value:
    """The label of the highest score, of the first of equal ones."""
    best = at.apply("ArgMax", scores, axis=1, keepdims=0)
    return at.apply("Gather", at.constant(labels, "labels", np.int64), best, axis=0, what="label")


def two_classes(at: NodeRewriter, score: ir.Value, transform: str) -> ir.Value:
    """The scores of both classes from the one score of the second, as onnxruntime writes them."""
    if transform == "LOGISTIC":  # [1 - sigmoid(s), sigmoid(s)], in a form that shows its logits
        both = at.apply("Mul", score, at.constant([[0.0, 1.0]], "second"), what="logits")
        return at.apply("Softmax", both, axis=1, what="probabilities")
    if transform == "PROBIT":
        raise ModelError(
            f"{at.what} has post_transform PROBIT and a single score, for which the standard defines no score "
            "of the other class. Export it with another post_transform."
        )
    signed = at.apply("Mul", score, at.constant([[-1.0, 1.0]], "signs"))
    return at.apply("Add", signed, at.constant([[1.0, 0.0]], "complement"), what="both")


def transformed(at: NodeRewriter, scores: ir.Value, transform: str) -> ir.Value:
    """Scores, shape [N, classes], after a `post_transform`."""
    if transform == "LOGISTIC":
        return at.apply("Sigmoid", scores)
    if transform == "SOFTMAX":
        return at.apply("Softmax", scores, axis=1)
    if transform == "SOFTMAX_ZERO":
        return at.apply("SoftmaxZero", scores, domain=DOMAIN)
    if transform == "PROBIT":
        return at.apply("Probit", scores, domain=DOMAIN)
    return scores
