"""What a worker writes into its file is what its ranks planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onward.checkpoint.planning import ShardSavePlanner
from onward.checkpoint.storage import Publication, SafetensorsStorageWriter
from onward.parallel.sharded_tensors import ShardedTensor


def test_a_tensor_of_another_size_than_planned_is_not_written(tmp_path: Path) -> None:
    """Its header would say where the tensors after it begin, and be wrong."""
    planned, changed = (
        ShardSavePlanner({"w": ShardedTensor.full(torch.zeros(3, dtype=dtype))}, ["w"])
        for dtype in (torch.float32, torch.float64)
    )
    publication = Publication(
        temporary=tmp_path / "new", final=tmp_path / "final", begin=lambda: 1, complete=lambda: None
    )
    writer = SafetensorsStorageWriter(publication, {})
    (plan,) = writer.prepare_global_plan([planned.create_local_plan()])
    changed.create_local_plan()
    with pytest.raises(ValueError, match="'w' has 24 bytes, the plan says 12"):
        writer.write_data(plan, changed)
