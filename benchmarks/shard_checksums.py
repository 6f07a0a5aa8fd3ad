"""What checksums of shards cost when they are first read: `python -m benchmarks.shard_checksums [--megabytes 256]`.

Every line is read with and without checksums in turn, several times; what checksums take more is the median of the
differences in CPU time, which other programs on the machine disturb less than the clock. The peers are a plain `read`
of the same bytes, and the same bytes through CRC-32 (zlib) and SHA-256 (hashlib).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from onward.data.loader import DataLoader
from onward.data.manifest import MANIFEST_NAME, read_manifest
from onward.data.packing.options import PackOptions
from onward.data.packing.packer import pack
from onward.data.shard import load_shard

BLOCK_BYTES = 1 << 20


def _packed(folder: Path, megabytes: int) -> Path:
    """Images of 3 x 64 x 64 as float32, with a label."""
    count = megabytes * 10**6 // (3 * 64 * 64 * 4)
    x = np.random.default_rng(0).standard_normal((count, 3, 64, 64)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, label=np.arange(count) % 10)
    pack(folder / "data.npz", folder / "shards", PackOptions(samples_per_file=count // 4, progress=False))
    return folder / "shards"


def _seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Of all threads on the processor, and of the clock."""
    began, cpu = time.perf_counter(), time.process_time()
    action()
    return time.process_time() - cpu, time.perf_counter() - began


def _each_block(shards: Path, take: Callable[[memoryview], object]) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for path in sorted(shards.glob("*.pb")):
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                take(buffer[:size])


def _evict(shards: Path) -> None:
    """Out of the page cache, so that the disk is read."""
    for path in shards.glob("*.pb"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _decode(shards: Path, checksums: dict[str, str]) -> None:
    for path in sorted(shards.glob("*.pb")):
        load_shard(path, {}, checksums.get(path.name))


def _batches(shards: Path) -> None:
    with DataLoader({}, shards) as loader:
        for _ in loader.one_pass(32):
            pass


def _pairs(
    without: Callable[[], object], with_: Callable[[], object], repeats: int, before: Callable[[], object]
) -> tuple[float, float, float]:
    """CPU and wall seconds of the first, and CPU seconds that the second takes more; medians."""
    a: list[Any] = []
    b: list[Any] = []
    for number in range(repeats):
        for action, found in ((without, a), (with_, b)) if number % 2 else ((with_, b), (without, a)):
            before()
            found.append(_seconds(action))
    more = statistics.median(second[0] - first[0] for first, second in zip(a, b, strict=True))
    return statistics.median(one[0] for one in a), statistics.median(one[1] for one in a), more


def _without_checksums(shards: Path) -> Path:
    """The same files with a manifest that lists no checksums."""
    other = shards.with_name("unchecked")
    other.mkdir()
    for path in shards.glob("*.pb"):
        os.link(path, other / path.name)
    text = (shards / MANIFEST_NAME).read_text()
    manifest = read_manifest(shards)
    assert manifest is not None
    for entry in manifest.shards:
        text = text.replace(f'"{entry.checksum}"', '""')
    (other / MANIFEST_NAME).write_text(text)
    return other


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        shards = _packed(Path(folder), asked.megabytes)
        plain = _without_checksums(shards)
        manifest = read_manifest(shards)
        assert manifest is not None
        checksums = {entry.file: entry.checksum for entry in manifest.shards}
        size = sum(path.stat().st_size for path in shards.glob("*.pb"))
        lines: list[tuple[str, Callable[[], object], Callable[[], object], Callable[[], object]]] = []

        def nothing() -> None:
            return None

        def evict() -> None:
            _evict(shards)

        for name, take in (("XXH3", xxhash.xxh3_64), ("CRC-32", None), ("SHA-256", hashlib.sha256)):
            add = zlib.crc32 if take is None else take().update
            lines.append(
                (f"read from the page cache, {name}", lambda: _each_block(shards, len),
                 lambda add=add: _each_block(shards, add), nothing)  # type: ignore[misc]
            )  # fmt: skip
        decoded = (lambda: _decode(shards, {}), lambda: _decode(shards, checksums))  # type: ignore[arg-type]
        batched = (lambda: _batches(plain), lambda: _batches(shards))
        lines += [("load_shard from the page cache", *decoded, nothing), ("load_shard from the disk", *decoded, evict)]
        lines += [("batches of 32, page cache", *batched, nothing), ("batches of 32, disk", *batched, evict)]
        print(f"{size / 1e6:,.0f} MB, {asked.repeats} repeats")
        print(f"{'':<36}{'CPU s':>9}{'wall s':>9}{'more CPU s':>12}{'of CPU':>9}{'of wall':>9}")
        for label, without, with_, before in lines:
            cpu, wall, more = _pairs(without, with_, asked.repeats, before)
            print(f"{label:<36}{cpu:>9.3f}{wall:>9.3f}{more:>12.4f}{more / cpu:>9.1%}{more / wall:>9.1%}", flush=True)


if __name__ == "__main__":
    main()
