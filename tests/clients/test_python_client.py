"""The Python client: axes that are open, and the memory that its state is in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward_device import BundleError, Trainer
from tests.clients.sequences import LENGTHS, batches_of_lengths, write_sequence_bundle


def test_sequences_of_other_lengths_train_as_in_torch(tmp_path: Path) -> None:
    losses = write_sequence_bundle(tmp_path)
    trainer = Trainer.load(tmp_path / "bundle")
    (x,) = (one for one in trainer.bundle.manifest["features"] if one["name"] == "x")
    assert x["shape"] == ["batch", "time", 6]  # names: open axes
    assert [trainer.train_step(batch) for batch in batches_of_lengths()] == pytest.approx(losses, abs=1e-5)
    for length in (3, 17):
        (logits,) = trainer.predict({"x": np.ones((2, length, 6), np.float32)}).values()
        assert logits.shape == (2, 4)
    with pytest.raises(BundleError, match=r"'x' has the shape \[4, 8, 5\]; expected \[batch=4, time=8, 6\]"):
        trainer.train_step(batches_of_lengths()[0] | {"x": np.ones((4, 8, 5), np.float32)})


def test_two_sets_of_state_are_all_there_are_and_copies_stay(tmp_path: Path) -> None:
    write_sequence_bundle(tmp_path)
    trainer, plain = (Trainer.load(tmp_path / "bundle") for _ in range(2))
    batch, states, places = batches_of_lengths()[0], [], []
    for _ in LENGTHS:
        trainer.train_step(batch)
        states.append(trainer.state()["w1"])
        places.append(trainer._state["w1"].data_ptr())
    assert len(set(places)) == 2
    assert len({state.tobytes() for state in states}) == len(LENGTHS)
    trainer.save_state(tmp_path / "state")
    plain.load_state(tmp_path / "state")
    for _ in range(3):
        assert trainer.train_step(batch) == plain.train_step(batch)
    assert np.array_equal(trainer.state()["w1"], plain.state()["w1"])
