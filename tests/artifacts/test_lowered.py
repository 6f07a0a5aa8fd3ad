"""What a training graph in fp16 casts, and what it keeps."""

from __future__ import annotations

import torch

from onward.artifacts.lowered import Lowered
from onward.engine.network.precision import Precision
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.mlp import CROSS_ENTROPY, build_mlp


def test_labels_and_integers_keep_their_type_and_masks_stay_finite() -> None:
    graph = make_training_graph(build_mlp(), loss=LossSpec(**CROSS_ENTROPY))
    assert graph.loss is not None
    lowered = Lowered.of(OnnxModule(graph, (graph.loss,)), Precision(torch.float16), ("scale",))
    floats = torch.tensor([1.0, torch.finfo(torch.float32).min])
    for name in ("label", "scale"):
        assert lowered.cast(name, floats) is lowered.constant(name, floats) is floats
    assert lowered.cast("x", torch.arange(3)).dtype == lowered.constant("x", torch.arange(3)).dtype == torch.int64
    assert lowered.cast("w1", floats[:1]).dtype == torch.float16
    assert lowered.constant("mask", floats).tolist() == [1.0, torch.finfo(torch.float16).min]
