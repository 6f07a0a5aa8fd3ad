"""A spike of the loss in every layout: all ranks return together, and end bit-equal to a run without that data."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from tests.invariants.layouts import Layout, knowing_gradients
from tests.invariants.rank_pool import call_on_ranks
from tests.mlp import SQUARES, data, save_mlp, start

UPDATES, BAD, BATCH, ACCUMULATION = 32, 22, 4, 2
SAMPLES = BATCH * ACCUMULATION
"""Of an update, on each replica."""

LAYOUTS = [
    Layout(data=2),
    Layout(data=2, distributed={"zero_stage": 1}),
    Layout(data=2, distributed={"zero_stage": 2}),
    Layout(data=2, distributed={"zero_stage": 3}),
    Layout(horizontal=2),
    pytest.param(Layout(pipeline=2), marks=knowing_gradients),
    pytest.param(Layout(pipeline=2, distributed={"pipeline_schedule": "GPipe"}), marks=knowing_gradients),
    pytest.param(Layout(data=2, pipeline=2), marks=knowing_gradients),
    Layout(data=2, horizontal=2, distributed={"zero_stage": 1}),
]


def _features(replica: int, is_clean: bool, bad_replica: int) -> dict[str, np.ndarray]:
    """Of one replica; in the bad one, one sample of update BAD has a target far away. Clean: without that update."""
    features = data(SAMPLES * (UPDATES + 4), seed=replica)
    begin, end = SAMPLES * BAD, SAMPLES * (BAD + 1)
    if replica == bad_replica:
        features["target"][end - 1] += 1000
    return {
        name: np.delete(array, range(begin, end), axis=0) if is_clean else array for name, array in features.items()
    }


def _train(folder: Path, layout: Layout, is_clean: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {
        **layout.sections(),
        "loss": SQUARES,
        "learning_rate": {"initial_lr": 0.01},
        "optimizer": {"training_optimizer_name": "AdamW"},
        "training": {
            "batch_size": BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "num_train_steps": UPDATES * ACCUMULATION,
            "display_loss_steps": UPDATES,
        },
        "checkpoint": {"checkpoints_dir": folder / f"checkpoints-{is_clean}", "checkpoint_period": 5},
    }
    changes |= {} if is_clean else {"on_bad_loss": {"spike_threshold": 20, "spike_window": 32}}
    runner, recorder = start(folder, **changes)
    replica = runner.mesh.place.data
    runner.run(InMemoryDataLoader(_features(replica, is_clean, layout.data - 1)))
    tensors = {name: sharded.tensor for name, sharded in runner.state.sharded_tensors().items()}
    return {
        "tensors": {name: tensor.detach().contiguous().view(torch.uint8).numpy() for name, tensor in tensors.items()
                    if tensor.dim()} | {name: tensor.numpy().tobytes() for name, tensor in tensors.items()
                                        if not tensor.dim()},
        "course": (runner.state.course.rollbacks, runner.state.course.spans),
        "update": runner.state.counters.update,
        "told": [text for text in recorder.messages if "robust standard deviations" in text],
    }  # fmt: skip


def _both(folder: Path, layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    return _train(folder, layout, is_clean=False), _train(folder, layout, is_clean=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_leave_out_the_same_update_and_it_leaves_no_trace(layout: Layout):
    with tempfile.TemporaryDirectory() as folder:
        save_mlp(Path(folder))
        results = call_on_ranks(layout.world_size, _both, Path(folder), layout)
    for watched, clean in results:
        assert watched["course"] == (1, [((0, SAMPLES * BAD), (0, SAMPLES * (BAD + 1)))])
        assert watched["update"] == clean["update"] == UPDATES
        assert clean["told"] == []
        assert watched["tensors"].keys() == clean["tensors"].keys()
        for name, array in watched["tensors"].items():
            if not name.startswith("random/"):  # of a run that drew nothing, but set up twice
                np.testing.assert_array_equal(array, clean["tensors"][name], err_msg=name)
    (told,) = results[0][0]["told"]
    assert told.startswith(f"update {BAD + 1}: its ")
    assert "checkpoint-00000020, and these data are left out" in told
