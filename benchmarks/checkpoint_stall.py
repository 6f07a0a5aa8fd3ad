"""How long training stands still for a checkpoint: onward's asynchronous save against a blocking one, and against
torch's own asynchronous save to safetensors files, on the same tensors in the same run.

Alongside each save a stand-in for training runs, small matrix products, each followed by a look at the clock: its
longest pause and its pace tell what the background work takes from it.

    python benchmarks/checkpoint_stall.py [--megabytes 500] [--saves 5] [--device cpu] [--directory DIR]
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from onward.checkpoint.writing import CheckpointWriter

MEGABYTE = 10**6
TENSOR_MEGABYTES = 8

Save = Callable[[int], Callable[[], bool]]
"""Starts a save of a number; returns the question whether it is done."""


@dataclass
class Measured:
    stall_seconds: float
    total_seconds: float
    longest_pause_seconds: float
    pace: float


def tensors_of(megabytes: int, device: str) -> dict[str, torch.Tensor]:
    elements = TENSOR_MEGABYTES * MEGABYTE // 4
    return {f"weights/{i}": torch.randn(elements, device=device) for i in range(megabytes // TENSOR_MEGABYTES)}


def train(device: str, done: Callable[[], bool], at_least_seconds: float) -> tuple[float, float]:
    """Steps a second and the longest step, until done."""
    left = torch.randn(256, 256, device=device)
    started = last = time.perf_counter()
    longest, steps = 0.0, 0
    while not done() or last - started < at_least_seconds:
        left = (left @ left).clamp_(-1, 1)
        if device != "cpu":
            torch.cuda.synchronize()
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
        steps += 1
    return steps / (last - started), longest


def measure(save: Save, tensors: dict[str, torch.Tensor], saves: int, device: str, alone: float) -> list[Measured]:
    results = []
    for number in range(saves):
        for tensor in tensors.values():
            tensor.add_(1)
        started = time.perf_counter()
        done = save(number)
        stall = time.perf_counter() - started
        pace, longest = (0.0, 0.0) if done() else train(device, done, 0.0)
        results.append(Measured(stall, time.perf_counter() - started, longest, pace / alone))
    return results


@contextmanager
def onward_save(directory: Path, tensors: dict[str, torch.Tensor], blocking: bool) -> Iterator[Save]:
    with CheckpointWriter(directory, 1, blocking=blocking) as writer:

        def save(number: int) -> Callable[[], bool]:
            path = writer.save(number, tensors, {"update": number})
            return path.exists

        yield save


@contextmanager
def torch_save(directory: Path, tensors: dict[str, torch.Tensor]) -> Iterator[Save]:
    def save(number: int) -> Callable[[], bool]:
        storage = HuggingFaceStorageWriter(str(directory / str(number)), save_distributed=True)
        future = async_save(tensors, storage_writer=storage, no_dist=True)
        if number:
            shutil.rmtree(directory / str(number - 1))
        return future.done  # type: ignore[union-attr]

    yield save


def row(name: str, results: list[Measured], peak_megabytes: float) -> str:
    later = results[1:] or results
    beside = any(r.pace for r in later)
    values = (
        f"{results[0].stall_seconds:.3f}",
        f"{statistics.median(r.stall_seconds for r in later):.3f}",
        f"{statistics.median(r.total_seconds for r in later):.2f}",
        f"{statistics.median(r.longest_pause_seconds for r in later) * 1000:.0f}" if beside else "-",
        f"{statistics.median(r.pace for r in later):.0%}" if beside else "-",
        f"{peak_megabytes:.0f}",
    )
    return f"{name:<30}" + "".join(f"{value:>16}" for value in values)


def peak_memory_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", type=Path, help="where to write; default: the temporary directory")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    tensors = tensors_of(options.megabytes, options.device)
    alone, _ = train(options.device, lambda: True, 2.0)
    print(f"{options.megabytes} MB in {len(tensors)} tensors on {options.device}, {torch.get_num_threads()} threads,")
    print(f"{options.saves} saves each; medians leave out the first save, which allocates the host buffers.\n")
    heads = ("first stall s", "stall s", "on disk s", "longest step ms", "pace meanwhile", "extra MB")
    print(f"{'':<30}" + "".join(f"{head:>16}" for head in heads))
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        cases = {
            "onward, blocking": onward_save(Path(place) / "blocking", tensors, blocking=True),
            "onward, asynchronous": onward_save(Path(place) / "asynchronous", tensors, blocking=False),
            "torch async_save, safetensors": torch_save(Path(place) / "torch", tensors),
        }
        for name, case in cases.items():
            before = peak_memory_megabytes()
            with case as save:
                results = measure(save, tensors, options.saves, options.device, alone)
            print(row(name, results, peak_memory_megabytes() - before))


if __name__ == "__main__":
    main()
