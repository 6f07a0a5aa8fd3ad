"""Trees of ai.onnx.ml against onnxruntime: every branch, aggregate, transform and missing value."""

from __future__ import annotations

import numpy as np
import pytest

from tests.one_classical_node import LEAVES, NODES, TRANSFORMS, X, check, modes


@pytest.mark.parametrize("branch", ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"])
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_tree_regressor(branch: str, aggregate: str) -> None:
    x = np.concatenate([X, np.array([[0.1, 0.1], [np.nan, 0.2], [0.4, np.nan]], np.float32)])
    for targets in (1, 2):
        ids = [leaf % targets for leaf in range(5)]
        base = {"base_values": [0.5, -0.25][:targets]}
        for options in ({}, base, {"nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 1, 0, 0]}):
            check(
                "TreeEnsembleRegressor",
                x,
                n_targets=targets,
                aggregate_function=aggregate,
                nodes_modes=modes(branch),
                target_treeids=[tree for tree, _ in LEAVES],
                target_nodeids=[node for _, node in LEAVES],
                target_ids=ids,
                target_weights=[0.5, -1.0, 2.0, 0.75, -0.5],
                post_transform="NONE",
                **NODES,
                **options,
            )


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
@pytest.mark.parametrize(("ids", "weights"), [
    ((0, 0, 0, 0, 0), (0.5, 0.1, 0.2, 0.3, 0.4)),
    ((0, 0, 0, 0, 0), (0.5, -0.1, 0.2, -0.9, 0.4)),
    ((1, 1, 1, 1, 1), (0.5, 0.1, 0.2, 0.3, 0.4)),
    ((1, 1, 1, 1, 1), (0.5, -0.1, 0.2, -0.9, 0.4)),
    ((0, 1, 0, 1, 1), (0.5, 0.1, 0.2, 0.3, 0.4)),
    ((0, 1, 2, 1, 2), (0.5, 0.1, -0.2, 0.3, 0.4)),
])  # fmt: skip
def test_tree_classifier(transform: str, ids: tuple[int, ...], weights: tuple[float, ...]) -> None:
    classes = 3 if 2 in ids else 2
    for base in ({}, {"base_values": [0.1, 0.2, 0.3][:classes]}):
        check(
            "TreeEnsembleClassifier",
            nodes_modes=modes("BRANCH_LEQ"),
            class_treeids=[tree for tree, _ in LEAVES],
            class_nodeids=[node for _, node in LEAVES],
            class_ids=list(ids),
            class_weights=list(weights),
            classlabels_int64s=[3, 4, 8][:classes],
            post_transform=transform,
            **NODES,
            **base,
        )
