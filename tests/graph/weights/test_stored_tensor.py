"""What is seen of an initializer: its name, its sizes, and who reads it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onward.graph.nodes import provenance
from onward.graph.reading.model_file import read_model
from onward.graph.repair import merged_weights, split_weights
from onward.graph.weights.copy_evidence import CopyEvidence
from onward.graph.weights.stored_tensor import StoredTensor
from tests.graph.weights.models_in_text import model_of, normal


def seen() -> dict[str, StoredTensor]:
    model = model_of(
        """(int64[N] ids, float[N, 2] x) => (float[N, 2] y)
        { rows = Gather(table, ids) left = MatMul(x, w) biased = Add(left, b) y = Add(biased, rows) }""",
        table=np.array([[1, 2], [2, 1]], np.float32),
        w=np.array([[1, 2], [3, 4]], np.float32),
        b=np.array([1, 2], np.float32),
    )
    graph = read_model(model).graph
    paths = provenance.ModulePaths.of(graph)
    return {name: StoredTensor(value, paths) for name, value in graph.initializers.items()}


def test_readers_and_sizes() -> None:
    found = seen()
    assert found["table"].is_looked_up
    assert found["table"].is_symmetric
    assert not found["w"].is_looked_up
    assert not found["w"].is_symmetric
    assert found["w"].biases == {"b"}
    assert found["w"].shape == (2, 2)
    assert found["b"].sizes == (2,)
    assert not found["w"].has_made_up_name
    assert not found["w"].is_folded
    assert not found["w"].has_noted_kind


def layers(count: int) -> ir.Model:
    """Equal layers, one after the other."""
    nodes = " ".join(f"x{i + 1} = MatMul(x{i}, layer{i}__w)" for i in range(count))
    weights = {f"layer{i}__w": normal(3, 3) for i in range(count)}
    return read_model(model_of(f"(float[N, 3] x0) => (float[N, 3] x{count}) {{ {nodes} }}", **weights))


@pytest.mark.parametrize("count", [40, 80])
def test_weights_under_their_own_names_are_not_compared_in_pairs(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 10,000 nodes took three minutes to be read."""
    asked = []
    original = CopyEvidence.may_be_unnoted_copy
    monkeypatch.setattr(CopyEvidence, "may_be_unnoted_copy", lambda *pair: (asked.append(pair), original(*pair))[1])
    model = layers(count)
    ties, _ = split_weights.tie_copies(model, merged_weights.split_merged_weights(model))
    assert not ties
    assert not asked
