"""Support vector machines of ai.onnx.ml: vectors, coefficients and offsets train; parameters of kernels do not."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.classical.linear import label_of_highest, post_transform, transformed, two_classes
from onward.graph.classical.rewriting import DOMAIN, NodeRewriter

KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")


def rewrite_svm_regressor(at: NodeRewriter) -> None:
    """`kernel(x, vectors) coefficients + rho`; without vectors, the coefficients are the one vector."""
    count = at.integer("n_supports")
    coefficients = len(at.floats("coefficients"))
    if count > 0:
        similar = _kernel(at, at.rows(), _vectors(at, count))
        weights = at.weight("coefficients", (1, count))
    else:
        similar, weights = at.rows(), at.weight("coefficients", (1, coefficients))
    score = at.apply("Gemm", similar, weights, at.weight("rho", (1,)), what="score", transB=1)
    if at.integer("one_class"):
        inside = at.cast(at.apply("Greater", score, at.constant(0.0, "zero")), ir.DataType.FLOAT)
        doubled = at.apply("Mul", inside, at.constant(2.0, "two"))
        score = at.apply("Sub", doubled, at.constant(1.0, "one"), what="inside")
    at.finish(score, width=1)


def rewrite_svm_classifier(at: NodeRewriter) -> None:
    """A decision for every pair of classes, their votes, and scores or, from them, probabilities."""
    labels = at.ints("classlabels_ints")
    classes = len(labels) or len(at.strings("classlabels_strings"))
    if classes < 2:
        raise ModelError(f"{at.what} has {classes} class labels; expected 2 or more. Export it again.")
    per_class = at.ints("vectors_per_class")
    if sum(per_class):
        _rewrite_pairs(at, labels, classes, per_class)
    else:
        _rewrite_linear(at, labels, classes)


def _rewrite_linear(at: NodeRewriter, labels: tuple[int, ...], classes: int) -> None:
    """Without support vectors: one vector of coefficients a class."""
    numbers = at.floats("coefficients")
    weights = at.weight("coefficients", (classes, len(numbers) // classes))
    dots = at.apply("Gemm", at.rows(), weights, transB=1, what="dots") if at.opset >= 11 else _product(at, weights)
    rho = at.weight("rho", (len(at.floats("rho")),))
    if len(at.floats("rho")) > 1:  # onnxruntime reads the first alone
        rho = at.apply("Gather", rho, at.constant(0, "first", np.int64), axis=0, what="rho")
    scores = at.apply("Add", dots, rho, what="scores")
    label = None
    if at.is_used(0):
        label = _binary_label(at, scores, labels, numbers) if classes == 2 else label_of_highest(at, scores, labels)
    at.finish(label, transformed(at, scores, post_transform(at)), width=classes)


def _product(at: NodeRewriter, weights: ir.Value) -> ir.Value:
    return at.apply("MatMul", at.rows(), at.apply("Transpose", weights, perm=[1, 0]), what="dots")


def _binary_label(
    at: NodeRewriter, scores: ir.Value, labels: tuple[int, ...], coefficients: tuple[float, ...]
) -> ir.Value:
    """onnxruntime's rule for two classes: the second if the highest score passes a threshold, else the highest."""
    threshold = 0.5 if min(coefficients) >= 0 else np.nextafter(np.float32(0), np.float32(1))
    best = at.apply("ReduceMax", scores, axes=[1], keepdims=0) if at.opset < 18 else _highest(at, scores)
    below = at.apply("Less", best, at.constant(threshold, "threshold"))
    highest = at.apply("ArgMax", scores, axis=1, keepdims=0)
    index = at.apply("Where", below, highest, at.constant(1, "second", np.int64))
    return at.apply("Gather", at.constant(labels, "labels", np.int64), index, axis=0, what="label")


def _highest(at: NodeRewriter, scores: ir.Value) -> ir.Value:
    return at.apply("ReduceMax", scores, at.constant([1], "axis", np.int64), keepdims=0)


