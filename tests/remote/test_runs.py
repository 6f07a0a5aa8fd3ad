"""Runs whose files are remote: from a RUN.yaml by URL to the trained model by URL, resumed and pruned there."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import onnx
import pytest

from onward.checkpoint import run_files
from onward.cli import main
from onward.parameters import Parameters
from tests.initializers import stored_arrays
from tests.mlp import data, save_mlp, write_shards

RUN = """
paths: {model_path: mlp.onnx, train_data_dir: train, test_data_dir: test, output_dir: out}
loss: {type: softmax_cross_entropy, prediction: logits, label: label}
training: {batch_size: 4, num_train_steps: 12, evaluation_period: 6}
learning_rate: {initial_lr: 0.1}
checkpoint: {checkpoints_dir: out/checkpoints, checkpoint_period: 3, max_num_checkpoints: 2}
tensorboard: {log_dir: out/board}
machine: {execution_provider: CPU, threads: 1}
"""


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`memory://bucket` with a model, its data and a RUN.yaml; the same files in `tmp_path / "here"`."""
    here = tmp_path / "here"
    here.mkdir()
    save_mlp(here)
    write_shards(here / "train", data(24))
    write_shards(here / "test", data(9, seed=1))
    (here / "run.yaml").write_text(RUN)
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    for path in here.rglob("*"):
        if path.is_file():
            system.pipe_file(f"/bucket/{path.relative_to(here)}", path.read_bytes())
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield system
    system.store.clear()


def weights(content: bytes) -> dict[str, np.ndarray]:
    return stored_arrays(onnx.load_from_string(content))


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def checkpoints(bucket: Any) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in bucket.ls("/bucket/out/checkpoints", detail=False))


def test_every_path_field_has_a_way() -> None:
    """A new path field must say how it behaves when it is a URL."""
    parameters = Parameters.from_mapping(
        {"loss": {"type": "output", "prediction": "x"}, "training": {"batch_size": 1, "num_train_steps": 1},
         "learning_rate": {"initial_lr": 1}, "paths": {"model_path": "x"}}
    )  # fmt: skip
    fields = {
        f"{section.name}.{one.name}"
        for section in dataclasses.fields(parameters)
        if dataclasses.is_dataclass(getattr(parameters, section.name))
        for one in dataclasses.fields(getattr(parameters, section.name))
        if "Path" in str(one.type)
    }
    lists = (
        *run_files.INPUT_MODELS, *run_files.INPUT_FOLDERS, *run_files.KEPT_OUTPUTS, *run_files.NEW_OUTPUTS,
        *run_files.READ_IN_PLACE, *run_files.OF_THE_MACHINE,
    )  # fmt: skip
    assert fields == set(lists)


def test_a_run_by_url_is_the_run_here(bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "memory://bucket/run.yaml"]) == 0
    text = capsys.readouterr().out
    assert "trained model written to memory://bucket/out/mlp_trained.onnx." in text
    assert "saved  step  3      memory://bucket/out/checkpoints/checkpoint-00000003 " in text
    assert str(tmp_path / "cache") not in text
    assert main(["train", str(tmp_path / "here/run.yaml")]) == 0
    local = tmp_path / "here/out"
    trained = bucket.cat_file("/bucket/out/mlp_trained.onnx")
    assert same(weights(trained), weights((local / "mlp_trained.onnx").read_bytes()))
    assert checkpoints(bucket) == sorted(path.name for path in (local / "checkpoints").iterdir())
    assert bucket.isfile("/bucket/out/board/metrics.jsonl")
    assert any("tfevents" in path for path in bucket.ls("/bucket/out/board", detail=False))
    # Nothing is written where the URL would be a path: `./memory:`.
    assert not [path for path in tmp_path.iterdir() if path.name not in ("here", "cache")]


def test_a_run_resumes_from_its_url(bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "here/run.yaml")]) == 0
    whole = weights((tmp_path / "here/out/mlp_trained.onnx").read_bytes())
    half = ["train", "memory://bucket/run.yaml", "--training.num_train_steps"]
    assert main([*half, "6"]) == 0
    assert checkpoints(bucket) == ["checkpoint-00000003", "checkpoint-00000006"]
    # Another machine: nothing of the first start is here.
    __import__("shutil").rmtree(tmp_path / "cache")
    capsys.readouterr()
    assert main([*half, "12"]) == 0
    assert "resumed from memory://bucket/out/checkpoints/checkpoint-00000006: " in capsys.readouterr().out
    assert checkpoints(bucket) == ["checkpoint-00000009", "checkpoint-00000012"]
    assert same(weights(bucket.cat_file("/bucket/out/mlp_trained.onnx")), whole)
    steps = [
        line for line in bucket.cat_file("/bucket/out/board/metrics.jsonl").decode().splitlines() if "loss" in line
    ]
    assert len(steps) >= 2


