"""Weights inside the graphs of a bundle, instead of in a file that they share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.cli import main
from onward.device import weight_files
from onward.errors import ModelError
from onward_device import BundleError, Trainer
from tests.device.bundles import batches, bundle_of, file_of_weights, run_file, samples
from tests.mlp import save_mlp


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWScheduleFree"])
def test_weights_inside_train_as_shared_ones_do(optimizer: str, tmp_path: Path) -> None:
    """AdamWScheduleFree begins with each weight twice: it is written once."""
    save_mlp(tmp_path, normalized=True)
    asked = {"optimizer": {"training_optimizer_name": optimizer}, "training": {"weights_not_to_train": ["b1"]}}
    shared = Trainer.load(bundle_of(tmp_path, **asked))
    inside = tmp_path / "inside"
    assert main(["device", str(run_file(tmp_path, **asked)), "-o", str(inside), "--weights-inside"]) == 0
    assert sorted(path.name for path in inside.iterdir()) == ["eval.onnx", "infer.onnx", "manifest.json", "step.onnx"]
    assert file_of_weights(inside) == "step.onnx"
    trainer = Trainer.load(inside)
    assert trainer.bundle.manifest["requires"] == ["class_labels", "weights_inside"]
    assert all(np.array_equal(one, shared.state()[name]) for name, one in trainer.state().items())
    features = batches(samples(), 8)
    assert [trainer.train_step(one) for one in features] == [shared.train_step(one) for one in features]
    assert trainer.evaluate(features) == shared.evaluate(features)
    held = onnx.load(inside / "step.onnx", load_external_data=False)
    onnx.checker.check_model(held)
    starts = [tensor.raw_data for tensor in held.graph.initializer if tensor.name.startswith("start/")]
    assert len(starts) == len(set(starts)) > 2
    trainer.export(tmp_path / "trained.onnx")
    (output,) = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": features[0]["x"]})
    assert np.array_equal(output, next(iter(shared.predict({"x": features[0]["x"]}).values())))


def test_clients_that_do_not_know_it_refuse_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_mlp(tmp_path)
    folder = bundle_of(tmp_path, weights_inside=True)
    monkeypatch.setattr("onward_device.bundle.KNOWN", {"accumulation", "class_labels", "table_rows"})
    with pytest.raises(
        BundleError, match=r"requires weights_inside, which this package does not know\. Install the onw"
    ):
        Trainer.load(folder)


def test_a_graph_that_would_be_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_mlp(tmp_path)
    monkeypatch.setattr(weight_files, "_LARGEST_BYTES", 500)
    words = (
        r"the tensors of step\.onnx take [\d,]{3,} bytes, and an ONNX file ends at 2 GiB\. Leave out --weights-inside"
    )
    with pytest.raises(ModelError, match=words):
        bundle_of(tmp_path, weights_inside=True)
    assert not (tmp_path / "bundle").exists()
    monkeypatch.undo()
    manifest = json.loads((bundle_of(tmp_path) / "manifest.json").read_text())
    assert {one["start"]["file"] for one in manifest["state"] if "file" in one["start"]} == {"weights.bin"}
