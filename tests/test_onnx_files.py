"""Files in every form that onnx knows; text that is nested too deeply is refused before a parser sees it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onward.onnx_files import DEEPEST_TEXT, external_locations, load_message

MODEL = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (y) { y = Relu(x) }')


@pytest.mark.parametrize("name", ["m.onnx", "m.json", "m.textproto", "m", "m.pb"])
def test_every_form(name: str, tmp_path: Path) -> None:
    onnx.save(MODEL, tmp_path / name)
    assert load_message(tmp_path / name).graph.node[0].op_type == "Relu"


def test_deep_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text("[" * (DEEPEST_TEXT + 1))
    with pytest.raises(ValueError, match=f"it is nested more than {DEEPEST_TEXT} brackets deep"):
        load_message(path)


def test_closed_brackets_and_those_in_text_do_not_count(tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    model.doc_string = "[" * 300
    model.metadata_props.extend(onnx.StringStringEntryProto(key=str(number)) for number in range(300))
    for name in ("m.json", "m.textproto"):
        onnx.save(model, tmp_path / name)
        assert load_message(tmp_path / name) == model


def test_files_that_tensors_are_stored_in() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    tensor = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.bin"), ("offset", "0")):
        tensor.external_data.add(key=key, value=value)
    model.graph.initializer.append(tensor)
    model.graph.initializer.append(helper.make_tensor("here", 1, [1], [1]))
    assert list(external_locations(model)) == ["weights.bin"]
