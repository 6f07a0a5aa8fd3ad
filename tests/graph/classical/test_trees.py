"""Files of trees: what contradicts itself is refused, and no rule makes thresholds trainable."""

from __future__ import annotations

import re

import pytest

import onward
from onward.errors import ModelError
from tests.one_classical_node import LEAVES, NODES, model_of, modes


def test_a_file_of_trees_is_not_told_to_list_weights() -> None:
    """No rule makes the thresholds of a tree trainable."""
    leaves = {
        "target_treeids": [tree for tree, _ in LEAVES], "target_nodeids": [node for _, node in LEAVES],
        "target_ids": [0] * 5, "target_weights": [0.5, -1.0, 2.0, 0.75, -0.5],
    }  # fmt: skip
    model = model_of("TreeEnsembleRegressor", n_targets=1, nodes_modes=modes("BRANCH_LEQ"), **NODES, **leaves)
    expected = (
        "The model has no trainable weights. Its tensors are: 2 x fitted trees, whose splits have no gradient "
        "(node/thresholds, node/leaf_weights; 13 parameters, 52 bytes). No rule makes them trainable. Fit them again "
        "with the library that made them, or train layers that compute with their results."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(expected)}$"):
        onward.to_torch(model)


def test_trees_that_contradict_themselves_are_refused() -> None:
    leaves = {"target_treeids": [0], "target_nodeids": [1], "target_ids": [0], "target_weights": [1.0]}
    with pytest.raises(ModelError, match=r"attributes of unequal lengths .*nodes_modes 7"):
        onward.to_torch(model_of("TreeEnsembleRegressor", nodes_modes=modes("BRANCH_LEQ")[:7], **NODES, **leaves))
    circle = {**NODES, "nodes_truenodeids": [2, 0, 0, 0, 0, 1, 0, 0]}
    with pytest.raises(ModelError, match="its nodes form a cycle"):
        onward.to_torch(model_of("TreeEnsembleRegressor", nodes_modes=modes("BRANCH_LEQ"), **circle, **leaves))
    lost = {**NODES, "nodes_truenodeids": [7, 0, 3, 0, 0, 1, 0, 0]}
    with pytest.raises(ModelError, match="refers to node 7 of tree 0, which it does not have"):
        onward.to_torch(model_of("TreeEnsembleRegressor", nodes_modes=modes("BRANCH_LEQ"), **lost, **leaves))
