"""Quantized weights of a file stay packed."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.graph.quantized_base.choice import StoredBase
from onward.graph.quantized_base.passes import store_frozen_weights
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("has_points", [True, False])
def test_blocked_4_bit_weights_of_a_file_stay_packed(signed: bool, has_points: bool) -> None:
    K, N, block = 96, 64, 32
    kind, limits = (TensorProto.INT4, (-8, 8)) if signed else (TensorProto.UINT4, (0, 16))
    stored = {
        "w": helper.make_tensor("w", kind, (K, N), RANDOM.integers(*limits, K * N)),
        "s": numpy_helper.from_array(RANDOM.random((K // block, N), np.float32), "s"),
        "z": helper.make_tensor("z", kind, (K // block, N), RANDOM.integers(*limits, K // block * N)),
    }
    read = list(stored) if has_points else ["w", "s"]
    nodes = [
        helper.make_node("DequantizeLinear", read, ["d"], axis=0, block_size=block),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", K), ("y", N)))
    graph = helper.make_graph(nodes, "g", [x], [y], [stored[name] for name in read])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    training = make_training_graph(model)
    net = OnnxModule(store_frozen_weights(training, StoredBase()))
    assert {name: tensor.nbytes for name, tensor in net.named_buffers()}["w/packed"] == K * N // 2
    given = RANDOM.standard_normal((5, K)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # rounds activations to int8
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": given})
    np.testing.assert_allclose(net(torch.from_numpy(given)).numpy(), expected, rtol=1e-4, atol=1e-3)
