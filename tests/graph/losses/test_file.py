"""A model with its loss, written as a file."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onward.errors import ModelError, StorageError
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import MSE, pass_through


def test_writing(tmp_path: Path):
    """External data stay external, next to the new file; the model itself is never written over."""
    model = pass_through(13, {"y": ["batch", 3]})
    model.graph.node.append(helper.make_node("Add", ["y_in", "bias"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 3]))
    model.graph.initializer.append(helper.make_tensor("bias", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0]))
    source = tmp_path / "m.onnx"
    onnx.save(model, source, save_as_external_data=True, location="m.data", size_threshold=0)
    with pytest.raises(ModelError, match="cannot be written over the model itself"):
        write_model_with_loss(source, LossSpec(type=MSE, prediction="y", label="t"), source)
    target = tmp_path / "other" / "with_loss.onnx"
    write_model_with_loss(source, LossSpec(type=MSE, prediction="y", label="t"), target)
    onnx.checker.check_model(target, full_check=True)
    written = onnx.load(target)
    assert [node.op_type for node in written.graph.node][:2] == ["Identity", "Add"]
    assert onnx.numpy_helper.to_array(written.graph.initializer[0]).tolist() == [1.0, 2.0, 3.0]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write_model_with_loss(source, LossSpec(type=MSE, prediction="y", label="t"), tmp_path / "file" / "x.onnx")
