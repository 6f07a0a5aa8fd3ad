"""Adapters train alike in every layout; a run of them that stops resumes with the same bits."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.artifacts.trained_model import export_checkpoint
from onward.checkpoint.manifest import read_manifest
from onward.checkpoint.run_checkpoints import RunCheckpoints
from onward.errors import CheckpointError
from onward.graph.adapters.base_checksum import base_checksum
from onward.graph.reading.model_file import read_model
from onward.parallel.launch.process import in_world_of_one
from onward.parameters import Checkpoint
from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, assert_follows, train
from tests.invariants.rank_pool import end_ranks

LORA = {"rank": 3, "alpha": 6}
EVERYTHING = {"rank": 2, "alpha": 3, "dora": True, "targets": ["*"]}
LAYOUTS = {
    "data": Layout(2, 1, 1),
    "ZeRO 3": Layout(2, 1, 1, {"zero_stage": 3}),
    "horizontal": Layout(1, 2, 1),
    "pipeline": Layout(1, 1, 2),
    "context": Layout(1, 1, 1, {"context_parallel_size": 2}),
}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


@functools.cache
def one_process(sections: str) -> Result:
    return train(CASES["gpt2"], Layout(), accumulation=2, sections=json.loads(sections))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "adapter",
    [pytest.param(LORA, id="LoRA"), pytest.param(EVERYTHING, id="DoRA of all weights", marks=pytest.mark.slow)],
)
def test_a_layout_trains_the_same_adapter(layout: str, adapter: dict[str, Any]):
    sections = {"adapter": adapter}
    expected = one_process(json.dumps(sections))
    trained = [name for name in expected.tensors if name.startswith("weights/")]
    assert trained
    assert all(".lora_" in name for name in trained)
    actual = train(CASES["gpt2"], LAYOUTS[layout], accumulation=2, sections=sections)
    assert_follows(actual, expected, 1e-6, 1e-5)


def _run(folder: Path, updates: int, layout: str = "one process") -> Result:
    sections = {
        "checkpoint": {"checkpoints_dir": str(folder / "checkpoints")},
        "paths": {"output_dir": str(folder / "out"), "model_path": str(folder / "model.onnx")},
        "adapter": {**LORA, "dropout": 0.25, "learning_rate_ratio": 4},
    }
    spread = LAYOUTS.get(layout, Layout())
    return train(
        CASES["gpt2"], spread, updates=updates, updates_of_data=6, accumulation=2, sections=sections, folder=str(folder)
    )


def test_a_run_that_stopped_resumes_with_the_same_bits(tmp_path: Path):
    """The model that both write at the end is the same file; what they saved is the adapters, not the model."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    _run(tmp_path / "whole", 6)
    _run(tmp_path / "halves", 3)
    _run(tmp_path / "halves", 6)
    whole, halves = ((tmp_path / name / "out" / "model_trained.onnx").read_bytes() for name in ("whole", "halves"))
    assert whole == halves
    newest = max((tmp_path / "whole" / "checkpoints").glob("*/"), key=lambda path: path.stat().st_mtime)
    names = [name for name in read_manifest(newest).tensors if not name.startswith("random/")]
    assert names
    assert all(".lora_" in name for name in names)
    exported = tmp_path / "exported.onnx"
    export_checkpoint(tmp_path / "whole" / "model.onnx", newest, exported)
    assert exported.read_bytes() == whole


def test_adapters_of_another_base_are_refused(tmp_path: Path):
    _run(tmp_path, 2)
    model = onnx.load(tmp_path / "model.onnx")
    weight = next(one for one in model.graph.initializer if one.name == "wte.weight")
    weight.raw_data = weight.raw_data[:-4] + np.float32(9).tobytes()
    changed = tmp_path / "changed"
    changed.mkdir()
    onnx.save(model, changed / "model.onnx")
    shutil.copytree(tmp_path / "checkpoints", changed / "checkpoints")
    words = "adapters of a base model with the checksum .* Give the ONNX file that the adapters were trained on"
    with pytest.raises(CheckpointError, match=words):
        export_checkpoint(changed / "model.onnx", changed / "checkpoints", tmp_path / "exported.onnx")
    settings = Checkpoint(checkpoints_dir=changed / "checkpoints")
    checkpoints = RunCheckpoints(in_world_of_one())
    checkpoints.base_checksum = base_checksum(read_model(changed / "model.onnx"), ["h.0.attn.c_attn.weight"])
    with pytest.raises(CheckpointError, match=words):
        checkpoints.resume(settings, None)  # type: ignore[arg-type]  # refused before the state is looked at
