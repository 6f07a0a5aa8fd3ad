"""Manifests: what is written is read again, what is damaged is refused with what was expected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    TensorEntry,
    read_manifest,
    snapshot_record,
    write_manifest,
)
from onward.errors import CheckpointError

MANIFEST = CheckpointManifest(
    sequence=3,
    files=(FileEntry("a.safetensors", 10, "0" * 64), FileEntry("b.safetensors", 5, "f" * 64)),
    tensors={"größe": TensorEntry("bfloat16", (2, 0)), "number": TensorEntry("float32", ())},
    record={"counters": {"step": 1}, "loss": float("inf")},
    written_by={"onward": "0"},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert MANIFEST.size_bytes == 15
    assert str(TensorEntry.of(torch.zeros(2, 3, dtype=torch.float16))) == "float16 [2, 3]"


def rewritten(change: Callable[[dict[str, Any]], object], folder: Path, *, is_signed: bool) -> str:
    write_manifest(folder, MANIFEST)
    document = json.loads((folder / MANIFEST_NAME).read_text())
    change(document)
    if is_signed:
        canonical = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
        document["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / MANIFEST_NAME).write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_what_somebody_changed(tmp_path: Path) -> None:
    for change, words in (
        (lambda d: d["content"].update(sequence=4), "is damaged: expected SHA-256 "),
        (lambda d: d.update(version=99), "is of format version 99; this onward reads up to version 2."),
        (lambda d: d.update(version=True), "is damaged: expected SHA-256"),
        (lambda d: d.update(format="other"), "expected format 'onward-checkpoint', found 'other'"),
        (lambda d: d.update(content=None), "is damaged"),
    ):
        assert words in rewritten(change, tmp_path, is_signed=False)


def test_what_somebody_forged_with_its_checksum(tmp_path: Path) -> None:
    for change, words in (
        (lambda d: d["content"].update(sequence=-1), "sequence"),
        (lambda d: d["content"]["files"][0].update(name="../a"), "../a"),
        (lambda d: d["content"]["files"][0].update(sha256="x"), "sha256"),
        (lambda d: d["content"]["tensors"]["number"].update(dtype="Tensor"), "expected a dtype by torch's name"),
        (lambda d: d["content"]["tensors"]["number"].update(shape=[-1]), "shape"),
    ):
        message = rewritten(change, tmp_path, is_signed=True)
        assert "has the right checksum but not the fields of format version 2" in message
        assert words in message


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: it has no manifest\.json, which is"):
        read_manifest(tmp_path)
    for content in (b"", b"[]", b"\xff", b"3"):
        (tmp_path / MANIFEST_NAME).write_bytes(content)
        with pytest.raises(CheckpointError, match="Name another checkpoint"):
            read_manifest(tmp_path)


def test_a_record_is_copied_as_it_would_be_read() -> None:
    inner = [1, 2]
    copy = snapshot_record({"a": (1, inner), "b": None})
    inner.append(3)
    assert copy == {"a": [1, [1, 2]], "b": None}
    for record, words in (
        ({"a": {1: 2}}, r"record\['a'\] has the key 1 of type int; expected a str"),
        ({"a": [torch.zeros(1)]}, r"record\['a'\]\[0\] is a torch.Tensor; expected a plain JSON value"),
        ({"a": True, "b": {1.5}}, r"record\['b'\] is a builtins.set"),
    ):
        with pytest.raises(TypeError, match=words):
            snapshot_record(record)  # type: ignore[arg-type]
