"""Whatever cannot be exported at the end of a run is found out at its start, and weights of every rank come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.artifacts import export_rehearsal, inference_model
from onward.artifacts.export_rehearsal import rehearse_export
from onward.artifacts.trained_model import export_checkpoint
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError, StorageError, UserError
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.initializers import stored_arrays
from tests.mlp import ON_ONE_THREAD, data, start, weights_of
from tests.ranks import run_on_ranks

SHAPES = {rank: tuple(range(2, 2 + rank)) for rank in range(6)}
"""Of a weight of each rank: [], [2], [2, 3] ..."""

NAMES = [f"w{rank}" for rank in SHAPES]
"""Given exactly: a number without axes is otherwise taken for a constant."""


def model_of_all_ranks() -> onnx.ModelProto:
    """`y [n] = mean over all ranks of the mean of (x * weight)`, x [n]: every weight is trained."""
    draw = np.random.default_rng(5).standard_normal
    nodes: list[onnx.NodeProto] = []
    tensors: dict[str, np.ndarray] = {}
    for rank, shape in SHAPES.items():
        tensors[f"w{rank}"] = np.asarray(draw(shape), np.float32)
        tensors[f"like{rank}"] = np.array([-1, *[1] * rank])
        nodes += [
            helper.make_node("Reshape", ["x", f"like{rank}"], [f"x{rank}"]),
            helper.make_node("Mul", [f"x{rank}", f"w{rank}"], [f"m{rank}"]),
            helper.make_node("Reshape", [f"m{rank}", "each"], [f"r{rank}"])
            if rank == 0
            else helper.make_node("ReduceMean", [f"m{rank}"], [f"r{rank}"], axes=list(range(1, rank + 1)), keepdims=0),
        ]
    tensors["each"] = np.array([-1])
    nodes.append(helper.make_node("Sum", [f"r{rank}" for rank in SHAPES], ["y"]))
    graph = helper.make_graph(
        nodes,
        "ranks",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def runner_of(folder: Path, optimizer: str = "SGD", **distributed: Any) -> TrainingRunner:
    onnx.save(model_of_all_ranks(), folder / "model.onnx")
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": folder / "model.onnx", "output_dir": folder / "out"},
            "loss": {"type": "mean_squared_error", "prediction": "y", "label": "target"},
            "training": {"batch_size": 4, "num_train_steps": 3, "weights_to_train": NAMES},
            "learning_rate": {"initial_lr": 0.05},
            "optimizer": {"training_optimizer_name": optimizer},
            "checkpoint": {"checkpoints_dir": folder / "checkpoints"},
            "distributed": distributed,
        }
    )
    runner = TrainingRunner(parameters, ON_ONE_THREAD)
    runner.initialize()
    return runner


X = np.linspace(-1, 1, 8, dtype=np.float32)


def train(folder: Path, optimizer: str = "SGD", **distributed: Any) -> None:
    runner = runner_of(folder, optimizer, **distributed)
    runner.run(InMemoryDataLoader({"x": X, "target": 2 * X + 1}))
    runner.end_training()


def stored(path: Path) -> dict[str, np.ndarray]:
    onnx.checker.check_model(path, full_check=True)
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if t.name.startswith("w")}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Lamb"])
def test_weights_of_every_rank_are_trained_and_exported(tmp_path: Path, optimizer: str) -> None:
    before = stored_arrays(model_of_all_ranks())
    train(tmp_path, optimizer)
    written = tmp_path / "out" / "model_trained.onnx"
    after = stored(written)
    assert {name: array.shape for name, array in after.items()} == {f"w{r}": s for r, s in SHAPES.items()}
    assert all(not np.array_equal(array, before[name]) for name, array in after.items())
    expected = sum(X * after[f"w{rank}"].mean() for rank in SHAPES)
    np.testing.assert_allclose(onnxruntime.InferenceSession(written).run(None, {"x": X})[0], expected, atol=1e-6)
    again = export_checkpoint(tmp_path / "model.onnx", tmp_path / "checkpoints", tmp_path / "again.onnx")
    assert again.read_bytes() == written.read_bytes()


def test_onward_export_writes_weights_of_every_rank(tmp_path: Path) -> None:
    net = onward.to_torch(model_of_all_ranks(), weights_to_train=NAMES)
    with torch.no_grad():
        for weight in net.weights.values():
            weight.fill_(0.25)
    onward.export(net, tmp_path / "filled.onnx")
    found = stored(tmp_path / "filled.onnx")
    assert {name: array.shape for name, array in found.items()} == {f"w{r}": s for r, s in SHAPES.items()}
    assert all((array == 0.25).all() for array in found.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_train_weights_of_every_rank_as_one_process(tmp_path: Path, stage: int) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    train(tmp_path / "one")
    run_on_ranks(2, train_replicas, tmp_path / "two", stage)
    one, two = (stored(tmp_path / folder / "out" / "model_trained.onnx") for folder in ("one", "two"))
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=1e-6, atol=1e-6)


def train_replicas(folder: Path, stage: int) -> None:
    """Both replicas read the same batches, so that their mean is the gradient of one process."""
    train(folder, data_parallel_size=2, zero_stage=stage)


# ------------------------------------------------------------------------------------------------- what fails, and when


def _is_a_folder(folder: Path) -> None:
    (folder / "out" / "mlp_trained.onnx").mkdir(parents=True)


def _is_a_file(folder: Path) -> None:
    (folder / "out").write_text("a file")


@pytest.mark.parametrize(("spoil", "words"), [(_is_a_folder, "is a directory"), (_is_a_file, "exists")])
def test_a_place_that_cannot_be_written_is_found_before_the_first_step(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(tmp_path)
    with pytest.raises(StorageError, match=words):
        start(tmp_path, paths={"output_dir": tmp_path / "out"})


def test_a_place_for_a_profile_is_made_before_the_first_step(tmp_path: Path) -> None:
    _is_a_file(tmp_path)
    with pytest.raises(StorageError, match=r"profiler\.trace_dir: '.*out' cannot be made"):
        start(tmp_path, profiler={"first_step": 2, "last_step": 3, "trace_dir": tmp_path / "out"})


def test_a_full_disk_is_found_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr(export_rehearsal.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(StorageError, match=r"mlp_trained.onnx' needs about [\d,]+ bytes; the disk has 100 free\. Free"):
        start(tmp_path, paths={"output_dir": tmp_path / "out"})


def test_whatever_the_export_raises_is_raised_by_the_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function between a weight and the file fails once."""
    for name in ("_set", "_lazy_tensor", "to_numpy", "_stored_dtype", "switch_to_inference", "_places"):

        def fail(*_: Any, name: str = name, **__: Any) -> None:
            raise ModelError(f"{name} failed")

        with monkeypatch.context() as patch:
            patch.setattr(inference_model, name, fail)
            with pytest.raises(UserError, match=f"{name} failed"):
                start(tmp_path, paths={"output_dir": tmp_path / "out"})


