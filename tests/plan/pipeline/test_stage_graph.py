"""The graph of one stage: ordinary ONNX that ONNX Runtime runs, with its own weights only."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onward.lowering.module import OnnxModule
from onward.plan.pipeline.balance import balanced_stages
from onward.plan.pipeline.stage_graph import computed, stage_graph
from onward.plan.pipeline.stages import plan_stages
from tests.plan.staged_models import batch_of, graph_of


@pytest.mark.parametrize("name", ["gpt2", "bert", "squeezenet", "u_net"])
def test_stages_one_after_the_other_in_onnxruntime_give_the_loss(name: str) -> None:
    """onnxruntime runs each stage's file; the loss is the entire network's, computed by torch, to 1e-5."""
    graph = graph_of(name)
    plan = plan_stages(graph, balanced_stages(graph, 3), 3)
    features = batch_of(name, 5)
    network = OnnxModule(graph_of(name), (str(graph.loss),))
    with torch.no_grad():
        expected = float(network(**{key: features[key] for key in network.program.inputs}))
    values = {key: tensor.numpy() for key, tensor in features.items()}
    for index, stage in enumerate(plan.stages):
        part = stage_graph(graph, plan, index)
        proto = ir.to_proto(part.model)
        onnx.checker.check_model(proto)
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        assert [node.name for node in session.get_outputs()] == list(computed(stage))
        feeds = {node.name: values[node.name] for node in session.get_inputs()}
        found = dict(zip(computed(stage), session.run(None, feeds), strict=True))
        values |= found
    assert float(values[str(graph.loss)]) == pytest.approx(expected, rel=1e-5)


def test_a_stage_holds_its_own_tensors_only() -> None:
    graph = graph_of("gpt2")
    plan = plan_stages(graph, balanced_stages(graph, 4), 4)
    for stage in plan.stages:
        part = stage_graph(graph, plan, stage.index)
        assert set(part.weights) == set(stage.weights) == set(graph.weights) & set(part.model.graph.initializers)
        assert [value.name for value in part.model.graph.inputs] == [
            *stage.inputs, *(transfer.name for transfer in stage.received),
        ]  # fmt: skip
        # The tensors are those of the entire model, still where they were: nothing was read or copied.
        for name in stage.weights:
            whole, own = (g.model.graph.initializers[name].const_value for g in (graph, part))
            assert whole is own
    assert stage_graph(graph, plan, 0).loss_names is None
    last = stage_graph(graph, plan, 3).loss_names
    assert last is not None
    assert (last.loss, last.labels, last.correct) == ("loss", ("labels",), "loss/correct")


def test_parts_of_the_loss_stay_with_the_stage_that_has_them() -> None:
    graph = graph_of("bert")
    plan = plan_stages(graph, balanced_stages(graph, 2), 2)
    names = stage_graph(graph, plan, 1).loss_names
    assert names is not None
    assert names.parts == ("mlm_loss", "nsp_loss")
    assert set(names.constants) <= set(stage_graph(graph, plan, 1).model.graph.initializers)
