"""Shards in the files of a checkpoint: any slice is read, and headers that lie are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.checkpoint.manifest import CheckpointManifest, FileEntry, TensorEntry
from onward.checkpoint.safetensors_format import OFFSETS_KEY
from onward.checkpoint.stored_tensors import StoredShard, StoredTensor, fill, find_stored_shards
from onward.errors import CheckpointError
from onward.parallel.sharded_tensors import ShardedTensor

VALUES = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def shard(folder: Path, values: torch.Tensor, *offsets: int) -> StoredShard:
    file = folder / f"{'-'.join(map(str, offsets))}.bin"
    file.write_bytes(b"head" + values.contiguous().view(torch.uint8).numpy().tobytes())
    return StoredShard(file=file, begin_bytes=4, dtype=values.dtype, offsets=offsets, sizes=tuple(values.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_slice_of_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = shard(tmp_path, VALUES.to(dtype), 0, 0)
    found = stored.read((slice(1, 2), slice(0, 2)))
    assert found.dtype is dtype
    assert found.float().tolist() == [[3.0, 4.0]]
    empty = StoredShard(file=tmp_path / "none", begin_bytes=0, dtype=dtype, offsets=(0,), sizes=(0,))
    assert empty.read((slice(None),)).shape == (0,)


def test_a_tensor_is_put_together(tmp_path: Path) -> None:
    shards = (shard(tmp_path, VALUES[:, :1], 0, 0), shard(tmp_path, VALUES[:, 1:], 0, 1))
    assert torch.equal(StoredTensor("w", torch.float32, (2, 3), shards).read(), VALUES)
    with pytest.raises(CheckpointError, match=r"of 'w' \[2, 3\] this rank needs 6 elements; the files .* hold 4"):
        StoredTensor("w", torch.float32, (2, 3), shards[1:]).read()
    shards[0].file.unlink()
    with pytest.raises(CheckpointError, match="'w' cannot be read from its checkpoint"):
        StoredTensor("w", torch.float32, (2, 3), shards).read()
    target = torch.zeros(2, 3)
    fill("w", ShardedTensor.full(target), (shard(tmp_path, VALUES, 0, 0),))
    assert torch.equal(target, VALUES)


def saved(folder: Path, header: Any, data: bytes = b"12345678", size: int | None = None) -> CheckpointManifest:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(text) if size is None else size) + text + data
    (folder / "a.safetensors").write_bytes(content)
    return CheckpointManifest(
        sequence=1, files=(FileEntry("a.safetensors", len(content), "0" * 64),),
        tensors={"w": TensorEntry("float32", (2,))}, record={}, written_by={},
    )  # fmt: skip


RIGHT = {
    "__metadata__": {OFFSETS_KEY: '{"w": {"saved_offsets": [0]}}'},
    "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
}


def test_a_header_as_it_should_be(tmp_path: Path) -> None:
    (stored,) = find_stored_shards(tmp_path, saved(tmp_path, RIGHT))["w"]
    assert (stored.offsets, stored.sizes, stored.dtype) == ((0,), (2,), torch.float32)
    assert stored.read((slice(None),)).view(torch.uint8).numpy().tobytes() == b"12345678"


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        (b"{", None, "Expecting"),
        ([], None, "its header is not a JSON object"),
        (RIGHT, 10**9, "its header claims 1,000,000,000 bytes"),
        ({**RIGHT, "w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, None, ""),
        ({**RIGHT, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}, None, ""),
        ({**RIGHT, "w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}, None, ""),
        ({**RIGHT, "v": RIGHT["w"]}, None, ""),
        ({**RIGHT, "w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, None, ""),
    ],
)
def test_headers_that_lie(header: Any, size: int | None, words: str, tmp_path: Path) -> None:
    manifest = saved(tmp_path, header, size=size)
    with pytest.raises(CheckpointError, match="is not a file of the checkpoint whose manifest is next to it") as caught:
        find_stored_shards(tmp_path, manifest)
    assert words in str(caught.value)
