"""Attacks through files that onward reads: mutated at random, and the forged ones that were not held once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.checkpoint.test_forged import HEADERS, RECORD, WRONG_FIELDS, WRONG_RECORDS, forge
from tests.graph.mutation import seed_model
from tests.graph.nodes.test_budget import BOMBS
from tests.parameters.test_yaml_file import HOSTILE
from tests.test_untrusted_files import ESCAPES

from benchmarks.attack_mutation import explore
from benchmarks.attack_row import Result, Row, each
from onward.checkpoint.reading import read_new_tensors
from onward.checkpoint.run_record import read_run_record
from onward.checkpoint.writing import CheckpointWriter
from onward.data.manifest import Manifest, ShardEntry, read_manifest
from onward.data.shard import load_shard
from onward.data.shard_format import encode_sample
from onward.graph.training_graph import make_training_graph
from onward.parameters import Parameters
from onward.untrusted_files import sha256_of

RUN = b"""paths: {model_path: m.onnx, train_data_dir: train, output_dir: out}
loss: {type: mean_squared_error, prediction: y, label: t}
training: {batch_size: 8, num_train_steps: 100}
learning_rate: {initial_lr: 6e-4, warmup_mode: none}
next_rounds:
  - training: {batch_size: 2}
"""


def _in_folder(attack: Callable[[Path, float, int], Result]) -> Callable[[float, int], Result]:
    def run(seconds: float, seed: int) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            return attack(Path(folder), seconds, seed)

    return run


def _models(folder: Path, seconds: float, seed: int) -> Result:
    path = folder / "m.onnx"

    def target(data: bytes) -> None:
        path.write_bytes(data)
        make_training_graph(path)

    return explore(target, [seed_model().SerializeToString()], seconds, seed)


def _shards(folder: Path, seconds: float, seed: int) -> Result:
    path = folder / "a.pb"
    samples = [encode_sample({"x": np.ones(3, np.float32), "y": np.array(k)}) for k in range(2)]

    def target(data: bytes) -> None:
        path.write_bytes(data)
        load_shard(path, {})

    uneven = encode_sample({"x": np.ones(3, np.float32), "y": np.array([1, 2])})
    return explore(target, [b"".join(samples), samples[0] + uneven], seconds, seed)


def _packs(folder: Path, seconds: float, seed: int) -> Result:
    manifest = Manifest(
        source="a",
        kind="arrays",
        options={"b": 1},
        features={"x": {"dtype": "float32"}},
        sample_count=2,
        shards=(ShardEntry("a.pb", 2, 64),),
    )

    def target(data: bytes) -> None:
        (folder / "pack.json").write_bytes(data)
        read_manifest(folder)

    return explore(target, [manifest.to_json().encode()], seconds, seed)


def _runs(folder: Path, seconds: float, seed: int) -> Result:
    path = folder / "run.yaml"

    def target(data: bytes) -> None:
        path.write_bytes(data)
        Parameters.load(path)

    return explore(target, [RUN], seconds, seed)


def _overrides(folder: Path, seconds: float, seed: int) -> Result:
    path = folder / "run.yaml"
    path.write_bytes(RUN)

    def target(data: bytes) -> None:
        Parameters.load(path, {"training.batch_size": data.decode("utf-8", "replace")})

    return explore(target, [b"8", b"[1, 2]", b"{a: 1}"], seconds, seed)


def _checkpoint(folder: Path) -> Path:
    with CheckpointWriter(folder / "run", 1) as writer:
        return writer.save(10, {"w": torch.ones(4), "n": torch.zeros(2, 3)}, RECORD)


def _replace_all(fields: dict[str, Any], before: dict[str, Any]) -> None:
    before.clear()
    before.update(fields)


def _manifests(folder: Path, seconds: float, seed: int) -> Result:
    """The content mutated, its checksum right."""
    path = _checkpoint(folder)
    whole = (path / "manifest.json").read_text()
    content = json.dumps(json.loads(whole)["content"]).encode()

    def target(data: bytes) -> None:
        try:
            changed = json.loads(data)
        except (ValueError, RecursionError):
            (path / "manifest.json").write_bytes(data)
        else:
            (path / "manifest.json").write_text(whole)
            forge(path, partial(_replace_all, changed if isinstance(changed, dict) else {}))
        read_run_record(path)
        read_new_tensors(path)

    return explore(target, [content], seconds, seed)


def _headers(folder: Path, seconds: float, seed: int) -> Result:
    path = _checkpoint(folder)
    data_file = next(path.glob("*.safetensors"))

    def target(data: bytes) -> None:
        data_file.write_bytes(data)
        forge(path, lambda content: content["files"][0].update(bytes=len(data), sha256=sha256_of(data_file)))
        read_new_tensors(path)

    return explore(target, [data_file.read_bytes()], seconds, seed)


def _forged(folder: Path, seconds: float, seed: int) -> Result:
    """Names that leave the folder, fields and records of wrong types, headers."""

    def cases() -> Iterator[tuple[str, Callable[[], object]]]:
        names: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
            (repr(name)[:40], lambda content, name=name: content["files"][0].update(name=name))  # type: ignore[misc]
            for name in ESCAPES
            if not isinstance(name, bytes) and name != "\udfff"
        ]
        names += [
            (f"{name} {value!r}"[:60], lambda c, n=name, v=value: c.update({n: v}))  # type: ignore[misc]
            for name, value in WRONG_FIELDS
        ]
        names += [
            (f"record {name} {value!r}"[:60], lambda c, n=name, v=value: c["record"].update({n: v}))  # type: ignore[misc]
            for name, value in WRONG_RECORDS
        ]
        for number, (label, change) in enumerate(names):
            place = folder / str(number)
            path = _checkpoint(place)
            forge(path, change)
            yield label, lambda path=path: (read_run_record(path), read_new_tensors(path))  # type: ignore[misc]
        for label, header in HEADERS.items():
            path = _checkpoint(folder / label)
            data = next(path.glob("*.safetensors"))
            data.write_bytes(header)
            digest = sha256_of(data)
            forge(path, lambda c, d=data, s=digest: c["files"][0].update(bytes=d.stat().st_size, sha256=s))  # type: ignore[misc]
            yield f"header {label}", lambda path=path: read_new_tensors(path)  # type: ignore[misc]

    return each(cases())


def _bombs(folder: Path, seconds: float, seed: int) -> Result:
    def cases() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, (make, _) in BOMBS.items():
            path = folder / "m.onnx"
            path.write_bytes(make().SerializeToString())
            yield name, lambda path=path: make_training_graph(path)  # type: ignore[misc]

    return each(cases())


def _hostile_yaml(folder: Path, seconds: float, seed: int) -> Result:
    def cases() -> Iterator[tuple[str, Callable[[], object]]]:
        path = folder / "run.yaml"
        for name, (text, _) in HOSTILE.items():
            path.write_text(text)
            yield name, lambda: Parameters.load(path)
        for name, (text, _) in HOSTILE.items():
            path.write_bytes(RUN)
            yield f"override {name}", lambda text=text: Parameters.load(path, {"training.batch_size": text})  # type: ignore[misc]

    return each(cases())


ROWS = (
    Row("files", "forged checkpoints", _in_folder(_forged)),
    Row("files", "hostile YAML and overrides", _in_folder(_hostile_yaml)),
    Row("bombs", "small files of large graphs", _in_folder(_bombs)),
    Row("mutation", "ONNX files", _in_folder(_models)),
    Row("mutation", "shards", _in_folder(_shards)),
    Row("mutation", "pack.json", _in_folder(_packs)),
    Row("mutation", "RUN.yaml", _in_folder(_runs)),
    Row("mutation", "overrides", _in_folder(_overrides)),
    Row("mutation", "checkpoint manifests", _in_folder(_manifests)),
    Row("mutation", "safetensors headers", _in_folder(_headers)),
)
