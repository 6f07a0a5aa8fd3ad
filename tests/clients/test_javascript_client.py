"""The JavaScript client, compiled and run in Node, against the Python client's numbers for the same bundle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward_device import Trainer
from tests.clients.sequences import batches_of_lengths, write_sequence_bundle
from tests.device.bundles import BATCH, batches, bundle_of, samples
from tests.device.reference_runs import RUNS, normalized
from tests.mlp import save_mlp

CLIENT = Path(__file__).parents[2] / "clients" / "javascript"
MODULES = CLIENT / "node_modules"
OLDEST_NODE = 20


def as_json(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A batch as the JavaScript client takes it."""
    return {name: {"shape": array.shape, "data": array.ravel().tolist()} for name, array in batch.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with its JavaScript, outside of the sources."""
    if shutil.which("node") is None:
        pytest.skip("there is no node: the JavaScript client is not tested")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node is {version.strip()}, the JavaScript client needs {OLDEST_NODE}: it is not tested")
    if not (MODULES / "onnxruntime-node").exists():
        pytest.skip("clients/javascript has no node_modules: run `make clients` to test the JavaScript client")
    folder = tmp_path_factory.mktemp("client")
    shutil.copytree(CLIENT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules", "dist"))
    (folder / "node_modules").symlink_to(MODULES)
    subprocess.run(["node", "build.js"], cwd=folder, check=True, timeout=120)
    return folder


@pytest.mark.parametrize("accumulation", [1, 4])
def test_node_trains_as_python_does(accumulation: int, compiled: Path, tmp_path: Path) -> None:
    save_mlp(tmp_path, normalized=True)
    steps = 50 // accumulation * accumulation
    training = {"gradient_accumulation_steps": accumulation, "num_train_steps": steps}
    bundle_of(tmp_path, weights_inside=accumulation > 1, training={**training, "weights_not_to_train": ["b1"]})
    found = batches(samples(), steps)
    trainer = Trainer.load(tmp_path / "bundle")
    losses = []
    for index, batch in enumerate(found):
        if index == 3:
            trainer.save_state(tmp_path / "state.safetensors")
        losses.append(trainer.train_step(batch))
    expected = {
        "batches": [as_json(batch) for batch in found],
        "losses": losses,
        "metrics": trainer.evaluate(found[:7]),
        "updates": trainer.updates,
        "gradient_norm": trainer.gradient_norm,
    }
    assert np.shape(found[0]["x"]) == (BATCH, 6)
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    done = subprocess.run(
        ["node", "--test", "test/"],
        cwd=compiled,
        env={**os.environ, "ONWARD_DEVICE_EXAMPLE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "# pass 11" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normalized", "accumulated", "adapted", "dropped"])
def test_node_gives_the_losses_of_onward_train(name: str, compiled: Path, tmp_path: Path) -> None:
    """Over 50 steps; dropout draws other numbers than torch, and the same in all clients."""
    run = normalized(dropout=0.3) if name == "dropped" else RUNS[name]()
    trainer = Trainer.load(run.write(tmp_path))
    losses = [trainer.train_step(batch) for batch in run.batches]
    if name != "dropped":
        assert run.losses_of_updates(losses) == pytest.approx(run.train(tmp_path)[1], abs=1e-5)
    check_losses(compiled, tmp_path, trainer, run.batches, losses)


def test_sequences_of_other_lengths_train_as_in_torch(compiled: Path, tmp_path: Path) -> None:
    losses = write_sequence_bundle(tmp_path)
    trainer, found = Trainer.load(tmp_path / "bundle"), batches_of_lengths()
    assert [trainer.train_step(batch) for batch in found] == pytest.approx(losses, abs=1e-5)
    check_losses(compiled, tmp_path, trainer, found, losses)


def check_losses(
    compiled: Path,
    folder: Path,
    trainer: Trainer,
    found: Sequence[Mapping[str, np.ndarray]],
    losses: list[float],
) -> None:
    """Trains in Node with the batches that a trainer was trained with."""
    expected = {
        "batches": [as_json(batch) for batch in found],
        "losses": losses,
        "metrics": trainer.evaluate(found[:7]),
        "updates": trainer.updates,
        "gradient_norm": trainer.gradient_norm,
    }
    (folder / "expected.json").write_text(json.dumps(expected))
    done = subprocess.run(
        ["node", "--test", "--test-name-pattern", "losses, metrics and weights", "test/"],
        cwd=compiled,
        env={**os.environ, "ONWARD_DEVICE_EXAMPLE": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "ok 1 - losses, metrics and weights" in done.stdout


def test_the_package_holds_what_it_needs_and_no_more(compiled: Path) -> None:
    """What `npm publish` would send: every module with its types, and nothing of the tests or the page."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm: the content of the package is not tested")
    command = [npm, "pack", "--dry-run", "--json", "--ignore-scripts", "--offline"]
    done = subprocess.run(command, cwd=compiled, capture_output=True, text=True, timeout=120, check=True)
    (package,) = json.loads(done.stdout)
    modules = [path.stem for path in (CLIENT / "src").glob("*.ts")]
    expected = {f"dist/{name}{ending}" for name in modules for ending in (".js", ".d.ts")}
    expected |= {f"dist/noble-hashes/{name}" for name in ("sha2.js", "_md.js", "_u64.js", "utils.js", "LICENSE")}
    assert {file["path"] for file in package["files"]} == expected | {"README.md", "package.json"}
    assert package["name"] == "onward-device"
    about = json.loads((compiled / "package.json").read_text())
    entry = about["exports"]["."]
    assert all((compiled / entry[kind]).is_file() for kind in ("types", "default"))
