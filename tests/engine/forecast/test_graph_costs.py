"""Costs behind fused nodes, whose shapes ONNX's inference does not find."""

from __future__ import annotations

from onward.engine.forecast.graph_costs import known_costs
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from onward.plan.costs.costs import measure_costs

LOSS = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")


def test_matmuls_behind_fused_attention_count_the_batch_that_there_is() -> None:
    """A file without the shapes of its values: what was guessed behind the first attention was 64 samples."""
    sizes = {"layers": 2, "heads": 2, "width": 16, "vocab_size": 64, "context_length": 8}
    model = create_model("gpt2", size="tiny", dropout=0.0, **sizes)
    expected = measure_costs(make_training_graph(model.clone(), loss=LOSS, fuse=True), {"batch": 2, "sequence": 8})
    for value in (value for node in model.graph for value in node.outputs if not value.is_graph_output()):
        value.shape = None
    graph = make_training_graph(model, loss=LOSS, fuse=True)
    for value in (value for node in graph.model.graph for value in node.outputs):
        value.shape = None
    sizes = {"batch": 2, "sequence": 8}
    found = known_costs(graph, sizes)
    assert measure_costs(graph, sizes).guessed
    assert not found.guessed
    assert found.total(found.nodes).forward == expected.total(expected.nodes).forward
