"""How much memory a rank may fill."""

from __future__ import annotations

import pytest
import torch

from onward.parallel.memory import FREE_SHARE, memory_of_rank

CPU = torch.device("cpu")


def test_what_is_said_counts() -> None:
    assert memory_of_rank(2.5, CPU) == 2.5e9


def test_ranks_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.parallel.memory.free_memory_bytes", lambda: 8e9)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert memory_of_rank(None, CPU) == pytest.approx(FREE_SHARE * 8e9)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "4", "1", "4", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert memory_of_rank(None, CPU) == pytest.approx(FREE_SHARE * 2e9)


def test_an_address_to_rendezvous_at_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that makes the process group by itself, by a file say, sets none."""
    monkeypatch.setattr("onward.parallel.memory.free_memory_bytes", lambda: 8e9)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, ("1", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert memory_of_rank(None, CPU) == pytest.approx(FREE_SHARE * 2e9)
