"""Attributes of ai.onnx.ml as weights: chosen, frozen, written back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onward
from onward.errors import OperatorError
from tests.fitted_models import run
from tests.one_classical_node import TRAINED, X, model_of


def test_trained_attributes_are_written_back(tmp_path: Path) -> None:
    model = model_of("LinearRegressor", **TRAINED["LinearRegressor"])
    net = onward.to_torch(model)
    with torch.no_grad():
        net.weights["node.coefficients"].copy_(torch.arange(4.0).reshape(2, 2))
    onward.export(net, tmp_path / "out.onnx")
    node = onnx.load(tmp_path / "out.onnx").graph.node[0]
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert found["coefficients"] == [0.0, 1.0, 2.0, 3.0]
    assert found["intercepts"] == pytest.approx([0.4, 0.5])
    np.testing.assert_allclose(
        run(onnx.load(tmp_path / "out.onnx"), {"x": X})["y"], net(torch.from_numpy(X)).detach(), rtol=1e-6
    )


def test_attributes_choose_and_freeze_like_other_weights() -> None:
    model = model_of("LinearRegressor", **TRAINED["LinearRegressor"])
    assert list(onward.to_torch(model, weights_not_to_train=["*.intercepts"]).weights) == ["node.coefficients"]


@pytest.mark.parametrize("op_type", ["DictVectorizer", "CastMap"])
def test_maps_as_inputs_are_refused(op_type: str) -> None:
    kind = onnx.TypeProto()
    kind.map_type.key_type = TensorProto.INT64
    kind.map_type.value_type.tensor_type.elem_type = TensorProto.FLOAT
    attributes: dict[str, Any] = {"int64_vocabulary": [0, 1]} if op_type == "DictVectorizer" else {}
    node = helper.make_node(op_type, ["x"], ["y"], name="node", domain="ai.onnx.ml", **attributes)
    inputs = [onnx.ValueInfoProto(name="x", type=kind)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    with pytest.raises(OperatorError, match=rf"{op_type}.*it computes with maps"):
        onward.to_torch(helper.make_model(graph, opset_imports=opsets, ir_version=8))
