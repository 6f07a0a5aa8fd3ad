"""What torch's exporters merge is given back to its layers under the parameters' own names; real ties stay."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import numpy_helper, parser
from torch import nn

from onward.graph.nodes.rearrangement import Rearrangement
from onward.graph.repair.merged_weights import may_be_merged, modules_that_share
from onward.graph.training_graph import make_training_graph
from tests.graph.exported import Encoder, Residual, Tied, export
from tests.graph.repair.exported_weights import BOTH, match, values


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
    assert match(graph, module) == ([], [])
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
    assert values(graph)[tie.weight].shape == (20, 8)
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
    missing, extra = match(graph, module)
    assert (missing, extra) == ([], [])
    assert len(set(graph.states)) == 6
    reads = Counter(
        str(node.inputs[index].name)
        for node in graph.model.graph
        if node.op_type == "BatchNormalization"
        for index in (3, 4)
    )
    assert set(reads.values()) == {1}


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


@BOTH
def test_modules_that_compute_with_a_parameter_of_another_one(dynamo: bool, opset: int, tmp_path: Path):
    """Such a module's own name of it is in no file, and is not reported as gone; that of a lost layer is."""
    path = export(Tied(), (torch.zeros(2, 3, dtype=torch.int64),), tmp_path / "m.onnx", opset, dynamo)
    proto = onnx.load(path)
    assert modules_that_share(ir.from_proto(proto).graph) == ({"embedding"} if dynamo else set())


def test_the_scale_of_a_pair_that_rounds_is_one():
    """For a file of quantize_static these were hundreds of notes."""
    scale = ir.Value(name="images_scale", const_value=ir.tensor(np.float32(0.0039)))
    x = ir.Value(name="x")
    rounded = ir.node("QuantizeLinear", [x, scale])
    ir.node("DequantizeLinear", [rounded.outputs[0], scale])
    ir.node(
        "QLinearMul", [rounded.outputs[0], scale, None, rounded.outputs[0], scale, None, scale], domain="com.microsoft"
    )
    assert not may_be_merged(scale, is_asked=False)
    assert may_be_merged(scale, is_asked=True)
    ir.node("Mul", [x, scale])
    assert may_be_merged(scale, is_asked=False), "what else reads it may be another layer"
