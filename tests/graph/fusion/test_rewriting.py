"""What rewriting leaves alone: the user's graph, names of results, values that a run names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

import onward
from onward.graph.fusion.rewriting import DOMAIN
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from tests.graph.fusion.pairs import TINY, kinds


def test_what_leaves_is_the_users_graph(tmp_path: Path) -> None:
    model = create_model("gpt2", opset=14, **TINY)
    net = onward.to_torch(model)
    assert {node.domain for node in net.graph.model.graph} == {"", DOMAIN}
    onward.export(net, tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(written)
    assert [node.op_type for node in written.graph.node] == [node.op_type for node in model.graph]
    assert {entry.domain for entry in written.opset_import} == {""}


@pytest.mark.parametrize(
    "keep", ["h.0.attn/Softmax_output", "h.0.attn/Softmax", "h.0.attn/Softmax_output:h.0.attn/MatMul_3"]
)
def test_values_that_a_run_names_stay(keep: str) -> None:
    """A value to watch, a node with its own stage, a place where stages are cut."""
    graph = make_training_graph(create_model("gpt2", opset=20, **TINY), fuse=True, keep=(keep,))
    assert kinds(graph) == {"attention": 1, "linear": 8}
    assert any(value.name == "h.0.attn/Softmax_output" for node in graph.model.graph for value in node.outputs)


def test_names_of_results_are_those_of_the_written_out_graph() -> None:
    model = create_model("gpt2", opset=14, **TINY)
    plain = {value.name for node in make_training_graph(model).model.graph for value in node.outputs}
    fused = make_training_graph(model, fuse=True)
    names = [value.name for node in fused.model.graph for value in node.outputs]
    assert not [name for name, count in Counter(names).items() if count > 1]
    assert {name for name in names if not str(name).startswith("fused/")} <= plain
    assert [value.name for value in fused.model.graph.outputs] == ["logits"]
