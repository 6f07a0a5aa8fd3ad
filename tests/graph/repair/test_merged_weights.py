"""What torch's exporters merge is given back to its layers under the parameters' own names; real ties stay."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from onward.graph.nodes.rearrangement import Rearrangement
from onward.graph.training_graph import TrainingGraph, make_training_graph
from tests.graph.exported import Encoder, Residual, Tied, export

BOTH = pytest.mark.parametrize(("dynamo", "opset"), [(True, 18), (False, 17)], ids=["new", "old"])


def _values(graph: TrainingGraph) -> dict[str, np.ndarray]:
    return {name: graph.model.graph.initializers[name].const_value.numpy() for name in graph.weights}


def _match(graph: TrainingGraph, module: nn.Module) -> tuple[list[str], list[str]]:
    """Parameters without a weight, weights without a parameter: by name, else by equal numbers, transposed or not."""
    weights = _values(graph)
    missing = []
    parameters = {name: p.detach().numpy() for name, p in module.named_parameters()}
    for name in [name for name in parameters if name in weights]:
        np.testing.assert_array_equal(weights.pop(name), parameters.pop(name))
    for name, array in parameters.items():
        equal = [w for w, other in weights.items() if np.array_equal(other, array) or np.array_equal(other, array.T)]
        if equal:
            weights.pop(equal[0])
        else:
            missing.append(name)
    return missing, list(weights)


@BOTH
def test_copied_layers(dynamo: bool, opset: int, tmp_path: Path):
    """Every parameter of two equal encoder layers is its own weight; a layer that is called twice stays one."""
    torch.manual_seed(0)
    module = Encoder().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.add_(0.25)  # the newer exporter drops biases that are zero
    path = export(module, (torch.randn(2, 5, 16),), tmp_path / "m.onnx", opset, dynamo)
    graph = make_training_graph(path)
    assert _match(graph, module) == ([], [])
    assert len(graph.weights) == len(list(module.parameters()))
    merged = [note for note in graph.notes if "merged by the exporter" in note]
    assert any("norm1.weight" in note and "norm2.weight" in note for note in merged)
    onnx.checker.check_model(ir.to_proto(graph.source), full_check=True)


@BOTH
def test_tied_embedding(dynamo: bool, opset: int, tmp_path: Path):
    """The output layer's transposed copy is the embedding's weight again."""
    module = Tied()
    path = export(module, (torch.randint(0, 20, (2, 5)),), tmp_path / "m.onnx", opset, dynamo)
    graph = make_training_graph(path)
    assert len(graph.weights) == 3
    ((copy, tie),) = graph.ties.items()
    assert tie.how == Rearrangement((1, 0))
    assert _values(graph)[tie.weight].shape == (20, 8)
    assert copy in graph.source.graph.initializers
    assert copy not in graph.model.graph.initializers
    assert f"{copy!r} is the transpose of {tie.weight!r}, folded by the exporter" in graph.notes[0]


def test_two_equal_layers_stay_two(tmp_path: Path):
    """Different random layers of one shape are never tied."""
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    graph = make_training_graph(export(module, (torch.randn(2, 8),), tmp_path / "m.onnx", 18, True))
    assert set(graph.weights) == {name for name, _ in module.named_parameters()}
    assert not graph.ties


@BOTH
def test_batch_norm_kept(dynamo: bool, opset: int, tmp_path: Path):
    """Scales and shifts are weights of their own, and so is each running statistic its own state."""
    module = Residual().train()
    options = (
        {"optimize": False} if dynamo else {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    )
    graph = make_training_graph(
        export(module, (torch.randn(2, 3, 8, 8),), tmp_path / "m.onnx", opset, dynamo, **options)
    )
    missing, extra = _match(graph, module)
    assert (missing, extra) == ([], [])
    assert len(set(graph.states)) == 6
    reads = Counter(
        str(node.inputs[index].name)
        for node in graph.model.graph
        if node.op_type == "BatchNormalization"
        for index in (3, 4)
    )
    assert set(reads.values()) == {1}


@BOTH
def test_batch_norm_folded_away_is_said(dynamo: bool, opset: int, tmp_path: Path):
    module = Residual().eval()
    graph = make_training_graph(export(module, (torch.randn(2, 3, 8, 8),), tmp_path / "m.onnx", opset, dynamo))
    assert graph.states == ()
    (note,) = (note for note in graph.notes if "batch normalization was folded into 3 convolutions" in note)
    assert ("optimize=False" if dynamo else "TrainingMode.TRAINING") in note


class TransposedKernel(nn.Module):
    """A convolution whose kernel is stored in another order, as Keras stores it; no batch normalization anywhere."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return nn.functional.conv2d(x, self.kernel.permute(3, 2, 0, 1)) + self.bias.reshape(1, 4, 1, 1)


def test_a_kernel_that_was_only_transposed_lost_no_batch_norm(tmp_path: Path):
    example = (torch.randn(2, 3, 8, 8),)
    model = export(TransposedKernel().eval(), example, tmp_path / "m.onnx", 17, False)
    assert any(name.startswith("onnx::Conv_") for name in make_training_graph(model).weights)
    assert not any("batch normalization" in note for note in make_training_graph(model).notes)


def test_a_bias_of_zeros_that_the_export_dropped_is_said(tmp_path: Path):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        module[2].bias.zero_()
    graph = make_training_graph(export(module, (torch.randn(2, 8),), tmp_path / "m.onnx", 18, True))
    (note,) = graph.notes
    assert "was exported without its bias, which was all zeros; it cannot be trained" in note
    assert "optimize=False" in note
    kept = make_training_graph(export(module, (torch.randn(2, 8),), tmp_path / "k.onnx", 18, True, optimize=False))
    assert kept.notes == ()
    assert _match(kept, module) == ([], [])


def _merged() -> onnx.ModelProto:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 4] y)
        { a = LayerNormalization(x, ones, zeros) b = LayerNormalization(a, ones, zeros) y = Add(b, zeros) }"""
    )
    for name, fill in (("ones", 1.0), ("zeros", 0.0)):
        model.graph.initializer.append(numpy_helper.from_array(np.full(4, fill, np.float32), name))
    for node, name in zip(model.graph.node, ("first", "second", "shift"), strict=True):
        node.name = name
    return model


def test_without_metadata_all_equal_tensors_are_split_by_node():
    graph = make_training_graph(_merged())
    assert graph.weights == ("ones", "zeros", "ones.second", "zeros.second", "zeros.shift")
    assert "'zeros' (shape [4], all 0) fed 3 layers, merged by the exporter; each has its own again" in graph.notes[1]


def test_tied_weights_keeps_them():
    graph = make_training_graph(_merged(), tied_weights=["zer*"])
    assert graph.weights == ("ones", "zeros", "ones.second")


def test_the_given_model_is_not_changed():
    model = _merged()
    before = model.SerializeToString()
    make_training_graph(model)
    assert model.SerializeToString() == before
