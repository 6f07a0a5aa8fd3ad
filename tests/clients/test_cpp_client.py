"""The C++ client, compiled, against the Python client's numbers for the same bundle."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file

from onward_device import Trainer
from tests.clients.sequences import batches_of_lengths, write_sequence_bundle
from tests.device.bundles import batches, bundle_of, file_of_weights, samples
from tests.mlp import save_mlp

ROOT = Path(__file__).parents[2]
HEADERS = (ROOT / "build" / "onnxruntime", Path("/usr/include/onnxruntime"), Path("/usr/local/include/onnxruntime"))
"""Where the runtime's headers may be: `make clients` puts them into the first."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that does with a folder what `against_python.cpp` says."""
    headers = next((folder for folder in HEADERS if (folder / "onnxruntime_cxx_api.h").exists()), None)
    if shutil.which("g++") is None:
        pytest.skip("there is no g++: the C++ client is not tested")
    if headers is None:
        pytest.skip("there are no headers of onnxruntime: run `make clients` to test the C++ client")
    if not any((place / "nlohmann" / "json.hpp").exists() for place in (Path("/usr/include"), headers)):
        pytest.skip("there is no nlohmann/json.hpp (Debian: nlohmann-json3-dev): the C++ client is not tested")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if library is None:
        pytest.skip("the package onnxruntime has no libonnxruntime.so: the C++ client is not tested")
    program = tmp_path_factory.mktemp("cpp") / "against_python"
    (program.parent / "libonnxruntime.so.1").symlink_to(library)  # the name that programs look for; the wheel lacks it
    warnings = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    places = ["-isystem", str(headers), "-I", str(ROOT / "clients" / "cpp")]
    source = str(Path(__file__).parent / "cpp" / "against_python.cpp")
    command = ["g++", *warnings, *places, source, "-o", str(program), str(library), f"-Wl,-rpath,{program.parent}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


def run(program: Path, folder: Path, found: list[dict[str, np.ndarray]], *options: str) -> dict[str, Any]:
    """What the program prints of a folder with a bundle."""
    for index, batch in enumerate(found):
        save_file({name: np.ascontiguousarray(array) for name, array in batch.items()}, folder / f"batch{index}")
    done = subprocess.run([str(program), str(folder), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return dict(json.loads(done.stdout))


def damage(folder: Path) -> None:
    """Beside the bundle of a folder: a damaged one, newer and impatient ones, and the state of another."""
    shutil.copytree(folder / "bundle", folder / "damaged")
    with (folder / "damaged" / file_of_weights(folder / "bundle")).open("r+b") as file:
        file.write(b"\1\1\1\1")
    (folder / "newer").mkdir()
    manifest = json.loads((folder / "bundle" / "manifest.json").read_text())
    (folder / "newer" / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    (folder / "unknown").mkdir()
    (folder / "unknown" / "manifest.json").write_text(json.dumps({**manifest, "requires": ["class_labels", "tides"]}))
    shutil.copytree(folder / "bundle", folder / "impatient")
    training = {**manifest["training"], "skipped_in_a_row": 2}
    (folder / "impatient" / "manifest.json").write_text(json.dumps({**manifest, "training": training}))
    shutil.copytree(folder / "bundle", folder / "indexed")
    features = [{**one, "rows": 4} if one["name"] == "label" else one for one in manifest["features"]]
    (folder / "indexed" / "manifest.json").write_text(json.dumps({**manifest, "features": features}))
    state = bytearray((folder / "python.safetensors").read_bytes())
    state[-1] ^= 1
    (folder / "flipped.safetensors").write_bytes(state)
    shifted = (folder / "python.safetensors").read_bytes()
    assert b'"data_offsets":[8,16]' in shifted
    (folder / "shifted.safetensors").write_bytes(shifted.replace(b"[8,16]", b"[0,8] "))
    tensors = load_file(folder / "python.safetensors")
    save_file(tensors, folder / "other.safetensors", {"format": "onward-device", "bundle": "0" * 64})


def without_metadata(path: Path) -> tuple[bytes, Mapping[str, str]]:
    """A safetensors file whose metadata, which the library writes in any order, is apart."""
    content = path.read_bytes()
    key = b'"__metadata__":'
    start = content.index(key) + len(key)
    metadata, length = json.JSONDecoder().raw_decode(
        content[start : 8 + int.from_bytes(content[:8], "little")].decode()
    )
    return content[:start] + content[start + length :], metadata


REFUSED = {
    "short": r'"label" has the shape [3]; expected [batch=4].|"x" has the shape [4, 6]; expected [batch=3, 6].',
    "wide": '"x" has the shape [4, 7]; expected [batch=4, 6].',
    "no_x": 'the batch has no "x"; it has label.',
    "negative": '"label" holds the label -1; expected 0 to 3. Fix the data',
    "index": '"label" holds the index -1; expected 0 to 3, since it picks rows of a table that has 4. If it',
    "large index": '"label" holds the index 1000000; expected 0 to 3, since it picks rows of a table that has 4. Make',
    "halves": '"label" is float32; expected int64. Convert it.',
    "nothing": '"x" has the shape [0, 6]. Leave out batches without samples.',
    "no batches": "there are no batches to evaluate. Pass at least one.",
    "nowhere": "nowhere is no device bundle: it has no manifest.json. Write one with `onward device",
    "damaged": "weights.bin was changed or damaged: its SHA-256 is |train.onnx was changed or damaged: its SHA-256 is ",
    "newer": "newer is a device bundle of version 2; this header reads version 1. Take the header of the onward",
    "unknown": "unknown is a device bundle that requires tides, which this header does not know. Take the header of",
    "other_state": "other.safetensors is a state of the bundle 000000000000; this one is ",
    "no_state": "run.yaml is no safetensors file: its header would take ",
    "flipped": "flipped.safetensors was changed or damaged: the SHA-256 of its tensors is ",
    "shifted": "shifted.safetensors is no safetensors file: a tensor begins at byte 0, where 8 comes next.",
    "no_folder": "cannot be written: there is no folder ",
    "bytes": '"x" is uint8; expected float32. Convert it.',
    "more": 'the batch has "weight", which no graph reads; expected label, x. Leave out others, or fix the name.',
    "no_file": "no.safetensors.",
    "values": "1 values are no array of the shape [2, 2].",
}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_cpp_trains_as_python_does(accumulation: int, compiled: Path, tmp_path: Path) -> None:
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

    assert len(losses) == steps
    assert found["losses"] == pytest.approx(losses, abs=1e-5)
    assert found["metrics"] == pytest.approx(trainer.evaluate(inputs[:7]), abs=1e-5)
    assert (found["updates"], found["skipped"]) == (trainer.updates, 0)
    assert found["gradient_norm"] == pytest.approx(trainer.gradient_norm, abs=1e-4)
    assert found["continued"] == pytest.approx(losses[3], abs=1e-5)
    ((name, expected),) = trainer.predict(inputs[0]).items()
    assert found["predictions"][name] == pytest.approx(expected.ravel().tolist(), abs=1e-5)
    exported = onnxruntime.InferenceSession(tmp_path / "cpp.onnx")
    (output,) = exported.run([name], {one.name: inputs[0][one.name] for one in exported.get_inputs()})
    assert np.abs(output - expected).max() < 1e-5
    (warning,) = found["warnings"]
    assert warning.startswith(
        "update 1 was skipped: its loss, gradient or batch statistics are not finite (gradient norm "
    )
    assert warning.endswith(
        "nan). Later ones are counted in Trainer::skipped_updates; more than 2 in a row throw an error."
    )
    assert "the last 3 weight updates were skipped, since" in found["skipped_updates_error"]
    assert "allows 2 in a row. Look for infinite, NaN or very large values" in found["skipped_updates_error"]
    for which, words in REFUSED.items():
        assert any(part in found["refused"][which] for part in words.split("|")), (which, found["refused"][which])


def test_states_are_the_same_bytes(compiled: Path, tmp_path: Path) -> None:
    """C++ loads Python's state, and saves what Python saves of it; Python continues from it."""
    save_mlp(tmp_path)
    bundle_of(tmp_path)
    trainer, inputs = Trainer.load(tmp_path / "bundle"), batches(samples(), 8)
    for batch in inputs[:3]:
        trainer.train_step(batch)
    trainer.save_state(tmp_path / "python.safetensors")
    damage(tmp_path)
    run(compiled, tmp_path, inputs)
    cpp, python = without_metadata(tmp_path / "cpp.safetensors"), without_metadata(tmp_path / "python.safetensors")
    assert cpp[1] == python[1]
    assert len(cpp[0]) == len(python[0])
    trainer.load_state(tmp_path / "cpp.safetensors")
    assert trainer.updates == 3
    resaved = tmp_path / "again.safetensors"
    trainer.save_state(resaved)
    assert without_metadata(resaved)[0] == cpp[0]


def test_sequences_of_other_lengths_train_as_in_torch(compiled: Path, tmp_path: Path) -> None:
    losses = write_sequence_bundle(tmp_path)
    assert run(compiled, tmp_path, batches_of_lengths(), "losses")["losses"] == pytest.approx(losses, abs=1e-5)
