"""Ensembles of trees of ai.onnx.ml as arrays over all nodes, through which all rows walk at once. They never train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.classical.linear import post_transform, transformed
from onward.graph.classical.rewriting import DOMAIN, NodeRewriter

WHY_FROZEN = "fitted trees, whose splits have no gradient"

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
"""How a node compares; their numbers are those of TreeEnsemble-5."""

MEMBER, LEAF = MODES.index("BRANCH_MEMBER"), MODES.index("LEAF")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Trees:
    """Trees as arrays with an entry for every node of every tree; leaves lead to themselves.

    Attributes:
        features: index of the feature that a node compares.
        thresholds: what with; in a `BRANCH_MEMBER` node, the row of `members`.
        modes: index into `MODES`.
        follow: [2, nodes], where to go if the comparison is false, and if it is true.
        missing: whether a NaN goes the way of true.
        members: the sets of `BRANCH_MEMBER` nodes, filled up with NaN.
        roots: first node of every tree.
        rows: of a leaf, its row in `weights` and `present`.
        weights: [leaves, targets].
        present: [leaves, targets], whether a leaf says anything about a target.
        depth: most comparisons on the way to a leaf.
    """

    features: Array
    thresholds: Array
    modes: Array
    follow: Array
    missing: Array
    members: Array
    roots: Array
    rows: Array
    weights: Array
    present: Array
    depth: int


def rewrite_tree_regressor(at: NodeRewriter) -> None:
    """Sums, means or extremes of what the leaves say; onnxruntime leaves a single target as it is but for PROBIT."""
    targets = at.integer("n_targets", 1)
    trees = _old_trees(at, "target", targets)
    aggregate = at.text("aggregate_function", "SUM")
    if aggregate not in _AGGREGATES:
        raise ModelError(f"{at.what}: its aggregate_function is {aggregate!r}; expected {', '.join(_AGGREGATES)}.")
    transform = post_transform(at)
    _finish_regressor(at, trees, targets, aggregate, transform, _numbers(at, "base_values"))


def rewrite_tree_ensemble(at: NodeRewriter) -> None:
    """The form of ai.onnx.ml 5, which has classes no more, only targets."""
    targets = at.integer("n_targets", 1)
    trees = _new_trees(at, targets)
    aggregate, transform = at.integer("aggregate_function", 1), at.integer("post_transform")
    if aggregate not in range(len(_AGGREGATES)) or transform not in range(len(_TRANSFORMS)):
        raise ModelError(
            f"{at.what}: aggregate_function {aggregate} or post_transform {transform} is not among the standard's. "
            "Export it again."
        )
    _finish_regressor(at, trees, targets, _AGGREGATES[aggregate], _TRANSFORMS[transform], np.zeros(0))


def rewrite_tree_classifier(at: NodeRewriter) -> None:
    """A score for every class and a label, by onnxruntime's rules for two classes and for more."""
    labels = at.ints("classlabels_int64s")
    classes = len(labels) or len(at.strings("classlabels_strings"))
    if not classes:
        raise ModelError(f"{at.what} has no class labels. Export it again.")
    weights = _numbers(at, "class_weights")
    trees = _old_trees(at, "class", classes)
    base = _numbers(at, "base_values")
    label = at.apply(
        "TreeClassifier",
        at.input(),
        *_inputs(at, trees),
        at.constant(labels or range(classes), "labels", np.int64),
        at.constant(base, "base_values", why=WHY_FROZEN) if base.size else None,
        domain=DOMAIN,
        outputs=2,
        what="trees",
        depth=trees.depth,
        is_binary=int(classes == 2 and len(set(at.ints("class_ids"))) == 1),
        all_positive=int(bool((weights >= 0).all())),
        post_transform=post_transform(at),
    )
    node = label.producer()
    assert node is not None
    at.finish(label if at.is_used(0) else None, node.outputs[1], width=classes)


def _finish_regressor(
    at: NodeRewriter, trees: Trees, targets: int, aggregate: str, transform: str, base: Array
) -> None:
    scores = at.apply(
        "TreeRegressor",
        at.input(),
        *_inputs(at, trees),
        at.constant(base, "base_values", trees.weights.dtype, WHY_FROZEN) if base.size == targets else None,
        domain=DOMAIN,
        what="trees",
        depth=trees.depth,
        aggregate=aggregate,
    )
    if targets == 1 and transform != "PROBIT":
        transform = "NONE"
    at.finish(transformed(at, scores, transform), width=targets)