def _rewrite_pairs(at: NodeRewriter, labels: tuple[int, ...], classes: int, per_class: tuple[int, ...]) -> None:
    count, pairs = sum(per_class), list(combinations(range(classes), 2))
    similar = _kernel(at, at.rows(), _vectors(at, count))
    matrix = _pair_matrix(at, classes, per_class)
    rho = at.weight("rho", (len(pairs),))
    decisions = at.apply("Add", at.apply("MatMul", similar, matrix), rho, what="decisions")
    label = _vote(at, decisions, labels, classes, pairs) if at.is_used(0) else None
    transform = post_transform(at)
    if at.floats("prob_a"):
        slopes, offsets = at.weight("prob_a", (len(pairs),)), at.weight("prob_b", (len(pairs),))
        logits = at.apply("Neg", at.apply("Add", at.apply("Mul", decisions, slopes), offsets))
        coupled = at.apply(
            "PairwiseCoupling", at.apply("Sigmoid", logits), domain=DOMAIN, what="probabilities", classes=classes
        )
        at.finish(label, transformed(at, coupled, transform), width=classes)
    elif classes > 2:
        at.finish(label, transformed(at, decisions, transform), width=len(pairs))
    elif transform == "NONE":
        at.finish(label, at.apply("Mul", decisions, at.constant([[-1.0, 1.0]], "signs"), what="both"), width=2)
    else:
        at.finish(label, two_classes(at, decisions, transform), width=2)


def _vectors(at: NodeRewriter, count: int) -> ir.Value:
    numbers = len(at.floats("support_vectors"))
    return at.weight("support_vectors", (count, numbers // count))


def _pair_matrix(at: NodeRewriter, classes: int, per_class: tuple[int, ...]) -> ir.Value:
    """[vectors, pairs]: how much a vector says in each decision; 0 in those of other classes.

    The coefficients have a row for every other class: of a vector of class i, row j - 1 for j > i, else row j.
    """
    count = sum(per_class)
    weights = at.weight("coefficients", ((classes - 1) * count,))
    own = np.repeat(np.arange(classes), per_class)
    places, counts = [], []
    for low, high in combinations(range(classes), 2):
        row = np.where(own == low, high - 1, low)
        places.append(row * count + np.arange(count))
        counts.append((own == low) | (own == high))
    index = at.constant(np.stack(places, axis=1), "places", np.int64)
    spread = at.apply("Gather", weights, index, axis=0)
    if classes == 2:
        return spread
    return at.apply("Mul", spread, at.constant(np.stack(counts, axis=1), "members", np.float32), what="pair_matrix")


def _vote(
    at: NodeRewriter, decisions: ir.Value, labels: tuple[int, ...], classes: int, pairs: list[tuple[int, int]]
) -> ir.Value:
    """The label with most votes, of equal ones the first; a positive decision is for the lower class of its pair."""
    low, high = np.zeros((2, len(pairs), classes), np.float32)
    for row, (first, second) in enumerate(pairs):
        low[row, first] = high[row, second] = 1
    positive = at.cast(at.apply("Greater", decisions, at.constant(0.0, "zero")), ir.DataType.FLOAT)
    # Votes of the lower classes where decisions are positive, of the higher ones elsewhere.
    votes = at.apply(
        "Add", at.apply("MatMul", positive, at.constant(low - high, "turns")), at.constant(high.sum(0), "no")
    )
    return label_of_highest(at, votes, labels)


def _kernel(at: NodeRewriter, rows: ir.Value, vectors: ir.Value) -> ir.Value:
    """How similar every row is to every vector, [N, vectors]."""
    kind = at.text("kernel_type", "LINEAR")
    if kind not in KERNELS:
        raise ModelError(f"{at.what}: its kernel_type is {kind!r}; expected one of {', '.join(KERNELS)}.")
    given = at.floats("kernel_params")
    gamma, offset, degree = given if len(given) == 3 else (0.0, 0.0, 0.0)
    if kind == "RBF":
        scale = at.constant(gamma, "gamma", why="a parameter of the kernel")
        return at.apply("RadialBasis", rows, vectors, scale, domain=DOMAIN, what="kernel")
    dots = at.apply("MatMul", rows, at.apply("Transpose", vectors, perm=[1, 0]), what="dots")
    if kind == "LINEAR":
        return dots
    why = "a parameter of the kernel"
    scaled = at.apply("Mul", dots, at.constant(gamma, "gamma", why=why))
    moved = at.apply("Add", scaled, at.constant(offset, "coef0", why=why))
    if kind == "SIGMOID":
        return at.apply("Tanh", moved, what="kernel")
    return at.apply("Pow", moved, at.constant(degree, "degree", why=why), what="kernel")
