"""Checkpoints that somebody forged, their checksums right: nothing outside of their folder is read or shown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.checkpoint.manifest import _digest
from onward.checkpoint.reading import read_new_tensors
from onward.checkpoint.run_record import read_run_record
from onward.checkpoint.writing import CheckpointWriter
from onward.errors import CheckpointError
from onward.untrusted_files import sha256_of
from tests.test_untrusted_files import ESCAPES

RECORD: dict[str, Any] = {
    "counters": {"step": 4, "round": 0, "update": 4, "skipped_updates": 0, "samples": 32, "ended_early_of": 0},
    "cursor": {"epoch": 0, "sample": 32, "file": None, "file_sample": 0, "fingerprint": ""},
    "loss_scale": None,
    "learning_rate": {"scale": 1.0, "fixed": None},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(b"secret")
    with CheckpointWriter(tmp_path / "run", 1) as writer:
        return writer.save(10, {"w": torch.ones(4)}, RECORD)


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the content of a manifest and gives it the checksum that it then has."""
    document = json.loads((path / "manifest.json").read_text())
    change(document["content"])
    document["sha256"] = _digest(document["content"])
    (path / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize("name", ESCAPES, ids=lambda name: repr(name)[:20])
def test_names_of_data_files(checkpoint: Path, name: Any) -> None:
    if isinstance(name, bytes) or name == "\udfff":
        pytest.skip("JSON cannot hold it")
    (checkpoint / "link").symlink_to(checkpoint.parent.parent / "secret")
    (checkpoint / "linked").symlink_to(checkpoint.parent.parent)
    forge(checkpoint, lambda content: content["files"][0].update(name=name, bytes=6))
    with pytest.raises(CheckpointError) as error:
        read_new_tensors(checkpoint)
    assert sha256_of(checkpoint.parent.parent / "secret") not in str(error.value)
    assert "Name another checkpoint" in str(error.value)


def test_a_data_file_that_is_a_link_to_another_folder(checkpoint: Path) -> None:
    data = next(checkpoint.glob("*.safetensors"))
    data.rename(checkpoint.parent / data.name)
    data.symlink_to(checkpoint.parent / data.name)
    with pytest.raises(CheckpointError, match="is outside of the folder"):
        read_new_tensors(checkpoint)


@pytest.mark.parametrize("which", ["manifest.json", "*.safetensors"])
def test_a_pipe_does_not_hang(checkpoint: Path, which: str) -> None:
    path = next(checkpoint.glob(which))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"is a pipe|has 0 bytes"):
        read_new_tensors(checkpoint)


WRONG_FIELDS: list[tuple[str, Any]] = [
    ("sequence", "1"), ("sequence", -1), ("sequence", 2**70), ("sequence", None), ("files", {}), ("files", [7]),
    ("files", [{"name": "a", "bytes": "7", "sha256": "0" * 64}]), ("files", [{"name": "a", "bytes": 7, "sha256": 7}]),
    ("tensors", []), ("tensors", {"w": 7}), ("tensors", {"w": {"dtype": "load", "shape": [4]}}),
    ("tensors", {"w": {"dtype": "float32", "shape": [-4]}}), ("tensors", {"w": {"dtype": "float32", "shape": "4"}}),
    ("tensors", {"w": {"dtype": "float32", "shape": [2**70]}}), ("record", []), ("written_by", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_FIELDS, ids=lambda one: repr(one)[:40])
def test_fields_of_the_wrong_type(checkpoint: Path, name: str, value: Any) -> None:
    forge(checkpoint, lambda content: content.update({name: value}))
    with pytest.raises(CheckpointError, match=f"not the fields of format version 2: '{name}'"):
        read_new_tensors(checkpoint)


WRONG_RECORDS: list[tuple[str, Any]] = [
    ("counters", None), ("counters", {"step": "4"}), ("counters", {"step": -4}), ("counters", {"step": 2**64}),
    ("counters", {"steps": 4}), ("counters", {"step": 1.5}), ("counters", {"step": True}), ("cursor", 7),
    ("cursor", {"epoch": 0}), ("ranks", {"0": {"data": 5, "cursor": RECORD["cursor"]}}), ("ranks", []),
    ("loss_scale", {"scale": 1.0}), ("loss_scale", "x"), ("learning_rate", {"scale": "much"}),
    ("learning_rate", {"rate": 1.0}), ("batch_sizes", {"0": [4]}), ("batch_sizes", []), ("callbacks", {"a": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_RECORDS, ids=lambda one: repr(one)[:40])
def test_records_of_the_wrong_type(checkpoint: Path, name: str, value: Any) -> None:
    forge(checkpoint, lambda content: content["record"].update({name: value}))
    with pytest.raises(CheckpointError, match=r"holds no record of a run: .* Name another checkpoint"):
        read_run_record(checkpoint)


def test_the_record_as_it_was_is_read(checkpoint: Path) -> None:
    assert read_run_record(checkpoint) == RECORD


HEADERS: dict[str, Any] = {
    "2^40 bytes": (2**40).to_bytes(8, "little"),
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "of another type": b'{"w": 7}',
    "no dtype": b'{"w": {"shape": [4], "data_offsets": [0, 16]}}',
    "unknown dtype": b'{"__metadata__": {}, "w": {"dtype": "X", "shape": [4], "data_offsets": [0, 16]}}',
    "negative": b'{"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}',
    "past the end": b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1048576]}}',
    "digits": b'{"w": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b'], "data_offsets": [0, 16]}}',
    "deep metadata": b'{"__metadata__": {"DCP_SHARDING_INFO": "' + b"[" * 50_000 + b'"}}',
}


@pytest.mark.parametrize("kind", HEADERS)
def test_forged_headers_of_data_files(checkpoint: Path, kind: str) -> None:
    data = next(checkpoint.glob("*.safetensors"))
    header = HEADERS[kind]
    data.write_bytes(header if kind == "2^40 bytes" else len(header).to_bytes(8, "little") + header + bytes(16))
    forge(checkpoint, lambda content: content["files"][0].update(bytes=data.stat().st_size, sha256=sha256_of(data)))
    with pytest.raises(CheckpointError, match="is not a file of the checkpoint whose manifest is next to it"):
        read_new_tensors(checkpoint)
