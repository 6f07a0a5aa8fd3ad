"""Models are written completely or not at all, their data next to them; what cannot be written says what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.errors import StorageError
from onward.graph.writing.model_saving import has_external_data, save_model, storage_error


def model_of(number: float) -> ir.Model:
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[300] x) => (y) { y = Add(x, w) }')
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.full(300, number, np.float32), "w"))
    return ir.from_proto(proto)


def weight(path: Path) -> float:
    return float(onnx.numpy_helper.to_array(onnx.load(path).graph.initializer[0])[0])


@pytest.mark.parametrize("external", [False, True])
def test_a_file_is_replaced_and_nothing_is_left(external: bool, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "net.onnx"
    for number in (1.0, 2.0):
        save_model(model_of(number), path, external)
        assert weight(path) == number
    assert sorted(one.name for one in path.parent.iterdir()) == ["net.onnx", *(["net.onnx.data"] if external else [])]


def test_what_is_external_stays_so_and_is_read_from_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    save_model(model_of(1.0), path, external=True)
    reader = ir.load(path)
    assert has_external_data(reader)
    assert not has_external_data(model_of(1.0))
    save_model(reader, path, readers=[reader])
    assert weight(path) == 1.0
    assert float(np.asarray(reader.graph.initializers["w"].const_value.numpy())[0]) == 1.0


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(StorageError, match=r"folder\.onnx' cannot be written: it is a directory\. Choose another path"):
        save_model(model_of(1.0), tmp_path / "folder.onnx")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Choose another path, or make this one writable"):
        save_model(model_of(1.0), tmp_path / "file" / "net.onnx")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder.onnx"]


def test_a_full_disk_is_told_with_numbers(tmp_path: Path) -> None:
    message = str(storage_error(tmp_path / "none" / "net.onnx", 12_000, OSError(errno.ENOSPC, "full")))
    assert "needs about 12,000 bytes; the disk has " in message
    assert message.endswith("free. Free some space, or choose another output_dir.")
