"""How fast data come: samples and bytes a second of writing, reading and batching, and of what others read them with.

Run: python -m benchmarks.data_loading [--seconds 3] [--folder DIR]
     python -m benchmarks.data_loading --peers .venv-data-peers/bin/python    (after `make data-peers`)

With --peers: batches as torch tensors, shuffled, from onward's shards, from WebDataset, MosaicML streaming and torch's
DataLoader, in turns, the median of several; each peer with 0 and 2 worker processes, of which the faster one counts.
"raw" stores pixels or tokens as they are trained on; JPEG is what users of the peers store pictures as. `onward pack`
decodes pictures once, when it packs them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
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
    parser.add_argument("--peers", default=None, help="the Python of `make data-peers`: compare instead")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--kinds", nargs="+", default=list(COMPARED), choices=COMPARED, help="what is compared")
    arguments = parser.parse_args()
    if arguments.peers:
        for kind in arguments.kinds:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                Console(width=110).print(
                    compare(kind, Path(folder), arguments.peers, arguments.rounds, arguments.seconds)
                )
        return
    for title, (samples, batch_size, make) in KINDS.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            Console().print(measure(title, Path(folder), samples, batch_size, make, arguments.seconds))


# ------------------------------------------------------------------------------------------------- beside others


def pictures(random: np.random.Generator) -> dict[str, np.ndarray]:
    """1,200 pictures as smooth as photographs, and the number of each."""
    small = random.integers(0, 255, (1200, 3, 28, 28), dtype=np.uint8)
    return {"image": small.repeat(8, 2).repeat(8, 3), "label": np.arange(1200)}


def token_rows(random: np.random.Generator) -> dict[str, np.ndarray]:
    """40,000 rows of tokens, each beginning with its number."""
    rows = random.integers(0, 50257, (40_000, 1024), dtype=np.int32)
    rows[:, 0] = np.arange(len(rows))
    return {"tokens": rows}


_PLAIN = ("torch DataLoader, memory-mapped", "WebDataset", "MosaicML streaming")
_WHOLE = "torch DataLoader, memory-mapped, a batch a call"
COMPARED: dict[str, tuple[str, int, Callable[[np.random.Generator], dict[str, np.ndarray]], tuple[str, ...]]] = {
    "tokens": ("int32[1024]", 32, token_rows, (*_PLAIN, _WHOLE)),
    "images": (
        "uint8[3, 224, 224] and int64", 64, pictures,
        (*_PLAIN, _WHOLE, "torch DataLoader, JPEG files", "WebDataset, JPEG", "MosaicML streaming, JPEG"),
    ),
}  # fmt: skip
"""Kind -> what a sample is, batch size, all samples, peers."""
WORKERS = (0, 2)


class Peers:
    """The process of `benchmarks.data_peers`."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("data_peers.py")
        self._process = subprocess.Popen(
            [python, "-W", "ignore", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: object) -> dict[str, float]:
        """One answer. Raises RuntimeError where the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("answer "):
                answer: dict[str, float] = json.loads(line.removeprefix("answer "))
                return answer
        raise RuntimeError(f"the peers' process ended at {request}")

    def close(self) -> None:
        self._process.communicate()


def compare(kind: str, folder: Path, python: str, rounds: int, seconds: float) -> Table:
    """Samples a second of all contestants, in turns."""
    sample, batch_size, make, names = COMPARED[kind]
    features = make(np.random.default_rng(0))
    write_both(folder, features, files=8)
    peers = Peers(python)
    peers.ask(prepare=kind, folder=str(folder))
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        speeds.setdefault(("onward", 0), []).append(read_shards(folder / "shards", features, batch_size, seconds))
        for name in names:
            for workers in WORKERS:
                found = peers.ask(
                    read=name, folder=str(folder), batch_size=batch_size, workers=workers, seconds=seconds
                )
                speeds.setdefault((name, workers), []).append(found["samples_per_second"])
    peers.close()
    medians = {key: statistics.median(found) for key, found in speeds.items()}
    own = medians["onward", 0]
    table = Table(
        "contestant", "workers", "samples/s", "spread", "onward is", title=f"{kind}: {sample}, batches of {batch_size}"
    )
    table.add_row("onward, raw", "threads", f"{own:,.0f}", spread(speeds["onward", 0]), "")
    for name in names:
        workers = max(WORKERS, key=lambda count: medians[name, count])
        shown = name if "JPEG" in name else f"{name}, raw"
        speed = medians[name, workers]
        table.add_row(shown, str(workers), f"{speed:,.0f}", spread(speeds[name, workers]), f"{own / speed:.2f} times")
    return table


def spread(speeds: list[float]) -> str:
    return f"{min(speeds):,.0f} to {max(speeds):,.0f}"


def write_both(folder: Path, features: dict[str, np.ndarray], files: int) -> None:
    """The same samples as arrays, for the peers, and as shards."""
    (folder / "arrays").mkdir()
    (folder / "shards").mkdir()
    for name, array in features.items():
        np.save(folder / "arrays" / f"{name}.npy", array)
    for number, rows in enumerate(np.array_split(np.arange(len(next(iter(features.values())))), files)):
        with ShardWriter(folder / "shards" / f"{number}.pb") as writer:
            for row in rows:
                writer.write({name: array[row] for name, array in features.items()})


def read_shards(folder: Path, features: dict[str, np.ndarray], batch_size: int, seconds: float) -> float:
    """Samples a second as torch tensors, shuffled, with two files in memory at most, as by default."""
    with DataLoader({}, folder, shuffle=True) as loader:
        batches = loader.batches(batch_size)
        first = next(batches).features
        numbers = first["label"] if "label" in first else first["tokens"][:, 0]
        assert all(np.array_equal(first[name], array[numbers]) for name, array in features.items())
        count, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            tensors = {name: torch.from_numpy(array) for name, array in next(batches).features.items()}
            count += len(next(iter(tensors.values())))
    return count / elapsed


# ------------------------------------------------------------------------------------------------------- by itself


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
