"""A file read without its weights gives the same model; what is damaged is reported as by the ordinary reader."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onward.errors import ModelError
from onward.graph.reading.lazy_file import _parse_without_values, read_model_lazily
from onward.graph.reading.model_file import TRAINING_INFO, read_model
from tests.graph.writing.test_streamed_file import model_with_everything


@pytest.fixture
def path(tmp_path: Path) -> Path:
    proto = model_with_everything()
    proto.training_info.add().initialization_binding.add(key="large", value="large")
    onnx.save(proto, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_the_model_is_the_same(path: Path) -> None:
    lazy, eager = read_model_lazily(path), read_model(path)
    assert ir.to_proto(lazy).SerializeToString() == ir.to_proto(eager).SerializeToString()
    assert lazy.meta[TRAINING_INFO] == eager.meta[TRAINING_INFO]


def test_large_weights_stay_in_the_file(path: Path) -> None:
    """Their values change with the file, under the model's feet; a nested graph's weight is in memory."""
    model = read_model_lazily(path)
    kinds = {name: type(value.const_value) for name, value in model.graph.initializers.items()}
    assert [name for name, kind in kinds.items() if kind is ir.LazyTensor] == ["large", "half", "four"]
    content = path.read_bytes()
    tensor = model.graph.initializers["large"].const_value
    assert tensor is not None
    start = content.index(tensor.tobytes())
    path.write_bytes(content[:start] + bytes(64 * 64 * 4) + content[start + 64 * 64 * 4 :])
    assert not tensor.numpy().any()


def test_what_cannot_be_read_lazily_is_read_as_usual(path: Path) -> None:
    os.link(path, path.parent / "linked.onnx")
    expected = ir.to_proto(read_model(path)).SerializeToString()
    assert ir.to_proto(read_model_lazily(path)).SerializeToString() == expected
    onnx.save(onnx.load(path), path.parent / "model.json")
    assert len(read_model_lazily(path.parent / "model.json").graph.initializers) == 4


@pytest.mark.parametrize("length", [0, 1, 100, -1, -5000])
def test_a_damaged_file_is_told_as_by_the_ordinary_reader(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError) as expected:
        read_model(path)
    with pytest.raises(ModelError) as found:
        read_model_lazily(path)
    assert str(found.value) == str(expected.value)


def test_a_weight_of_the_wrong_length_is_reported(tmp_path: Path) -> None:
    proto = model_with_everything()
    proto.graph.initializer[0].raw_data += b"1234"
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"initializer 'large' .* needs 16384 bytes, but is said to take 16388"):
        read_model_lazily(tmp_path / "model.onnx")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_model_lazily(tmp_path / "nothing.onnx")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x0a\x05abc", "a field reaches beyond the end of its message"),
        (b"\x0b", "a field of the unknown wire type 3"),
        (b"\x08" + b"\xff" * 11, "a number of more than 64 bits"),
    ],
)
def test_a_message_that_is_none_is_left_to_the_ordinary_reader(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        _parse_without_values(tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="is not an ONNX file, or is cut off"):
        read_model_lazily(tmp_path / "model.onnx")
