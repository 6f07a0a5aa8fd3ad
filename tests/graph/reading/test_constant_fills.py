"""Weights stored as `ConstantOfShape` nodes become initializers that train; other fills stay what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import parser

import onward
from onward.graph.reading.constant_fills import fold_constant_fills
from onward.graph.reading.model_file import prepare_for_lowering, read_model


def _fold(text: str) -> ir.Model:
    model = ir.from_proto(parser.parse_model('<ir_version: 8, opset_import: ["" : 13]> g ' + text))
    fold_constant_fills(model)
    return model


def test_a_fill_that_feeds_a_convolution_becomes_a_weight() -> None:
    model = _fold("""(float[1, 2, 5, 5] x) => (float[N, 3, H, W] y) <int64[4] shape = {3, 2, 3, 3}> {
        w = ConstantOfShape <value = float[1] {0.25}> (shape)
        y = Conv(x, w)
    }""")
    stored = model.graph.initializers["w"].const_value
    assert stored is not None
    np.testing.assert_array_equal(stored.numpy(), np.full((3, 2, 3, 3), 0.25, np.float32))
    assert [node.op_type for node in model.graph] == ["Conv"]


def test_a_rearranged_fill_that_scales_channels_becomes_a_weight() -> None:
    model = _fold("""(float[1, 2, 5, 5] x) => (float[N, C, H, W] y) <int64[1] shape = {2}, int64[2] axes = {1, 2}> {
        s = ConstantOfShape <value = float[1] {0.5}> (shape)
        wide = Unsqueeze(s, axes)
        y = Mul(x, wide)
    }""")
    assert "s" in model.graph.initializers


def test_states_masks_and_integer_fills_stay_nodes() -> None:
    """An initial state, a mask that is added, a fill of integers, a graph output, a shape that is computed."""
    model = _fold("""(float[2, 3] x, int64[2] given) => (float[N, M] y, float[N] z, float[A, B] u) <
        int64[2] shape = {2, 3}, int64[1] one = {4}> {
        mask = ConstantOfShape <value = float[1] {1.0}> (shape)
        index = ConstantOfShape <value = int64[1] {1}> (one)
        z = ConstantOfShape (one)
        w = ConstantOfShape (given)
        u = MatMul(x, w)
        added = Add(x, mask)
        y = Gather <axis = 1> (added, index)
    }""")
    assert sum(node.op_type == "ConstantOfShape" for node in model.graph) == 4
    assert set(model.graph.initializers) == {"shape", "one"}


def test_the_light_models_of_the_onnx_package_train() -> None:
    """Every convolution's weight of ResNet-50 trains, under the name the file gives it."""
    path = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
    proto = onnx.load(path)
    net = prepare_for_lowering(read_model(proto))
    kernels = {node.inputs[1].name for node in net.graph if node.op_type == "Conv"}
    graph = onward.to_torch(proto).graph
    assert len(kernels) == 53
    assert kernels <= set(graph.weights)
    assert len(graph.states) == 2 * 53