def test_a_weight_of_another_shape_is_refused() -> None:
    graph = make_training_graph(model_of_all_ranks(), weights_to_train=NAMES)
    wrong = torch.empty(7, device="meta")
    with pytest.raises(ModelError, match=r"the weight 'w0' has the shape \[7\]; the model has \[\] for it\."):
        rehearse_export(graph, lambda _: wrong, None)


def test_it_leaves_nothing_behind_and_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mlp_trained.onnx").write_bytes(b"earlier")
    runner, _ = start(tmp_path, paths={"output_dir": tmp_path / "out"})
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {".onward-lock", "mlp_trained.onnx", "resolved.yaml", "run.json"}
    assert (tmp_path / "out" / "mlp_trained.onnx").read_bytes() == b"earlier"
    before = weights_of(runner)
    runner.run(InMemoryDataLoader(data(32)))
    runner.end_training()
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(runner).items())
    onnx.checker.check_model(tmp_path / "out" / "mlp_trained.onnx")


def test_it_reads_no_value_and_is_cheap(tmp_path: Path) -> None:
    """GPT-2 of 53 M parameters, whose tensors are on no device: 200 MB would be read or written otherwise."""
    graph = make_training_graph(create_model("gpt2", size="small", layers=2))
    values = graph.model.graph.initializers
    outlines = {
        name: torch.empty(tuple(values[name].shape.numpy()), device="meta")  # type: ignore[union-attr]
        for name in (*graph.weights, *graph.states)
    }
    started = time.process_time()
    rehearse_export(graph, outlines.__getitem__, tmp_path / "trained.onnx")
    assert time.process_time() - started < 5
    assert list(tmp_path.iterdir()) == []