def _inputs(at: NodeRewriter, trees: Trees) -> list[ir.Value | None]:
    """The arrays as initializers, in the order in which the lowerings take them; None where there is nothing to say."""
    modes = trees.modes[trees.modes != LEAF]
    same = modes[:1] if modes.size and (modes == modes[0]).all() else trees.modes
    return [
        at.constant(array, what, array.dtype, WHY_FROZEN) if array is not None else None
        for array, what in (
            (trees.features, "features"),
            (trees.thresholds, "thresholds"),
            (same.astype(np.int64), "modes"),
            (trees.follow, "follow"),
            (trees.missing if trees.missing.any() else None, "missing"),
            (trees.members if trees.members.size else None, "members"),
            (trees.roots, "roots"),
            (trees.rows, "rows"),
            (trees.weights, "leaf_weights"),
            (None if trees.present.all() else trees.present, "present"),
        )
    ]


def _numbers(at: NodeRewriter, attribute: str) -> Array:
    """Floats that are a list, or in newer versions a tensor, which may be double."""
    tensor = at.node.attributes.get(f"{attribute}_as_tensor")
    if tensor is not None:
        return np.asarray(tensor.as_tensor().numpy()).reshape(-1)
    return np.asarray(at.floats(attribute), np.float32)


def _old_trees(at: NodeRewriter, kind: str, targets: int) -> Trees:
    """The form of TreeEnsembleRegressor and TreeEnsembleClassifier, whose nodes are numbered within their tree."""
    ids = {name: np.asarray(at.ints(f"nodes_{name}"), np.int64) for name in (
        "treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")}  # fmt: skip
    thresholds = _numbers(at, "nodes_values")
    names = at.strings("nodes_modes")
    unknown = sorted(set(names) - set(MODES))
    sizes = {name: len(array) for name, array in (*ids.items(), ("values", thresholds), ("modes", names))}
    if unknown or len(set(sizes.values())) != 1 or not names:
        listed = ", ".join(f"nodes_{name} {size}" for name, size in sizes.items())
        unknown_too = f" and the unknown modes {', '.join(unknown)}" if unknown else ""
        raise ModelError(f"{at.what} has attributes of unequal lengths ({listed}){unknown_too}. Export it again.")
    modes = np.asarray([MODES.index(name) for name in names])
    place = _Places(at, ids["treeids"], ids["nodeids"])
    own, leaf = np.arange(len(modes)), modes == LEAF
    follow = np.stack(
        [np.where(leaf, own, place.of(ids["treeids"], np.where(leaf, ids["nodeids"], ids[f"{way}nodeids"])))
         for way in ("false", "true")]
    )  # fmt: skip
    rows = np.where(leaf, np.cumsum(leaf) - 1, 0)
    targeted = place.of(np.asarray(at.ints(f"{kind}_treeids")), np.asarray(at.ints(f"{kind}_nodeids")))
    numbers = _numbers(at, f"{kind}_weights")
    weights, present = _leaves(
        at, rows[targeted], np.asarray(at.ints(f"{kind}_ids")), numbers, int(leaf.sum()), targets
    )
    missing = np.asarray(at.ints("nodes_missing_value_tracks_true"), bool)
    roots = np.flatnonzero(np.concatenate([[True], ids["treeids"][1:] != ids["treeids"][:-1]]))
    return Trees(
        features=ids["featureids"],
        thresholds=thresholds,
        modes=modes,
        follow=follow,
        missing=missing if missing.size == modes.size else np.zeros(modes.size, bool),
        members=np.zeros((0, 0), thresholds.dtype),
        roots=roots,
        rows=rows,
        weights=weights,
        present=present,
        depth=_depth(at, follow, roots, leaf),
    )


class _Places:
    """Where nodes are in the arrays, by the numbers of their tree and within it."""

    def __init__(self, at: NodeRewriter, trees: Array, nodes: Array) -> None:
        self.at = at
        self.span = int(nodes.max()) + 1
        keys = trees * self.span + nodes
        self.order = np.argsort(keys, kind="stable")
        self.keys = keys[self.order]

    def of(self, trees: Array, nodes: Array) -> Array:
        """Indices of nodes, all of which must exist."""
        keys = trees.astype(np.int64) * self.span + nodes.astype(np.int64)
        found = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        wrong = np.flatnonzero((self.keys[found] != keys) | (nodes >= self.span) | (nodes < 0))
        if wrong.size:
            raise ModelError(
                f"{self.at.what} refers to node {int(nodes[wrong[0]])} of tree {int(trees[wrong[0]])}, which it does "
                "not have. Export it again."
            )
        return self.order[found]


