"""The Python client: axes that are open, and the memory that its state is in."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from onward_device import BundleError, Trainer
from onward_device.state_file import read_state, write_state
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


STATE: dict[str, np.ndarray] = {
    "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "schön": np.array([1.5, -2.0], np.float16),
    "count": np.array(7),
    "seen": np.array([True, False]),
    "none": np.zeros((0, 4), np.int8),
    **{
        f"of_{kind}": np.arange(3).astype(kind)
        for kind in ("uint64", "float64", "uint32", "int32", "uint16", "int16", "uint8")
    },
}


def test_states_are_what_the_library_of_safetensors_writes_and_reads(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(write_state(STATE, {"bundle": "abc", "run_fields": '{"a": 1}'}))
    for found in (load(path.read_bytes()), read_state(path)[0]):
        assert found.keys() == STATE.keys()
        for name, array in STATE.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert np.array_equal(found[name], array), name
    with safe_open(path, "numpy") as file:
        about = file.metadata()
    assert (about["format"], about["bundle"], about["run_fields"]) == ("onward-device", "abc", '{"a": 1}')
    by_library = save(STATE, about)
    assert path.read_bytes()[-100:] == by_library[-100:]
    path.write_bytes(by_library)
    found, bundle = read_state(path)
    assert bundle == "abc"
    assert found["w"].tobytes() == STATE["w"].tobytes()


def test_damaged_states_are_refused(tmp_path: Path) -> None:
    """Bytes changed at random anywhere, and files cut short: refused, or what was saved."""
    path, source = tmp_path / "state", random.Random(0)
    good, kept = write_state(STATE, {"bundle": "abc"}), 0
    for case in range(600):
        content = bytearray(good)
        place = source.randrange(len(content)) if case % 2 else source.randrange(100)
        content[place] = source.randrange(256)
        path.write_bytes(content[: source.randrange(len(content))] if case % 5 == 0 else content)
        with contextlib.suppress(BundleError):
            state, _ = read_state(path)
            kept += 1
            # A header may have another name or type, which is compared with the bundle; bytes stay where they belong.
            assert {array.tobytes() for array in state.values()} == {array.tobytes() for array in STATE.values()}
    assert 10 < kept < 200


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"[1]", "is no safetensors file: its header is damaged"),
        (
            b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}',
            "is damaged .tensors of 9 bytes, where there are 8.",
        ),
        (b'{"w": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}', "is damaged .'F31'."),
        (b'{"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "is damaged .cannot reshape"),
        (b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}', "is damaged .the shape .-1.."),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "is no state of a device bundle; save one"),
    ],
)
def test_headers_that_do_not_fit_are_refused(header: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(BundleError, match=words):
        read_state(tmp_path / "state")
