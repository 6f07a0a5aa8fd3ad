"""A recomputed segment runs again, not twice, and lets go of what it saved."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onward.engine.network.forward import Forward
from onward.engine.network.network import Network
from onward.engine.network.precision import Precision
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.parameters.distributed import Recompute
from onward.plan.costs.segments import plan_segments


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def prepared() -> tuple[Network, Forward, dict[str, torch.Tensor]]:
    model = create_model("gpt2", size="tiny", layers=3, heads=2, width=16, vocab_size=32, context_length=8, dropout=0.0)
    loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    graph = make_training_graph(model, loss=loss, fuse=True)
    plan = plan_segments(graph.model.graph, graph.weights, False, Recompute(segments=True))
    network = Network(OnnxModule(graph), plan)
    network.train()
    network.net.train()
    batch = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("input_ids", "labels")}
    return network, Forward(network, [str(graph.loss)], Precision(None)), batch


def test_every_operator_of_a_segment_runs_once_more() -> None:
    _, forward, batch = prepared()
    (loss,) = forward(batch).values()
    loss.backward()
    with Counting() as ahead:
        (loss,) = forward(batch).values()
    with Counting() as back:
        loss.backward()
    for name in ("aten::native_layer_norm", "aten::gelu"):
        assert 0 < back.calls[name] <= ahead.calls[name], name


def test_nothing_is_left_for_the_garbage_collector() -> None:
    network, forward, batch = prepared()
    (loss,) = forward(batch).values()
    loss.backward()
    network.zero_grad(set_to_none=False)  # from here on gradients are objects of Python, too
    del loss
    gc.collect()
    gc.disable()
    try:
        before = _tensors()
        for _ in range(2):
            network.zero_grad(set_to_none=False)
            forward(batch)[forward.outputs[0]].backward()
        assert _tensors() == before
    finally:
        gc.enable()


def _tensors() -> int:
    return sum(type(one) in (torch.Tensor, torch.nn.Parameter) for one in gc.get_objects())
