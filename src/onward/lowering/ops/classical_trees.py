"""Ensembles of trees as arrays over all nodes: all rows walk through all trees at once. No gradient passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onward.graph.classical.rewriting import DOMAIN
from onward.graph.classical.trees import MEMBER, MODES
from onward.lowering.ops.classical import probit, softmax_zero
from onward.lowering.ops.indexing import gather
from onward.lowering.registry import lowers

_COMPARE: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne,
)  # fmt: skip
"""By the place of a mode in `MODES`."""


@lowers("TreeRegressor", domain=DOMAIN)
def tree_regressor(
    x: Tensor,
    features: Tensor,
    thresholds: Tensor,
    modes: Tensor,
    follow: Tensor,
    missing: Tensor | None,
    members: Tensor | None,
    roots: Tensor,
    rows: Tensor,
    weights: Tensor,
    present: Tensor | None = None,
    base: Tensor | None = None,
    *,
    depth: int,
    aggregate: str,
) -> Tensor:
    """What the leaves say of every target, summed up over the trees, or their mean, minimum or maximum, plus `base`.

    Of several targets, one of which no leaf says anything is 0, as in onnxruntime.
    """
    reached = rows[_leaves(x, features, thresholds, modes, follow, missing, members, roots, depth)]
    said = gather(weights, reached)  # [rows, trees, targets]
    if aggregate in ("SUM", "AVERAGE"):
        total = said.sum(dim=1)
        total = total / roots.numel() if aggregate == "AVERAGE" else total
    else:
        worst = torch.inf if aggregate == "MIN" else -torch.inf
        said = said if present is None else torch.where(present[reached], said, worst)
        total = said.amin(dim=1) if aggregate == "MIN" else said.amax(dim=1)
        total = torch.where(total == worst, 0, total)
    if base is None:
        return total
    total = total + base
    if present is None or total.shape[1] == 1:
        return total
    return torch.where(present[reached].any(dim=1), total, 0)


@lowers("TreeClassifier", domain=DOMAIN)
def tree_classifier(
    x: Tensor,
    features: Tensor,
    thresholds: Tensor,
    modes: Tensor,
    follow: Tensor,
    missing: Tensor | None,
    members: Tensor | None,
    roots: Tensor,
    rows: Tensor,
    weights: Tensor,
    present: Tensor | None,
    labels: Tensor,
    base: Tensor | None = None,
    *,
    depth: int,
    is_binary: int,
    all_positive: int,
    post_transform: str,
    output_count: int,
) -> tuple[Tensor, ...]:
    """Label and scores of every row, [rows] and [rows, classes], by onnxruntime's rules."""
    reached = rows[_leaves(x, features, thresholds, modes, follow, missing, members, roots, depth)]
    scores = gather(weights, reached).sum(dim=1)
    heard = present[reached].any(dim=1) if present is not None else torch.ones_like(scores, dtype=torch.bool)
    if scores.shape[1] == 1:
        scores = scores + base if base is not None else scores
        return (scores[:, 0] > 0).long(), probit(scores) if post_transform == "PROBIT" else scores
    if scores.shape[1] == 2:
        return _two_classes(scores, heard, labels, base, bool(is_binary), bool(all_positive), post_transform)
    if base is not None:
        scores, heard = scores + base, torch.ones_like(heard)
    best = torch.where(heard, scores, -torch.inf).argmax(dim=1)
    return labels[best], _transform(torch.where(heard, scores, 0), post_transform)


def _leaves(
    x: Tensor,
    features: Tensor,
    thresholds: Tensor,
    modes: Tensor,
    follow: Tensor,
    missing: Tensor | None,
    members: Tensor | None,
    roots: Tensor,
    depth: int,
) -> Tensor:
    """The node in which every row ends in every tree, [rows, trees]."""
    table = x.reshape(1, -1) if x.dim() == 1 else x
    node = roots.expand(table.shape[0], -1)
    for _ in range(depth):
        value = table.gather(1, features[node])
        holds = _compare(value, thresholds[node], modes if modes.numel() == 1 else modes[node], members)
        if missing is not None and value.is_floating_point():
            holds = holds | (value.isnan() & missing[node])
        node = torch.where(holds, follow[1][node], follow[0][node])
    return node


def _compare(value: Tensor, threshold: Tensor, modes: Tensor, members: Tensor | None) -> Tensor:
    holds = torch.zeros_like(value, dtype=torch.bool)
    for mode in range(len(MODES) - 1):
        if mode != MEMBER:
            found = _COMPARE[mode](value, threshold)
        elif members is not None:
            sets = members[torch.where(modes == MEMBER, threshold, 0).long()]
            found = (value.unsqueeze(-1) == sets).any(dim=-1)
        else:
            continue
        holds = torch.where(modes == mode, found, holds)
    return holds


def _two_classes(
    scores: Tensor,
    heard: Tensor,
    labels: Tensor,
    base: Tensor | None,
    is_binary: bool,
    all_positive: bool,
    transform: str,
) -> tuple[Tensor, Tensor]:
    """onnxruntime's rules: where no leaf speaks of the second class, the one score of a row stands for both."""
    first, second = scores[:, 0], scores[:, 1]
    has_first, has_second = heard[:, 0], heard[:, 1]
    single = ~has_second
    if base is not None and base.numel() == 2:
        raised = second + base[1]
        lone = first + base[1]
        first, second = torch.where(has_second, -lone, first + base[0]), torch.where(has_second, lone, raised)
        single = torch.zeros_like(single)
    elif base is not None:
        first = first + base[0]
    first, second = torch.where(has_first, first, 0), torch.where(has_second, second, 0)
    deciding = torch.where(has_second, second, first)
    if is_binary:
        label = labels[(deciding > (0.5 if all_positive else 0.0)).long()]
    else:
        label = (deciding > 0).long()
    both = _transform(torch.stack([first, second], dim=1), transform)
    if transform == "LOGISTIC":
        alone = torch.stack([torch.sigmoid(-first), torch.sigmoid(first)], dim=1)
    else:
        opposite = 1 - first if is_binary and all_positive else -first
        alone = torch.stack([opposite, first], dim=1)
    return label, torch.where(single.unsqueeze(1), alone, both)


def _transform(scores: Tensor, transform: str) -> Tensor:
    if transform == "LOGISTIC":
        return scores.sigmoid()
    if transform == "SOFTMAX":
        return scores.softmax(dim=-1)
    if transform == "SOFTMAX_ZERO":
        return softmax_zero(scores)
    return probit(scores) if transform == "PROBIT" else scores
