"""How fast data come: samples and bytes a second of writing, reading and batching, next to what a training run takes.

Run: python -m benchmarks.data_loading [--seconds 3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from onward.data import Batch, DataLoader, ShardWriter, index_shard, load_shard

SHARDS = 4
KINDS: dict[str, tuple[int, int, Callable[[np.random.Generator], dict[str, np.ndarray]]]] = {
    "GPT-2: 2 x int64[1024]": (
        2000, 8,
        lambda random: {"tokens": random.integers(0, 50257, 1024), "labels": random.integers(0, 50257, 1024)},
    ),
    "image: float32[3, 224, 224], int64": (
        100, 32,
        lambda random: {"image": random.random((3, 224, 224), np.float32), "label": random.integers(0, 1000, ())},
    ),
    "digit: float32[1, 8, 8], int64": (
        20000, 64,
        lambda random: {"image": random.random((1, 8, 8), np.float32), "label": random.integers(0, 10, ())},
    ),
}  # fmt: skip
"""What a shard holds -> samples of a shard, batch size, a sample."""


def main() -> None:
    """Prints one table per kind of sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each loader is read")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write the shards (default: a temporary one)"
    )
    arguments = parser.parse_args()
    for title, (samples, batch_size, make) in KINDS.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            Console().print(measure(title, Path(folder), samples, batch_size, make, arguments.seconds))


def measure(
    title: str,
    folder: Path,
    samples: int,
    batch_size: int,
    make: Callable[[np.random.Generator], dict[str, np.ndarray]],
    seconds: float,
) -> Table:
    """Writes shards and measures every way of reading them."""
    table = Table("what", "samples/s", "MB/s", title=f"{title}; {SHARDS} shards of {samples}, batches of {batch_size}")
    pool = [make(np.random.default_rng(seed)) for seed in range(64)]
    sample_bytes = sum(array.nbytes for array in pool[0].values())

    def add(what: str, count: int, elapsed: float) -> None:
        table.add_row(what, f"{count / elapsed:,.0f}", f"{count * sample_bytes / elapsed / 1e6:,.0f}")

    start = time.perf_counter()
    for shard in range(SHARDS):
        with ShardWriter(folder / f"{shard}.pb") as writer:
            for k in range(samples):
                writer.write(pool[k % len(pool)])
    add("write, to the disk", SHARDS * samples, time.perf_counter() - start)
    start = time.perf_counter()
    for path in folder.iterdir():
        index_shard(path)
    add("index (lengths only)", SHARDS * samples, time.perf_counter() - start)
    start = time.perf_counter()
    for path in folder.iterdir():
        load_shard(path, {})
    add("load_shard", SHARDS * samples, time.perf_counter() - start)
    for shuffle in (False, True):
        for preload, where in ((2, "from disk"), (SHARDS, "in memory")):
            loader = DataLoader({}, folder, preload, shuffle=shuffle)
            name = f"batches, {where}{', shuffled' if shuffle else ''}"
            add(name, *read_for(loader.batches(batch_size), SHARDS * samples, seconds))
            loader.close()
    return table


def read_for(batches: Iterator[Batch], first_samples: int, seconds: float) -> tuple[int, float]:
    """Samples read and time taken, after the first epoch."""
    while first_samples > 0:
        first_samples -= next(batches).sample_count
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        count += next(batches).sample_count
    return count, elapsed


if __name__ == "__main__":
    main()
