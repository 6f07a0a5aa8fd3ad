"""A run of a small network, and what becomes of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.data.in_memory import InMemoryDataLoader
from tests.mlp import data, save_mlp, start

TRAIN = data(30)
RUN: dict[str, Any] = {"optimizer": {"training_optimizer_name": "AdamW"}}


def trained(folder: Path, steps: int = 8) -> Path:
    """The checkpoints of a run that saved three, at updates 4, 6 and 8."""
    save_mlp(folder)
    checkpoint = {"checkpoints_dir": folder / "c", "checkpoint_period": 2, "max_num_checkpoints": 3}
    runner, _ = start(folder, **RUN, checkpoint=checkpoint, training={"num_train_steps": steps})
    runner.run(InMemoryDataLoader(TRAIN))
    runner.end_training()
    return folder / "c"
