"""The Go client, compiled, against the Python client's numbers for the same bundle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from onward_device import Trainer
from tests.clients.test_cpp_client import HEADERS, damage, without_metadata
from tests.device.bundles import batches, bundle_of, samples
from tests.mlp import save_mlp

SOURCES = Path(__file__).parent / "go"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that does with a folder what `go/main.go` says."""
    headers = next((folder for folder in HEADERS if (folder / "onnxruntime_c_api.h").exists()), None)
    if shutil.which("go") is None or shutil.which("gcc") is None:
        pytest.skip(
            "there is no go, or no gcc, which it compiles with (Debian: golang-go): the Go client is not tested"
        )
    if headers is None:
        pytest.skip("there are no headers of onnxruntime: run `make clients` to test the Go client")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if library is None:
        pytest.skip("the package onnxruntime has no libonnxruntime.so: the Go client is not tested")
    folder = tmp_path_factory.mktemp("go")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(library)
    environment = {
        "CGO_CFLAGS": f"-I{headers}",
        "CGO_LDFLAGS": f"-L{folder} -Wl,-rpath,{folder}",
        "GOFLAGS": "-mod=mod",
        "GOPROXY": "off",
        "GOCACHE": str(folder / "cache"),
    }
    for command in (["go", "vet", "."], ["go", "build", "-o", str(folder / "against_python"), "."]):
        done = subprocess.run(
            command, cwd=SOURCES, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return folder / "against_python"


def run(program: Path, folder: Path, found: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """What the program prints of a folder with a bundle."""
    files = [
        {
            name: {"dtype": str(one.dtype), "shape": one.shape, "values": one.ravel().tolist()}
            for name, one in batch.items()
        }
        for batch in found
    ]
    (folder / "batches.json").write_text(json.dumps(files))
    done = subprocess.run([str(program), str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return dict(json.loads(done.stdout))


REFUSED = {
    "short": '"label" has the shape [3]; expected [batch] with map[batch:4]|"x" has the shape [4 6]; expected [batch',
    "wide": '"x" has the shape [4 7]; expected [batch 6] with map[batch:4]',
    "bytes": '"x" has 20 bytes and the shape [4 6]; expected 96',
    "no_x": 'the batch has no "x"; expected label, x',
    "type": '"x" is float64; expected float32',
    "negative": '"label" holds the label -1; expected 0 to 3',
    "large": '"label" holds the label 1000000; expected 0 to 3',
    "index": '"label" holds the index -1; expected 0 to 3, since it picks rows of a table that has 4',
    "damaged": "was changed or damaged; copy the bundle again",
    "newer": 'is a "onward-device" of version 2; this package reads "onward-device" of version 1',
    "unknown": "requires tides, which this package does not know; take the client of the onward that wrote it (",
    "nowhere": "nowhere is no device bundle: ",
    "other": "other.safetensors is no state of this bundle; use the bundle that it was trained with",
    "no_state": "run.yaml is no safetensors file",
    "shifted": "shifted.safetensors is no safetensors file: a tensor begins at byte 0, where 8 comes next",
    "flipped": "flipped.safetensors was changed or damaged; copy it again",
    "skipped": "the last 3 weight updates were skipped, since their losses, gradients or batch statistics were not",
}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_go_trains_as_python_does(accumulation: int, compiled: Path, tmp_path: Path) -> None:
    save_mlp(tmp_path, normalized=True, dropout=0.2)
    steps = 50 // accumulation * accumulation
    training = {"gradient_accumulation_steps": accumulation, "num_train_steps": steps}
    bundle_of(tmp_path, weights_inside=accumulation > 1, training={**training, "weights_not_to_train": ["b1"]})
    inputs = batches(samples(), steps)
    trainer, losses = Trainer.load(tmp_path / "bundle"), []
    for index, batch in enumerate(inputs):
        if index == 3:
            trainer.save_state(tmp_path / "python.safetensors")
        losses.append(trainer.train_step(batch))
    damage(tmp_path)
    found = run(compiled, tmp_path, inputs)

    assert found["losses"] == pytest.approx(losses, abs=1e-5)
    assert found["metrics"] == pytest.approx(trainer.evaluate(inputs[:7]), abs=1e-5)
    assert (found["updates"], found["skipped"]) == (trainer.updates, 0)
    assert found["gradient_norm"] == pytest.approx(trainer.gradient_norm, abs=1e-4)
    assert found["continued"] == pytest.approx(losses[3], abs=1e-5)
    (expected,) = trainer.predict(inputs[0]).values()
    assert found["predictions"] == pytest.approx(expected.ravel().tolist(), abs=1e-5)
    for which, words in REFUSED.items():
        assert any(part in found["refused"][which] for part in words.split("|")), (which, found["refused"][which])
    assert found["skipping_steps"] == 3 * accumulation


def test_states_are_the_same_bytes(compiled: Path, tmp_path: Path) -> None:
    """Go saves what Python saves, and Python continues from it."""
    save_mlp(tmp_path)
    bundle_of(tmp_path)
    trainer, inputs = Trainer.load(tmp_path / "bundle"), batches(samples(), 8)
    for batch in inputs[:3]:
        trainer.train_step(batch)
    trainer.save_state(tmp_path / "python.safetensors")
    expected = trainer.state()
    damage(tmp_path)
    run(compiled, tmp_path, inputs)
    trainer.load_state(tmp_path / "go.safetensors")
    assert trainer.updates == 3
    for name, array in trainer.state().items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6, err_msg=name)
    metadata = [without_metadata(tmp_path / f"{one}.safetensors")[1] for one in ("go", "python")]
    assert {**metadata[0], "sha256": ""} == {**metadata[1], "sha256": ""}
