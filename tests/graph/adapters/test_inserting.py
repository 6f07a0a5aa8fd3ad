"""Adapters in a graph: in old opsets, with dropout, and names of results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import onward
from onward.graph.training_graph import make_training_graph
from onward.parameters import Adapter
from tests.graph.adapters.nets import adapted, computed, move, runtime
from tests.graph.adapters.readings import READINGS
from tests.mlp import build_mlp


def test_adapters_of_an_old_opset_are_written_in_it(tmp_path: Path):
    case = READINGS["MatMul with a bias"]
    net = adapted(case.model(9), dropout=0.5, dora=True)
    move(net)
    onward.export(net, tmp_path / "merged.onnx")
    expected = computed(net, case.inputs).detach().numpy()
    assert np.abs(runtime(tmp_path / "merged.onnx", case.inputs) - expected).max() < 1e-5


def test_dropout_is_on_the_adapters_side_in_training_alone():
    case = READINGS["MatMul"]
    net = adapted(case.model(), dropout=0.5)
    move(net)
    still = computed(net, case.inputs)
    net.train()
    base = torch.from_numpy(case.inputs["x"]) @ net.tensors_by_name()["w"]
    branch = [(computed(net, case.inputs) - base) for _ in range(2)]
    assert not torch.equal(*branch)
    assert torch.equal(still, computed(net.eval(), case.inputs))


def test_names_of_results_stay():
    graph = make_training_graph(build_mlp(), adapter=Adapter(rank=2, targets=("*",)))
    outputs = {value.name: node.op_type for node in graph.model.graph for value in node.outputs}
    assert [value.name for value in graph.model.graph.outputs] == ["logits"]
    assert outputs["logits"] == outputs["h1"] == "Add"
