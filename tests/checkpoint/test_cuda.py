"""Checkpoints of tensors on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onward.checkpoint.reading import read_tensors
from onward.checkpoint.writing import CheckpointWriter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("blocking", [True, False])
def test_tensors_on_the_gpu_are_saved_as_they_were_at_the_save(tmp_path: Path, blocking: bool) -> None:
    """Kernels still queued before the save are seen, those after it are not; the values return to the GPU."""
    weight = torch.zeros(2**22, device="cuda")
    step = torch.zeros((), device="cuda")
    with CheckpointWriter(tmp_path, 3, blocking=blocking) as writer:
        for number in (1, 2, 3):
            for _ in range(100):
                weight.add_(1)
            step.add_(1)
            writer.save(number, {"w": weight, "step": step, "random": torch.cuda.get_rng_state()}, {})
            weight.add_(0.5)
            weight.sub_(0.5)
    for number in (1, 2, 3):
        into = {"w": torch.zeros_like(weight), "step": torch.zeros_like(step), "random": torch.cuda.get_rng_state()}
        read_tensors(tmp_path / f"checkpoint-{number:08d}", into)
        assert into["w"].eq(100 * number).all()
        assert into["step"].item() == number


def test_host_buffers_are_page_locked_and_used_again(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.save(1, {"w": torch.ones(1000, device="cuda")}, {})
        first = writer._copies._buffers["w"].data_ptr()
        writer.save(2, {"w": torch.ones(1000, device="cuda")}, {})
        assert writer._copies._buffers["w"].data_ptr() == first
        assert writer._copies._buffers["w"].is_pinned()