def test_what_is_removed_there_is_gone(bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The URL holds what counts: a copy left in the cache resumes nothing."""
    assert main(["train", "memory://bucket/run.yaml"]) == 0
    bucket.rm("/bucket/out", recursive=True)
    capsys.readouterr()
    assert main(["train", "memory://bucket/run.yaml"]) == 0
    assert "resumed" not in capsys.readouterr().out


def test_a_checkpoint_without_its_manifest_does_not_count(bucket: Any, tmp_path: Path) -> None:
    """An upload that was cut off: the manifest goes last."""
    assert main(["train", "memory://bucket/run.yaml", "--training.num_train_steps", "6"]) == 0
    bucket.rm_file("/bucket/out/checkpoints/checkpoint-00000006/manifest.json")
    assert main(["train", "memory://bucket/run.yaml"]) == 0
    assert main(["train", str(tmp_path / "here/run.yaml")]) == 0
    local = weights((tmp_path / "here/out/mlp_trained.onnx").read_bytes())
    assert same(weights(bucket.cat_file("/bucket/out/mlp_trained.onnx")), local)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory://bucket/none.yaml"], "'memory://bucket/none.yaml' does not exist; give the path of a RUN.yaml."),
        (
            ["memory://bucket/run.yaml", "--paths.train_data_dir", "memory://bucket/none"],
            "data directory 'memory://bucket/none' does not exist; give a directory with .pb shards.\n"
            "The path is set by paths.train_data_dir; correct it there.",
        ),
        (
            ["memory://bucket/run.yaml", "--paths.model_path", "memory://bucket/none.onnx"],
            "model 'memory://bucket/none.onnx' cannot be fetched: does not exist.\n"
            "The path is set by paths.model_path; correct it there.",
        ),
        (
            ["here/run.yaml", "--checkpoint.checkpoints_dir", "nonsense://bucket/ck"],
            "nonsense://bucket/ck cannot be locked for this run: nonsense:// is not a protocol that fsspec supports; "
            "expected file, gs, https, memory, s3 and others (nonsense://bucket/ck/.onward-lock). Check that the "
            "folder can be written to, or name another one.\nThe path is set by "
            "checkpoint.checkpoints_dir; correct it there.",
        ),
    ],
)
def test_what_is_not_there(bucket: Any, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments]) == 2
    assert capsys.readouterr().err == f"onward train: {words}\n"


def test_a_store_that_refuses_ends_the_run(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Access Denied")

    # Of the class: fsspec gives each thread its own instance.
    monkeypatch.setattr(type(bucket), "put_file", refuse)
    assert main(["train", "memory://bucket/run.yaml"]) == 2
    text = capsys.readouterr().err
    assert "checkpoint-00000003/" in text
    assert "cannot be written: Access Denied. Check the URL and your permission to write there" in text


def test_packing_and_exporting_by_url(bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = data(24)
    with bucket.open("/bucket/samples.npz", "wb") as file:
        np.savez(file, **samples)
    pack = ["pack", "memory://bucket/samples.npz", "memory://bucket/packed", "--test-fraction", "0.25"]
    assert main(pack) == 0
    assert "memory://bucket/packed/train: 19 samples" in capsys.readouterr().out
    assert main(pack) == 2
    assert capsys.readouterr().err == (
        "onward pack: destination 'memory://bucket/packed/train' already holds shards: pass another one, or delete "
        "them there; --overwrite replaces local ones only.\n"
    )
    packed = ["--paths.train_data_dir", "memory://bucket/packed/train", "--paths.test_data_dir"]
    assert main(["train", "memory://bucket/run.yaml", *packed, "memory://bucket/packed/test"]) == 0
    capsys.readouterr()
    export = ["export", "memory://bucket/mlp.onnx", "--checkpoint", "memory://bucket/out/checkpoints"]
    assert main([*export, "-o", "memory://bucket/exported.onnx"]) == 0
    assert capsys.readouterr().out == "wrote memory://bucket/exported.onnx\n"
    trained = bucket.cat_file("/bucket/out/mlp_trained.onnx")
    assert same(weights(bucket.cat_file("/bucket/exported.onnx")), weights(trained))
    assert main(["inspect", "memory://bucket/exported.onnx"]) == 0


@pytest.mark.slow
def test_two_processes_train_by_url(bucket: Any, tmp_path: Path) -> None:
    """`file://` is a store that several processes see; rank 0 fetches and uploads."""
    command = [sys.executable, "-m", "onward", "train", f"file://{tmp_path}/here/run.yaml"]
    done = subprocess.run(
        [*command, "--distributed.data_parallel_size", "2", "--training.batch_size", "2"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trained model written to file://{tmp_path}/here/out/mlp_trained.onnx." in done.stdout
    assert (tmp_path / "here/out/mlp_trained.onnx").is_file()
    assert len(list((tmp_path / "here/out/checkpoints").glob("checkpoint-*/manifest.json"))) == 2
