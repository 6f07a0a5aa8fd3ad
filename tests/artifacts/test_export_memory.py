"""`onward export` from several ranks' files: right values, and less memory than the model takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.distributed as dist
from onnx import TensorProto, helper, numpy_helper

from onward.artifacts.trained_model import export_checkpoint
from onward.checkpoint.writing import CheckpointWriter
from onward.parallel.sharded_tensors import ShardedTensor
from onward.plan.shards import Sharding
from tests.checkpoint.layouts import rows_of, shard_of
from tests.initializers import stored_arrays
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 12


def write_model(path: Path, size: int, external: bool) -> None:
    """A chain of matrix products with random weights."""
    names = ["x", *(f"h{layer}" for layer in range(LAYERS - 1)), "y"]
    nodes = [
        helper.make_node("MatMul", [names[layer], f"w{layer}"], [names[layer + 1]], name=f"m{layer}")
        for layer in range(LAYERS)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name in "xy"]
    weights = [
        numpy_helper.from_array(np.random.default_rng(layer).standard_normal((size, size), np.float32), f"w{layer}")
        for layer in range(LAYERS)
    ]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=external, location=f"{path.name}.weights")


def trained(layer: int, size: int) -> torch.Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(100 + layer))


def save(directory: Path, size: int) -> None:
    """Two horizontal times two data ranks: fused blocks, whose rows ZeRO cuts further; every weight has a moment."""
    rank = dist.get_rank()
    tensors: dict[str, ShardedTensor] = {}
    for layer in range(LAYERS):
        sharding = Sharding(1, (size // 2, size // 4, size // 4))
        whole = trained(layer, size)
        tensors[f"weights/w{layer}"] = rows_of(shard_of(whole, sharding, rank % 2, 2), rank // 2, 2)
        tensors[f"slots/exp_avg/w{layer}"] = rows_of(shard_of(whole.neg(), sharding, rank % 2, 2), rank // 2, 2)
    with CheckpointWriter(directory, 1, blocking=True, group=dist.group.WORLD) as writer:
        writer.save(1, tensors, {})


MEASURE = """
import sys
from pathlib import Path
from onward.artifacts.trained_model import export_checkpoint
def peak():
    # Of this process alone: what getrusage says begins with the peak of the process that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
warm, model, checkpoints, output = map(Path, sys.argv[1:])
export_checkpoint(warm / "model.onnx", warm / "checkpoints", warm / "trained.onnx")
before = peak()
export_checkpoint(model, checkpoints, output)
print(peak() - before)
"""


@pytest.mark.parametrize("external", [False, True])
def test_every_value_arrives(tmp_path: Path, external: bool) -> None:
    write_model(tmp_path / "model.onnx", 48, external)
    run_on_ranks(4, save, tmp_path / "checkpoints", 48)
    path = export_checkpoint(tmp_path / "model.onnx", tmp_path / "checkpoints", tmp_path / "trained.onnx")
    onnx.checker.check_model(path, full_check=True)
    found = stored_arrays(path)
    assert set(found) == {f"w{layer}" for layer in range(LAYERS)}
    assert all(np.array_equal(found[f"w{layer}"], trained(layer, 48).numpy()) for layer in range(LAYERS))
    assert (path.parent / "trained.onnx.data").exists() is external


@pytest.mark.slow
@pytest.mark.parametrize("external", [False, True])
def test_a_model_of_200_mb_never_stands_in_memory_as_a_whole(tmp_path: Path, external: bool) -> None:
    """Above what the process takes for its libraries and a tiny export, less than 0.75 of the model's bytes; the
    largest of its tensors is a twelfth of it."""
    size = 2048
    small = tmp_path / "small"
    small.mkdir()
    for folder, width in ((small, 16), (tmp_path, size)):
        write_model(folder / "model.onnx", width, external)
        run_on_ranks(4, save, folder / "checkpoints", width)
    arguments = [small, tmp_path / "model.onnx", tmp_path / "checkpoints", tmp_path / "trained.onnx"]
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    model_bytes = LAYERS * size * size * 4
    assert int(printed) < 0.75 * model_bytes
    found = onnx.load(tmp_path / "trained.onnx").graph.initializer[LAYERS - 1]
    assert np.array_equal(numpy_helper.to_array(found), trained(LAYERS - 1, size).numpy())