def _new_trees(at: NodeRewriter, targets: int) -> Trees:
    """The attributes of TreeEnsemble-5: leaves have arrays of their own, and follow the nodes here."""
    splits = np.asarray(at.node.attributes["nodes_splits"].as_tensor().numpy()).reshape(-1)
    leaf_weights = np.asarray(at.node.attributes["leaf_weights"].as_tensor().numpy()).reshape(-1)
    modes = np.asarray(at.node.attributes["nodes_modes"].as_tensor().numpy()).reshape(-1).astype(np.int64)
    nodes, leaves = len(splits), len(leaf_weights)
    own = np.arange(nodes, nodes + leaves)
    ways = []
    for way in ("false", "true"):
        to, is_leaf = np.asarray(at.ints(f"nodes_{way}nodeids")), np.asarray(at.ints(f"nodes_{way}leafs"), bool)
        ways.append(np.concatenate([np.where(is_leaf, to + nodes, to), own]))
    follow, roots = np.stack(ways), np.asarray(at.ints("tree_roots"), np.int64)
    all_modes = np.concatenate([modes, np.full(leaves, LEAF)])
    if follow.shape[1] != all_modes.size or (follow < 0).any() or (follow >= all_modes.size).any():
        raise ModelError(
            f"{at.what} has attributes of unequal lengths, or refers to nodes it does not have. Export it again."
        )
    thresholds, members = _members(at, splits, modes)
    missing = np.asarray(at.ints("nodes_missing_value_tracks_true"), bool)
    rows = np.concatenate([np.zeros(nodes, np.int64), np.arange(leaves)])
    ids = np.asarray(at.ints("leaf_targetids"), np.int64)
    weights, present = _leaves(at, np.arange(leaves), ids, leaf_weights, leaves, targets)
    filled = np.zeros(leaves, np.int64)
    return Trees(
        features=np.concatenate([np.asarray(at.ints("nodes_featureids"), np.int64), filled]),
        thresholds=np.concatenate([thresholds, filled.astype(thresholds.dtype)]),
        modes=all_modes,
        follow=follow,
        missing=np.concatenate([missing if missing.size == nodes else np.zeros(nodes, bool), filled.astype(bool)]),
        members=members,
        roots=roots,
        rows=rows,
        weights=weights,
        present=present,
        depth=_depth(at, follow, roots, all_modes == LEAF),
    )


def _members(at: NodeRewriter, splits: Array, modes: Array) -> tuple[Array, Array]:
    """Thresholds, and the sets of `BRANCH_MEMBER` nodes, which are one after the other with NaN between them."""
    attribute = at.node.attributes.get("membership_values")
    where = np.flatnonzero(modes == MEMBER)
    if attribute is None or not where.size:
        return splits, np.zeros((0, 0), splits.dtype)
    values = np.asarray(attribute.as_tensor().numpy()).reshape(-1)
    sets = [part[~np.isnan(part)] for part in np.split(values, np.flatnonzero(np.isnan(values)) + 1)][: where.size]
    if len(sets) < where.size:
        raise ModelError(
            f"{at.what} has {where.size} BRANCH_MEMBER nodes for {len(sets)} sets of membership_values. "
            "Export it again."
        )
    members = np.full((where.size, max(map(len, sets))), np.nan, splits.dtype)
    for row, one in enumerate(sets):
        members[row, : len(one)] = one
    thresholds = splits.copy()
    thresholds[where] = np.arange(where.size)
    return thresholds, members


def _leaves(
    at: NodeRewriter, rows: Array, targets: Array, numbers: Array, leaves: int, count: int
) -> tuple[Array, Array]:
    if not len(rows) == len(targets) == len(numbers) or (len(targets) and not 0 <= targets.max() < count):
        raise ModelError(
            f"{at.what}: {len(numbers)} weights of leaves for {len(rows)} leaves and {len(targets)} targets of at most "
            f"{count}. Export it again."
        )
    weights, present = np.zeros((leaves, count), numbers.dtype), np.zeros((leaves, count), bool)
    np.add.at(weights, (rows, targets), numbers)
    present[rows, targets] = True
    return weights, present


def _depth(at: NodeRewriter, follow: Array, roots: Array, leaf: Array) -> int:
    """The number of steps after which every way from a root has reached a leaf."""
    here, steps = np.unique(roots), 0
    while not leaf[here].all():
        here = np.unique(follow[:, here[~leaf[here]]])
        steps += 1
        if steps > leaf.size:
            raise ModelError(f"{at.what}: its nodes form a cycle. Export it again.")
    return steps
