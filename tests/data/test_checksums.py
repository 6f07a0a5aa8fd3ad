"""A bit that flips in a packed shard is found when the shard is first read, wherever it is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from onward.data.loader import DataLoader
from onward.data.packing.options import PackOptions
from onward.data.packing.packer import pack
from onward.data.shard import load_shard
from onward.data.shard_writer import ShardWriter
from onward.errors import DataError


def packed(folder: Path, kind: str) -> Path:
    """A folder of three shards: of one layout for all samples, or sample by sample."""
    generator = np.random.default_rng(3)
    np.savez(folder / "a.npz", x=generator.standard_normal((30, 5)).astype(np.float32), y=np.arange(30))
    pack(folder / "a.npz", folder / kind, PackOptions(samples_per_file=10, progress=False))
    if kind == "ragged":
        path = folder / kind / "shard-000000.pb"
        with ShardWriter(path) as writer:
            for number in range(10):  # a feature that is not read has another size in each sample
                writer.write({"x": np.zeros(5, np.float32), "y": np.int64(number), "note": np.zeros(number + 1)})
        listed = json.loads((folder / kind / "pack.json").read_text())
        listed["shards"][0] |= {"bytes": writer.byte_count, "checksum": writer.checksum}
        (folder / kind / "pack.json").write_text(json.dumps(listed))
    return folder / kind


def read_all(folder: Path, **options: bool) -> DataLoader:
    with DataLoader({"note": ""}, folder, **options) as loader:
        for _ in loader.one_pass(7):
            pass
    return loader


@pytest.mark.parametrize("kind", ["uniform", "ragged"])
def test_a_flipped_bit_in_any_byte_is_found(tmp_path: Path, kind: str) -> None:
    """A generator of flips: 200 random bits of all bytes, values, names, shapes and lengths alike."""
    folder = packed(tmp_path, kind)
    read_all(folder)
    path = folder / "shard-000000.pb"
    original, generator = path.read_bytes(), random.Random(1)
    for _ in range(200):
        content = bytearray(original)
        place, bit = generator.randrange(len(content)), generator.randrange(8)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"shard-000000\.pb"):
            read_all(folder)
    path.write_bytes(original)
    read_all(folder)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    folder = packed(tmp_path, "uniform")
    path = folder / "shard-000001.pb"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_all(folder)
    text = str(caught.value)
    assert text.startswith(f"shard {str(path)!r} is corrupt: its bytes have the checksum xxh3-64:")
    assert ", but pack.json says xxh3-64:" in text
    assert "Copy it again or pack again; to train without it, set data.skip_corrupt_files" in text
    loader = read_all(folder, skip_corrupt=True)
    assert list(loader.skipped_files) == [path]


def test_a_shard_is_verified_once(tmp_path: Path) -> None:
    """Later epochs read without it: a change while training continues is not looked for."""
    folder = packed(tmp_path, "uniform")
    path = folder / "shard-000001.pb"
    with DataLoader({}, folder, 1) as loader:
        list(loader.one_pass(10))
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)
        assert len(list(loader.one_pass(10))) == 3


def test_older_shards_are_read_with_a_note(tmp_path: Path) -> None:
    folder = packed(tmp_path, "uniform")
    listed = json.loads((folder / "pack.json").read_text())
    assert all(entry["checksum"].startswith("xxh3-64:") for entry in listed["shards"])
    listed["version"] = 1
    for entry in listed["shards"]:
        del entry["checksum"]
    (folder / "pack.json").write_text(json.dumps(listed))
    loader = read_all(folder)
    assert loader.messages == [
        f"pack.json of {str(folder)!r} has no checksums, as an earlier version wrote it: values that changed on the "
        "disk would not be noticed. Pack the data again to have them verified."
    ]


def test_a_wrong_count_of_samples_is_found(tmp_path: Path) -> None:
    folder = packed(tmp_path, "uniform")
    listed = json.loads((folder / "pack.json").read_text())
    listed["shards"][2]["samples"] = 11
    (folder / "pack.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"has 10 samples, but pack\.json says 11: one of them is corrupt"):
        read_all(folder)


def test_a_checksum_of_a_later_version_is_named(tmp_path: Path) -> None:
    folder = packed(tmp_path, "uniform")
    with pytest.raises(DataError, match=r"has the checksum 'blake9:00' in pack\.json, which this onward cannot verify"):
        load_shard(folder / "shard-000000.pb", {}, "blake9:00")
