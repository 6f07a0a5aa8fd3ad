"""Run by test_kill: imports torch once, then for each line of input forks a process that saves checkpoints and dies.

`random SEED DIRECTORY`: saves without end, with delays around everything that changes the disk; its process id is
printed, and it is meant to be killed. `point K DIRECTORY`: replaces one checkpoint and adds one, and kills itself at
the K-th moment before or after a change of the disk. Then the exit code and the saves known to be complete are printed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onward.checkpoint import manifest, storage
from onward.checkpoint.reading import checkpoint_number, find_latest, read_record, read_tensors
from onward.checkpoint.writing import CheckpointWriter

KEPT = 2
LONGEST_DELAY_SECONDS = 0.006


def content(number: int, save: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: every value tells number and save, so that a mixture of two is seen."""
    value = number * 1000.0 + save
    return {
        "weights/a": torch.full((4000,), value),
        "weights/b": torch.full((300, 3), value, dtype=torch.float64),
        "slots/step": torch.tensor(value),
        "random/torch": torch.full((5000,), number % 251, dtype=torch.uint8),
    }


def around_disk_changes(pause: Callable[[], None]) -> None:
    """Calls `pause` before and after every change of the disk, the parts of a data file and of a removal included."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            pause()
            try:
                return function(*arguments, **options)
            finally:
                pause()

        return wrapper

    storage.CHUNK_BYTES = 4096
    storage._chunks = paused_chunks(storage._chunks, pause)
    storage.write_manifest = wrapped(manifest.write_manifest)  # type: ignore[attr-defined]
    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, wrapped(getattr(os, name)))


def paused_chunks(chunks: Callable[..., Any], pause: Callable[[], None]) -> Callable[..., Any]:
    """The blocks of a file, with a `pause` before every twentieth."""

    def paused(*arguments: Any) -> Iterator[Any]:
        for index, chunk in enumerate(chunks(*arguments)):
            if index % 20 == 0:
                pause()
            yield chunk

    return paused


def save_without_end(directory: Path, delays: random.Random, told: int) -> None:
    """Goes on from the latest checkpoint; every third number is saved twice, as after a resume."""
    around_disk_changes(lambda: time.sleep(delays.uniform(0, LONGEST_DELAY_SECONDS)))
    blocking = delays.random() < 0.3
    with CheckpointWriter(directory, KEPT, blocking=blocking) as writer:
        latest = find_latest(directory)
        number = 0
        if latest is not None:
            into = {name: torch.zeros_like(tensor) for name, tensor in content(0, 0).items()}
            read_tensors(latest, into)
            number = checkpoint_number(latest)
        while True:
            number += 1
            for save in range(2 if number % 3 == 0 else 1):
                tensors = content(number, save)
                writer.save(number, tensors, {"number": number, "save": save})
                for tensor in tensors.values():
                    tensor.zero_()
                if delays.random() < 0.5:
                    writer.wait()
                    os.write(told, b"%d %d\n" % (number, save))


def save_and_die_at(directory: Path, moment: int, told: int) -> None:
    """Replaces the latest checkpoint, adds another, and so removes one; returns only if there are fewer moments."""
    with CheckpointWriter(directory, KEPT, blocking=True) as writer:
        latest = find_latest(directory)
        assert latest is not None
        replaced = checkpoint_number(latest)
        passed = 0

        def die() -> None:
            nonlocal passed
            passed += 1
            if passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        around_disk_changes(die)
        for number, save in ((replaced, 1), (replaced + 1, 0)):
            writer.save(number, content(number, save), {"number": number, "save": save})
            os.write(told, b"%d %d\n" % (number, save))


def check(directory: Path, told: list[tuple[int, int]]) -> tuple[int, int]:
    """The (number, save) of the latest checkpoint, found whole, consistent, and no older than the last one told."""
    latest = find_latest(directory)
    if latest is None:
        assert not told, f"no checkpoint although {told[-1]} was complete"
        return 0, 0
    record = read_record(latest)
    number, save = record["number"], record["save"]
    assert number == checkpoint_number(latest)
    expected = content(number, save)
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    read_tensors(latest, into)
    assert all(torch.equal(expected[name], into[name]) for name in expected), f"{latest} is a mixture"
    assert not told or (number, save) >= told[-1], f"{latest} is older than {told[-1]}, which was complete"
    return number, save


def serve() -> None:
    """Forks a process for each line of input."""
    for line in sys.stdin:
        kind, value, directory = line.split(maxsplit=2)
        reading, telling = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            path = Path(directory.strip())
            if kind == "random":
                save_without_end(path, random.Random(int(value)), telling)
            save_and_die_at(path, int(value), telling)
            os._exit(0)
        os.close(telling)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            completed = " ".join(line.strip().replace(" ", ":") for line in pipe if line.endswith("\n"))
        print(os.waitstatus_to_exitcode(status), completed, flush=True)


if __name__ == "__main__":
    serve()
