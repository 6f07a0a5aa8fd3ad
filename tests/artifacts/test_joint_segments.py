"""Networks whose layers repeat: their training graph is traced a layer, and is that of the network."""

from __future__ import annotations

from pathlib import Path

import torch

from onward.artifacts.joint_graph import trace_joint_graph
from onward.artifacts.joint_segments import split_into_segments
from onward.artifacts.training_graph import write_training_graph
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from tests.artifacts.plain_runtime import autograd_gradients, call, largest_error, open_session


def gpt2(layers: int) -> OnnxModule:
    """With one weight for the first and the last layer, and masks that all layers read."""
    model = create_model("gpt2", layers=layers, width=8, heads=2, vocab_size=7, context_length=6, dropout=0.0)
    loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    graph = make_training_graph(model, loss=loss)
    assert graph.loss is not None
    return OnnxModule(graph, (graph.loss,)).train()


def test_equal_layers_are_traced_once_and_gradients_are_those_of_autograd(tmp_path: Path) -> None:
    net = gpt2(4)
    write_training_graph(net, tmp_path / "gpt2.onnx")
    session = open_session(tmp_path / "gpt2.onnx")
    for batch, length in ((1, 6), (3, 5)):
        torch.manual_seed(batch)
        features = {name: torch.randint(0, 7, (batch, length)) for name in ("input_ids", "labels")}
        results = call(session, features)
        for name, expected in autograd_gradients(net, features).items():
            assert largest_error(results[name], expected) < 2e-5, name


def test_deeper_networks_have_no_more_to_trace() -> None:
    sizes = {"batch": 2, "sequence": 6}
    shallow, deep = (trace_joint_graph(gpt2(layers), sizes) for layers in (4, 7))
    assert len(deep.codes) == len(shallow.codes) == 3
    assert len(deep.uses) == len(shallow.uses) + 3
    # The tied weight has a gradient of the lookup, and one of the last layer.
    assert sum("wte.weight" in use.gives_gradients_of for use in deep.uses) == 2


def test_what_does_not_repeat_is_one_segment() -> None:
    net = gpt2(1)
    assert len(split_into_segments(net, net.program).segments) == 1
