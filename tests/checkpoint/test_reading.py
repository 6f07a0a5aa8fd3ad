"""Loading: only whole and right checkpoints, and an error that says what is wrong with the others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from onward.checkpoint.reading import (
    checkpoint_number,
    find_checkpoint,
    find_latest,
    list_checkpoints,
    read_new_tensors,
    read_record,
    read_tensors,
    verify,
)
from onward.checkpoint.writing import CheckpointWriter
from onward.errors import CheckpointError
from tests.checkpoint.contents import RECORD, every_kind, same


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints after 10, 20 and 30 updates."""
    with CheckpointWriter(tmp_path, 3) as writer:
        for number in (10, 20, 30):
            writer.save(number, every_kind(number), RECORD)
    return tmp_path


def error_of(path: Path) -> str:
    """What `read_tensors` says of a checkpoint whose tensors fit; and that it changed none of them."""
    into = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in every_kind().items()}
    with pytest.raises(CheckpointError) as error:
        read_tensors(path, into)
    assert not any(tensor.view(torch.uint8).any() for tensor in into.values() if tensor.dim() > 0)
    return str(error.value)


def test_the_latest_complete_one_is_found(directory: Path) -> None:
    (directory / "checkpoint-00000040").mkdir()
    (directory / "checkpoint-00000040" / "rank-00000.safetensors").write_bytes(b"half")
    (directory / ".tmp-onward-checkpoint-00000050").mkdir()
    (directory / ".tmp-onward-checkpoint-00000050" / "manifest.json").write_text("{}")
    (directory / "checkpoint-7").mkdir()
    (directory / "notes.txt").write_text("x")
    assert [checkpoint_number(path) for path in list_checkpoints(directory)] == [10, 20, 30]
    assert find_latest(directory) == directory / "checkpoint-00000030"


