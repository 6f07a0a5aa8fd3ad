"""Direct calls of small losses and lookups. torch checks labels and positions itself; ours say what is wrong with them.

What torch refuses goes to the lowering, which counts positions from the end, or names the label.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from onward.lowering.building.tensor_facts import TensorFact, fact_about
from onward.lowering.ops import elementwise
from onward.lowering.ops.fused_cross_entropy import SMALL_BYTES
from onward.lowering.ops.indexing import gather
from onward.lowering.ops.loss import NOTHING_IGNORED, softmax_cross_entropy_loss
from onward.lowering.rewriting import sparse_lookups

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_FLOATS = (torch.float32, torch.float64)
_REDUCTIONS = {"mean": 1, "sum": 2}
"""How torch's own function numbers them."""


def cross_entropy(node: fx.Node) -> Call | None:
    """Of scores [N, C] and labels [N], reduced, without class weights."""
    scores, labels = fact_about(node.args[0]), fact_about(node.args[1])
    if len(node.args) > 2 and node.args[2] is not None:
        return None
    if scores is None or not _are_labels_of(scores.shape, scores.dtype, labels) or node.kwargs["output_count"] != 1:
        return None
    how = _how(node)
    return None if how is None else (_loss_alone, (*node.args[:2], *how), {})


def squared_error(node: fx.Node) -> Call | None:
    """The mean over all elements of a difference times itself, of tensors of one shape, of which no other part is read.

    torch's own keeps the two tensors, and not their difference; its gradient is one pass over them.
    """
    square, result = node.args[0], fact_about(node)
    if not isinstance(square, fx.Node) or square.target not in (elementwise.mul, torch.mul):
        return None
    difference = square.args[0]
    if not isinstance(difference, fx.Node) or difference.target not in (elementwise.sub, torch.sub):
        return None
    facts = {fact_about(one) for one in (square, difference, *difference.args)}
    fact = facts.pop()
    if facts or fact is None or fact.dtype not in _FLOATS or result != TensorFact((), fact.dtype):
        return None
    if square.args[1] is not difference or len(square.users) > 1 or len(difference.users) > 1:
        return None
    return torch._C._nn.mse_loss, (*difference.args, _REDUCTIONS["mean"]), {}


def linear_cross_entropy(node: fx.Node) -> Call | None:
    """Of logits so small that no row is left out of them; without class weights."""
    given: list[Any] = [*node.args, *[None] * (7 - len(node.args))]
    hidden, weight, labels, scores, _, class_weights, bias = given
    X, W, how = fact_about(hidden), fact_about(weight), _how(node)
    if X is None or W is None or how is None or scores is not None or class_weights is not None:
        return None
    rows, is_turned = torch.Size(X.shape[:-1]).numel(), not node.kwargs.get("rows_are_classes", 1)
    classes = W.shape[1 if is_turned else 0]
    if W.dtype is not X.dtype or 4 * rows * classes >= SMALL_BYTES // 8:
        return None
    if not _are_labels_of((rows, classes), X.dtype, fact_about(labels)):
        return None
    if bias is not None and fact_about(bias) != TensorFact((classes,), X.dtype):
        return None
    return _loss_of_layer, (hidden, weight, bias, labels, is_turned, *how), {}


def lookup(node: fx.Node) -> Call | None:
    """Rows of a table, whose gradient is dense."""
    data, indices = fact_about(node.args[0]), fact_about(node.args[1])
    if data is None or indices is None or node.kwargs.get("axis", 0) or len(data.shape) != 2:
        return None
    if data.dtype not in _FLOATS or indices.dtype not in (torch.int32, torch.int64):
        return None
    if node.target is sparse_lookups.lookup and data.nbytes >= sparse_lookups.LEAST_BYTES:
        return None
    return _rows, node.args, {}


def _are_labels_of(scores: tuple[int, ...], dtype: torch.dtype, labels: TensorFact | None) -> bool:
    return len(scores) == 2 and dtype in _FLOATS and labels == TensorFact((scores[0],), torch.int64)


def _how(node: fx.Node) -> tuple[int, int] | None:
    """Reduction and ignored label, as torch's own function takes them."""
    reduction: Any = node.kwargs.get("reduction", "mean")
    ignored: Any = node.kwargs.get("ignore_index")
    found = _REDUCTIONS.get(reduction)
    return None if found is None else (found, NOTHING_IGNORED if ignored is None else ignored)


def _loss(scores: Tensor, labels: Tensor, reduction: int, ignored: int) -> Tensor:
    try:
        return torch._C._nn.cross_entropy_loss(scores, labels, None, reduction, ignored, 0.0)  # type: ignore[arg-type]
    except IndexError:
        kind = next(name for name, number in _REDUCTIONS.items() if number == reduction)
        label = None if ignored == NOTHING_IGNORED else ignored
        return softmax_cross_entropy_loss(scores, labels, ignore_index=label, reduction=kind, output_count=1)[0]


def _loss_alone(*arguments: Any) -> tuple[Tensor]:
    return (_loss(*arguments),)


def _loss_of_layer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, is_turned: bool, reduction: int, ignored: int
) -> Tensor:
    rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    logits = torch._C._nn.linear(rows, weight.T if is_turned else weight, bias)
    return _loss(logits, labels, reduction, ignored)


def _rows(table: Tensor, positions: Tensor) -> Tensor:
    if not table.is_cpu:  # a GPU would stop without a word
        return gather(table, positions)
    try:
        return torch.embedding(table, positions)
    except IndexError:
        return gather(table, positions)
