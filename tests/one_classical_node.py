"""One node of ai.onnx.ml, compared with what onnxruntime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

import onward
from tests.fitted_models import run

X = np.array([[0.3, 0.1], [-0.2, 0.4], [0.0, 0.0], [2.0, -3.0]], np.float32)
SCORES_OF = {"LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"}
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")


def model_of(
    op_type: str, x: np.ndarray = X, version: int = 1, label_type: int = TensorProto.INT64, **attributes: Any
) -> onnx.ModelProto:
    """One node over an input `x`."""
    outputs = ["label", "scores"] if op_type in SCORES_OF else ["y"]
    node = helper.make_node(op_type, ["x"], outputs, name="node", domain="ai.onnx.ml", **attributes)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    inputs = [helper.make_tensor_value_info("x", kind, ["n", *x.shape[1:]])]
    types = {"label": label_type, "scores": TensorProto.FLOAT}
    infos = [helper.make_tensor_value_info(name, types.get(name, TensorProto.UNDEFINED), None) for name in outputs]
    if len(outputs) == 1:
        infos = [onnx.ValueInfoProto(name="y")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", version)]
    return helper.make_model(helper.make_graph([node], "g", inputs, infos), opset_imports=opsets, ir_version=8)


def check(
    op_type: str, x: np.ndarray = X, tolerance: float = 2e-6, **attributes: Any
) -> onward.lowering.module.OnnxModule:
    """What a node gives equals what onnxruntime gives, in value, shape and type."""
    model = model_of(op_type, x, **attributes)
    expected = run(model, {"x": x})
    net = onward.to_torch(model)
    with torch.no_grad():
        results = net(torch.from_numpy(x))
    for (name, array), result in zip(
        expected.items(), results if isinstance(results, tuple) else (results,), strict=True
    ):
        assert result.numpy().dtype == array.dtype, name
        np.testing.assert_allclose(result.numpy(), array, rtol=tolerance, atol=tolerance, err_msg=name)
    return net


SVM = {"kernel_params": [0.7, 0.3, 2.0], "support_vectors": [0.1, 0.2, -0.4, 1.0, 0.5, 0.6], "rho": [0.3]}
NODES = {
    "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1],
    "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 0, 1, 0, 0, 1, 0, 0],
    "nodes_values": [0.1, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 3, 0, 0, 1, 0, 0],
    "nodes_falsenodeids": [2, 0, 4, 0, 0, 2, 0, 0],
}
LEAVES = ((0, 1), (0, 3), (0, 4), (1, 1), (1, 2))


def modes(branch: str) -> list[str]:
    return [branch, "LEAF", branch, "LEAF", "LEAF", branch, "LEAF", "LEAF"]


TRAINED: dict[str, dict[str, Any]] = {
    "Scaler": {"offset": [1.0, 2.0], "scale": [0.5, 3.0]},
    "LinearRegressor": {"coefficients": [1.0, 0.2, -0.5, 0.3], "intercepts": [0.4, 0.5], "targets": 2},
    "LinearClassifier": {
        "coefficients": [1.0, 0.2, -0.5, 0.3], "intercepts": [0.4, 0.5], "classlabels_ints": [3, 4],
        "post_transform": "SOFTMAX",
    },
    "SVMRegressor": {"kernel_type": "RBF", "coefficients": [0.5, -1.0, 2.0], "n_supports": 3, **SVM},
    "Normalizer": {"norm": "L2"},
}  # fmt: skip