def test_no_directory_and_an_empty_one_hold_no_checkpoint(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None
    assert list_checkpoints(tmp_path / "absent") == []


def test_a_path_to_load_is_a_checkpoint_or_a_directory_of_them(directory: Path) -> None:
    assert find_checkpoint(directory) == directory / "checkpoint-00000030"
    assert find_checkpoint(directory / "checkpoint-00000010") == directory / "checkpoint-00000010"
    (directory / "checkpoint-00000010").rename(directory / "the good one")
    assert find_checkpoint(directory / "the good one") == directory / "the good one"


def test_a_path_without_a_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"the checkpoint .*absent does not exist. Expected a directory with a man"
    ):
        find_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"there is no complete checkpoint in .*: it is empty. Expected"):
        find_checkpoint(tmp_path)
    (tmp_path / "model.onnx").write_text("x")
    with pytest.raises(
        CheckpointError, match=r"it holds model.onnx. Expected .* Name another path; without any, training begins"
    ):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.onnx is not a directory"):
        find_checkpoint(tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: it has no manifest.json"):
        verify(tmp_path)


def test_any_flipped_byte_is_found(directory: Path) -> None:
    """A bit in the header, in the first and in the last byte of the data, and a changed letter in the manifest."""
    path = directory / "checkpoint-00000020"
    data = path / "rank-00000.safetensors"
    good = data.read_bytes()
    for place in (3, 20, len(good) // 2, len(good) - 1):
        data.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        text = error_of(path)
        assert text.startswith(f"the checkpoint {path} is damaged: {data} has the SHA-256 ")
        assert ", expected " in text
        assert (
            "There are others, checkpoint-00000030, checkpoint-00000010: set checkpoint.if_damaged to earlier" in text
        )
    data.write_bytes(good)
    verify(path)
    manifest = path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"update": 7', '"update": 8'))
    assert "manifest.json is damaged: expected SHA-256 " in error_of(path)
    with pytest.raises(
        CheckpointError, match=r"manifest.json is damaged: expected SHA-256 [0-9a-f]{64} of its content"
    ):
        read_record(path)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    """Flipping any one byte is reported, or leaves the content as it was (white space, the case of an escape)."""
    with CheckpointWriter(tmp_path, 1) as writer:
        path = writer.save(1, {"w": torch.zeros(2)}, {"update": 1})
    manifest = path / "manifest.json"
    good = manifest.read_bytes()
    before = verify(path)
    told = 0
    for place in range(len(good)):
        manifest.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            assert verify(path) == before
        except CheckpointError:
            told += 1
    assert told > 0.8 * len(good)


def test_a_truncated_a_missing_and_a_strange_file_are_reported(directory: Path) -> None:
    path = directory / "checkpoint-00000020"
    data = path / "rank-00000.safetensors"
    good = data.read_bytes()
    data.write_bytes(good[:-100])
    assert f"{data} has {len(good) - 100} bytes, expected {len(good)}." in error_of(path)
    data.unlink()
    assert f"{data} is missing, expected {len(good)} bytes." in error_of(path)
    data.write_bytes(good)
    (path / "other.safetensors").write_bytes(good)
    assert "holds files that its manifest does not name: other.safetensors." in error_of(path)


def test_a_damaged_only_checkpoint_has_no_other_to_offer(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 3) as writer:
        path = writer.save(10, every_kind(), RECORD)
    (path / "rank-00000.safetensors").write_bytes(b"")
    assert "There is no other one in its folder: restore it from a copy, or set checkpoint.if_damaged" in error_of(path)


def test_a_damaged_manifest_of_what_may_be_the_latest_is_not_passed_over(directory: Path) -> None:
    """No silent fall back to an older checkpoint; an older damaged one is in nobody's way."""
    (directory / "checkpoint-00000010" / "manifest.json").write_text("")
    assert find_latest(directory) == directory / "checkpoint-00000030"
    (directory / "checkpoint-00000030" / "manifest.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-00000030/manifest.json is damaged: .* Name another checkpoint"
    ):
        find_latest(directory)


def test_a_checkpoint_of_another_model_is_told_with_all_differences(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        tensors = {"weights/a": torch.zeros(3, 4), "weights/b": torch.zeros(2), "weights/c": torch.zeros(())}
        path = writer.save(1, tensors | {"slots/x": torch.zeros(5)}, {})
    into = {"weights/a": torch.ones(4, 3), "weights/b": torch.ones(2).bfloat16(), "weights/c": torch.ones(())}
    with pytest.raises(CheckpointError) as error:
        read_tensors(path, into | {"weights/new": torch.ones(7)})
    assert str(error.value) == (
        f"{path} is a checkpoint of another model, or of another optimizer. Of 4 tensors in the checkpoint and 4 in "
        "this run, 2 of another shape or type: weights/a float32 [3, 4] in the checkpoint, float32 [4, 3] in this run, "
        "weights/b float32 [2] in the checkpoint, bfloat16 [2] in this run; 1 in the checkpoint only: slots/x float32 "
        "[5]; 1 in this run only: weights/new float32 [7]. Load it with the model and optimizer it was saved with, or "
        "name another checkpoint."
    )
    assert into["weights/c"].item() == 1
    many = {f"weights/{i}": torch.ones(1) for i in range(50)}
    with pytest.raises(CheckpointError, match=r"50 in this run only: .* and 46 more\. Load"):
        read_tensors(path, many)


def test_a_part_can_be_read(directory: Path) -> None:
    """`prefix` reads the weights alone, into new tensors or given ones."""
    path = directory / "checkpoint-00000020"
    tensors = {name: tensor for name, tensor in every_kind(20).items() if name.startswith("weights/")}
    read = read_new_tensors(path, "weights/")
    assert set(read) == set(tensors)
    assert all(same(tensors[name], read[name]) for name in tensors)
    into = {"slots/step/w": torch.zeros(())}
    read_tensors(path, into, prefix="slots/")
    assert into["slots/step/w"].item() == 20


def test_values_go_into_the_very_tensors_given(directory: Path) -> None:
    """In place, into parameters that require gradients and into strided views alike."""
    weight = torch.nn.Parameter(torch.zeros(40, 30))
    column = torch.zeros(30, 40).t()
    tensors = read_new_tensors(directory / "checkpoint-00000010")
    for target in (weight, column):
        address = target.data_ptr()
        read_tensors(directory / "checkpoint-00000010", tensors | {"weights/h.0.attn.weight": target})
        assert target.data_ptr() == address
        assert same(target, every_kind(10)["weights/h.0.attn.weight"])


def test_a_newer_format_and_a_foreign_file_are_reported(directory: Path) -> None:
    path = directory / "checkpoint-00000010"
    manifest = path / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(document | {"version": 3}))
    assert "is of format version 3; this onward reads up to version 2" in error_of(path)
    manifest.write_text(json.dumps({"format": "something"}))
    assert "expected format 'onward-checkpoint', found 'something'" in error_of(path)
    manifest.write_text("[]")
    assert "expected format 'onward-checkpoint', found 'list'" in error_of(path)


def test_a_disk_that_does_not_answer_is_reported(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("onward.checkpoint.reading.fill", refuse)
        assert re.search(
            r"the checkpoint .*00000030 cannot be loaded: .*Input/output error", error_of(find_latest(directory))
        )
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"the checkpoints in .* cannot be listed: .*Input/output error"):
        list_checkpoints(directory)
