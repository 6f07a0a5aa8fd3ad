"""How much memory a rank may fill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onward.parallel.memory import FREE_SHARE, free_memory, memory_of_rank

CPU = torch.device("cpu")


def machine(root: Path, **files: str) -> Path:
    """A folder like `/`, with the free memory of a machine of 8 MiB and the files of a control group."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 16384 kB\nMemFree: 1024 kB\nMemAvailable:    8192 kB\n")
    (root / "sys/fs/cgroup/memory").mkdir(parents=True)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name.replace("_dot_", ".")).write_text(text)
    return root


def test_what_is_said_counts() -> None:
    assert memory_of_rank(2.5, CPU) == 2.5e9


def test_what_is_free_of_a_machine(tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path)) == 8 * 2**20


@pytest.mark.parametrize(
    ("limit", "free"), [("max\n", 8 * 2**20), ("5000000\n", 4_000_000), ("99999999999\n", 8 * 2**20)]
)
def test_a_container_has_less(tmp_path: Path, limit: str, free: int) -> None:
    root = machine(tmp_path, memory_dot_max=limit, memory_dot_current="1000000\n")
    assert free_memory(root) == free


def test_an_older_container(tmp_path: Path) -> None:
    root = machine(tmp_path)
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("5000000\n")
    (root / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("6000000\n")
    assert free_memory(root) == 0


def test_ranks_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.parallel.memory.free_memory", lambda: 8e9)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert memory_of_rank(None, CPU) == pytest.approx(FREE_SHARE * 8e9)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "4", "1", "4", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert memory_of_rank(None, CPU) == pytest.approx(FREE_SHARE * 2e9)
