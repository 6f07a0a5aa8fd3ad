"""Host buffers of saves: used again, each save with its own values."""

from __future__ import annotations

from pathlib import Path

import torch

from onward.checkpoint.reading import list_checkpoints, read_record, read_tensors
from onward.checkpoint.writing import CheckpointWriter


def test_host_buffers_are_reused_and_every_save_has_its_own_values(tmp_path: Path) -> None:
    """Ten saves in a row, the tensors changed in place between them, without waiting: each file holds its own step."""
    weight = torch.zeros(1000)
    with CheckpointWriter(tmp_path, 10) as writer:
        staged = set()
        for number in range(10):
            weight.fill_(number)
            writer.save(number, {"w": weight, "fresh": torch.full((5,), number)}, {"number": number})
            staged.add(writer._copies._buffers["w"].data_ptr())
    assert len(staged) == 1
    for number, path in enumerate(list_checkpoints(tmp_path)):
        into = {"w": torch.zeros(1000), "fresh": torch.zeros(5, dtype=torch.int64)}
        read_tensors(path, into)
        assert read_record(path) == {"number": number}
        assert into["w"].eq(number).all()
        assert into["fresh"].eq(number).all()
