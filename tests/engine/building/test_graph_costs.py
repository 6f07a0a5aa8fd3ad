"""Costs behind fused nodes, whose shapes ONNX's inference does not find."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from onward.engine.building.graph_costs import known_costs
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from onward.parameters import Parameters
from onward.plan.costs.costs import measure_costs
from onward.plan.topology import Topology

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


def test_stages_are_balanced_for_the_batch_that_there_is(tmp_path: Path) -> None:
    """In a file without shapes the layers behind the first attention counted a batch of 64, the first one of 2."""
    sizes = {"layers": 4, "heads": 2, "width": 16, "vocab_size": 16, "context_length": 8}
    model = create_model("gpt2", size="tiny", dropout=0.0, **sizes)
    plans = []
    for name in ("shaped", "bare"):
        ir.save(model, tmp_path / f"{name}.onnx")
        parameters = Parameters.from_mapping(
            {
                "paths": {"model_path": str(tmp_path / f"{name}.onnx")},
                "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
                "training": {"batch_size": 2, "num_train_steps": 2, "mapped_dimensions": {"sequence": 8}},
                "learning_rate": {"initial_lr": 0.1},
                "distributed": {"pipeline_parallel_size": 2, "pipeline_schedule": "GPipe"},
            }
        )
        graph = read_training_graph(parameters)
        if name == "bare":
            for value in (value for node in graph.model.graph for value in node.outputs):
                value.shape = None
            assert measure_costs(graph, {"batch": 2, "sequence": 8}).guessed
        plans.append(plan_run(parameters, Topology(pipeline_size=2), graph, {}))
    assert plans[0].stage_of == plans[1].stage_of
