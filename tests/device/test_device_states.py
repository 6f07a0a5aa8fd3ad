"""States of several devices become one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from onward.cli import main
from onward_device import Trainer
from tests.device.bundles import batches, samples


def test_states_are_averaged(normalized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features, trained = samples(), []
    for device in range(2):
        trainer = Trainer.load(normalized / "bundle")
        for batch in batches(features, 6)[3 * device : 3 * device + 3 + device]:
            trainer.train_step(batch)
        trainer.save_state(tmp_path / f"{device}.safetensors")
        trained.append(trainer.state())
    files = [str(tmp_path / f"{device}.safetensors") for device in range(2)]
    merged = str(tmp_path / "merged.safetensors")
    assert main(["device", "average", *files, "-o", merged, "--weights", "3,1"]) == 0
    with safe_open(merged, "numpy") as file:
        assert len(file.metadata()["sha256"]) == 64
    trainer.load_state(merged)
    for name, array in trainer.state().items():
        if array.dtype == np.float32:
            assert np.allclose(array, 0.75 * trained[0][name] + 0.25 * trained[1][name], rtol=1e-6, atol=1e-7), name
    assert trainer.updates == 3
    # FedAdam's first step moves every weight by its rate towards the average, where that is far.
    first = Trainer.load(normalized / "bundle")
    first.save_state(tmp_path / "first.safetensors")
    options = ["--server", str(tmp_path / "server"), "--before", str(tmp_path / "first.safetensors")]
    options += ["--bundle", str(normalized / "bundle"), "--server-rate", "0.5"]
    assert main(["device", "average", *files, "-o", merged, *options]) == 0
    trainer.load_state(merged)
    change = (trained[0]["w2"] + trained[1]["w2"]) / 2 - first.state()["w2"]
    expected = first.state()["w2"] + 0.5 * 0.1 * change / (np.sqrt(0.01 * change**2) + 1e-3)
    assert np.allclose(trainer.state()["w2"], expected, atol=1e-6)
    assert main(["device", "average", *files, "-o", merged, "--weights", "3"]) == 2
    assert "--weights has 1 numbers for 2 states; pass one for each state." in capsys.readouterr().err
    spoiled = trained[1] | {"w2": trained[1]["w2"] * np.float32(np.nan)}
    save_file(spoiled, files[1], {"format": "onward-device", "bundle": trainer.bundle.identity})
    assert main(["device", "average", *files, "-o", merged]) == 2
    assert "'w2' is not finite. Leave this state out." in capsys.readouterr().err
    save_file(trained[1], files[1], {"format": "onward-device", "bundle": "another bundle"})
    assert main(["device", "average", *files, "-o", merged]) == 2
    assert "is a state of the bundle another bund" in capsys.readouterr().err
    for file, tensors in zip(files, trained, strict=True):
        save_file(tensors, file, {"format": "onward-device"})
    assert main(["device", "average", *files, "-o", merged]) == 2
    assert "does not record the bundle that it is of" in " ".join(capsys.readouterr().err.split())


def test_a_device_does_not_count_twice(normalized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, again, output = (str(tmp_path / name) for name in ("one", "again", "merged"))
    Trainer.load(normalized / "bundle").save_state(one)
    shutil.copy(one, again)
    refused = {
        (one,): f"{one} is the only state given, and is its own average. Pass the states of two or more devices.",
        (one, one): f"{one} is given twice. Give each state once, and how much each counts with --weights.",
        (one, again): f"{one} and {again} hold the same tensors, so that a device would count twice.",
    }
    for given, words in refused.items():
        assert main(["device", "average", *given, "-o", output]) == 2
        assert words.replace(" ", "") in "".join(capsys.readouterr().err.split())
    assert not Path(output).exists()


def test_bundles_that_require_something_unknown_are_refused(
    normalized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, newer, output = Trainer.load(normalized / "bundle"), tmp_path / "newer", tmp_path / "trained.onnx"
    trainer.save_state(tmp_path / "state")
    newer.mkdir()
    manifest = json.loads((normalized / "bundle" / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps({**manifest, "requires": ["class_labels", "tides"]}))
    state = ["--device-state", str(tmp_path / "state"), "--bundle", str(newer)]
    assert main(["export", str(normalized / "mlp.onnx"), *state, "-o", str(output)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "newer is a device bundle that requires tides, which onward " in said
    assert "does not know. Install the onward that wrote it (onward " in said
    assert not output.exists()
