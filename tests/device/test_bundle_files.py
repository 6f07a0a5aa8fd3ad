"""Files of a bundle and of its state, as the Python client reads and writes them, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from safetensors.numpy import save_file

from onward.device.device_states import read_state
from onward.errors import CheckpointError
from onward_device import BundleError, Trainer
from tests.device.bundles import batches, bundle_of, samples


def test_a_saved_state_continues_bit_for_bit(normalized: Path, tmp_path: Path) -> None:
    features = batches(samples(), 6)
    trainer = Trainer.load(normalized / "bundle")
    for batch in features[:3]:
        trainer.train_step(batch)
    path = tmp_path / "state.safetensors"
    trainer.save_state(path)
    (tmp_path / "any file").touch()
    assert path.stat().st_mode == (tmp_path / "any file").stat().st_mode
    resumed = Trainer.load(normalized / "bundle")
    resumed.load_state(path)
    for batch in features[3:]:
        assert trainer.train_step(batch) == resumed.train_step(batch)
    assert all(np.array_equal(one, resumed.state()[name]) for name, one in trainer.state().items())


def test_a_file_that_was_changed_is_found(normalized: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(normalized / "bundle", tmp_path / "copy")
    with (copy / "weights.bin").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(BundleError, match=r"weights\.bin was changed or damaged: its SHA-256 .* Copy the bundle again"):
        Trainer.load(copy)
    (copy / "eval.onnx").unlink()
    with pytest.raises(BundleError, match=r"has no file eval\.onnx|weights\.bin was changed"):
        Trainer.load(copy)


def test_other_versions_and_other_folders_are_refused(normalized: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match=r"is no device bundle: it has no manifest\.json\. Write one with `onward dev"
    ):
        Trainer.load(tmp_path)
    manifest = json.loads((normalized / "bundle" / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(BundleError, match=r"is a device bundle of version 2; this package reads version 1\. Install"):
        Trainer.load(tmp_path)
    assert manifest["requires"] == ["class_labels"]
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "requires": ["tides", "class_labels", "moons"]}))
    with pytest.raises(BundleError, match=r"requires moons, tides, which this package does not know\. Install the onw"):
        Trainer.load(tmp_path)


def test_a_state_of_another_bundle_is_refused(normalized: Path, tmp_path: Path) -> None:
    trainer = Trainer.load(normalized / "bundle")
    trainer.save_state(tmp_path / "state.safetensors")
    other = Trainer.load(normalized / "bundle")
    other.bundle.manifest["identity"] = "0" * 64
    with pytest.raises(BundleError, match=r"is a state of the bundle [0-9a-f]{12}; this one is 000000000000\. Use the"):
        other.load_state(tmp_path / "state.safetensors")


def test_a_state_with_a_flipped_bit_is_refused(normalized: Path, tmp_path: Path) -> None:
    trainer, path = Trainer.load(normalized / "bundle"), tmp_path / "state.safetensors"
    trainer.save_state(path)
    content = bytearray(path.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    about = json.loads(content[8:data])["__metadata__"]
    assert about["sha256"] == hashlib.sha256(content[data:]).hexdigest()
    content[data + 5] ^= 1
    path.write_bytes(content)
    words = (
        r"state\.safetensors was changed or damaged: the SHA-256 of its tensors is [0-9a-f]{64}, its header has "
        + (about["sha256"] + r"\. Copy the state again")
    )
    with pytest.raises(BundleError, match=words):
        trainer.load_state(path)
    with pytest.raises(CheckpointError, match=words):
        read_state(path)
    # Older clients recorded none.
    save_file(trainer.state(), path, {"format": "onward-device", "bundle": trainer.bundle.identity})
    trainer.load_state(path)
    assert read_state(path).tensors.keys() == trainer.state().keys()


def test_a_folder_that_is_missing_is_not_made(normalized: Path, tmp_path: Path) -> None:
    trainer, words = (
        Trainer.load(normalized / "bundle"),
        r"cannot be written: there is no folder .*nowhere\. Make it, or",
    )
    for write in (trainer.save_state, trainer.export):
        with pytest.raises(BundleError, match=words):
            write(tmp_path / "nowhere" / "file")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.zeros((3, 6), np.float32)}, r"'label' has the shape \[4\]; expected \[batch=3\]"),
        ({"x": np.zeros((4, 7), np.float32)}, r"'x' has the shape \[4, 7\]; expected \[batch=4, 6\]"),
        ({"x": np.zeros((4, 6), complex)}, r"'x' is complex128; expected float32\. Convert it with \.astype"),
        (
            {"x": np.zeros((4, 6), np.uint8)},
            r"'x' is uint8; expected float32\. Convert it with \.astype, scaled as the",
        ),
        (
            {"x": np.zeros((4, 6), bool)},
            r"'x' is bool; expected float32\. Convert it with \.astype, scaled as the model",
        ),
        ({"label": np.zeros(4, bool)}, r"'label' is bool; expected int64\. Convert it with \.astype\."),
        ({"label": np.full(4, 2**63, np.uint64)}, r"'label' holds 9223372036854775808, which int64 cannot\. Look whe"),
        ({"weight": np.ones(4)}, r"the batch has 'weight', which no graph reads; expected label, x\. Leave out others"),
        ({"x": None}, r"the batch has no 'x'; it has label"),
        ({"x": np.zeros((0, 6), np.float32)}, r"'x' has the shape \[0, 6\]\. Leave out batches without samples"),
        (
            {"label": np.array([0, 1, -1, 0])},
            r"'label' holds the label -1; expected 0 to \d\. Fix the data, or",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(change: dict[str, Any], words: str, normalized: Path) -> None:
    batch = {name: array for name, array in {**batches(samples(), 1)[0], **change}.items() if array is not None}
    with pytest.raises(BundleError, match=words):
        Trainer.load(normalized / "bundle").train_step(batch)


def test_indices_that_no_row_of_a_table_has_are_refused(tmp_path: Path) -> None:
    """A runtime counts negative ones from the end, and would train that row."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
    words (int64[batch, length] tokens) => (float[batch, 2] logits)
    <float[5, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, int64[1] axes = {1}> {
        rows = Gather (table, tokens)
        logits = ReduceMean <keepdims = 0> (rows, axes)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "mlp.onnx")
    loss = {"loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"}}
    trainer = Trainer.load(bundle_of(tmp_path, **loss))
    manifest = trainer.bundle.manifest
    assert manifest["requires"] == ["class_labels", "table_rows"]
    assert {one["name"]: one.get("rows") for one in manifest["features"]} == {"tokens": 5, "label": None}
    labels, before = np.array([0, 1]), trainer.state()["table"]
    words = r"'tokens' holds the index -1; expected 0 to 4, since it picks rows of a table that has 5\. If it marks"
    for call in (trainer.predict, trainer.train_step, lambda batch: trainer.evaluate([batch])):
        with pytest.raises(BundleError, match=words):
            call({"tokens": np.array([[4, 0], [-1, 2]]), "label": labels})
    with pytest.raises(BundleError, match=r"'tokens' holds the index 5; .* has 5\. Make the indices with the tok"):
        trainer.train_step({"tokens": np.array([[4, 0], [5, 2]], np.int32), "label": labels})
    assert np.array_equal(trainer.state()["table"], before)
    trainer.train_step({"tokens": np.array([[4, 0], [1, 2]]), "label": labels})
    assert trainer.updates == 1


def test_a_bundle_of_more_small_weights_than_fit_into_a_short_list(tmp_path: Path) -> None:
    """They are updated as one vector, whose split into 150 reads sizes of 1,200 bytes."""
    sums = "\n".join(f"s{number + 1} = Mul (s{number}, w{number})" for number in range(150))
    weights = ", ".join(f"float[4] w{number} = {{1.0, 1.001, 0.999, {1 + number / 1e5}}}" for number in range(150))
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    products (float[batch, 4] x) => (float[batch, 4] logits) <{weights}> {{
        s0 = Identity (x)
        {sums}
        logits = Identity (s150)
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "mlp.onnx")
    loss = {"loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"}}
    trainer = Trainer.load(bundle_of(tmp_path, optimizer={"layer_decay": None}, **loss))
    before = trainer.state()
    for _ in range(2):  # the first one's learning rate is 0
        trainer.train_step({"x": np.ones((2, 4), np.float32), "label": np.array([0, 1])})
    assert all(not np.array_equal(trainer.state()[name], before[name]) for name in ("w0", "w77", "w149"))
