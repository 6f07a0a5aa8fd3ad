"""Which weights Muon orthogonalizes: matrices of hidden layers, not embeddings, last layers, vectors or kernels."""

from __future__ import annotations

import pytest

from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.graph.weights.hidden_matrices import hidden_matrices
from onward.models import create_model
from tests.plan.staged_models import BERT, GPT2, Sketch


def found(graph: TrainingGraph) -> set[str]:
    return set(hidden_matrices(graph.model.graph, graph.weights))


@pytest.mark.parametrize("fuse", [True, False])
def test_gpt2(fuse: bool) -> None:
    """The output layer is tied to the embedding, which neither may be."""
    graph = make_training_graph(create_model("gpt2", **GPT2), fuse=fuse)
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert found(graph) == {f"h.{block}.{layer}.weight" for block in range(4) for layer in layers}


def test_bert_without_its_embeddings_and_its_last_layer() -> None:
    graph = make_training_graph(create_model("bert", **BERT), fuse=True)
    of_two_axes = {name for name in graph.weights if len(graph.model.graph.initializers[name].shape or ()) == 2}
    rest = of_two_axes - found(graph)
    assert rest == {name for name in of_two_axes if "embeddings" in name or "seq_relationship" in name}


def test_what_is_read_otherwise_too_is_none() -> None:
    """Through a transpose it is; read by a sum as well, of one column, or as a filter it is not."""
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    a = sketch.node("MatMul", "a", x, sketch.node("Transpose", "turned", sketch.weight("seen", 4, 4), perm=[1, 0]))
    added = sketch.weight("added", 4, 4)
    b = sketch.node("MatMul", "b", a, added)
    c = sketch.node("MatMul", "c", b, sketch.node("Add", "sum", added, added))
    d = sketch.node("MatMul", "d", c, sketch.weight("column", 4, 1))
    y = sketch.node("Gemm", "y", d, sketch.weight("last", 1, 3))
    assert found(make_training_graph(sketch.model(y))) == {"seen"}
