"""Two methods in one run: it trains like one process in every layout, resumes, and exports what it evaluated; or it is
refused before any work, with a message that names both."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from onward.artifacts.trained_model import export_checkpoint
from onward.errors import OnwardError
from tests.invariants.cases import CROSS_ENTROPY, Case, random
from tests.invariants.layouts import Layout, Result, assert_moves, train
from tests.invariants.rank_pool import end_ranks
from tests.plan.staged_models import mlp

WIDTH = 80


def clusters(samples: int) -> dict[str, np.ndarray]:
    labels = random((samples,), 8, seed=1)
    return {"x": random((samples, WIDTH)) + 2 * np.eye(8, WIDTH, dtype=np.float32)[labels], "labels": labels}


CASE = Case(lambda: mlp(width=WIDTH), CROSS_ENTROPY, clusters)
"""Wide enough for a frozen weight to be quantized."""
SLOW_SCALES = {"weights": "*_scale", "learning_rate_factor": 0.01}
METHODS: dict[str, dict[str, Any]] = {
    "adapter": {"adapter": {"rank": 2, "alpha": 4, "targets": ["*"]}},
    "frozen int8": {
        "frozen_weights": {"dtype": "int8", "block_size": 8}, "training": {"weights_not_to_train": ["fc1.weight"]},
    },
    "lsq": {"quantize_aware": {"weights": "int8"}},
    "moving_average": {"quantize_aware": {"weights": "int8", "observer": "moving_average"}},
    "distillation": {"distillation": {"teacher_path": "TEACHER", "pairs": {"relu1": "relu1"}, "pairs_weight": 0.1}},
    "magnitude": {"pruning": {"pattern": "magnitude", "sparsity": 0.5, "end_update": 3}},
    "2:4": {"pruning": {"pattern": "2:4"}},
    "ema": {"averaging": {"kind": "ema", "decay": 0.5}},
    "swa": {"averaging": {"kind": "swa", "start_update": 1}},
    "Muon": {"optimizer": {"training_optimizer_name": "Muon"}},
    "schedule-free": {"optimizer": {"training_optimizer_name": "AdamWScheduleFree"}},
    "bf16": {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}},
    "fp16": {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 256.0}},
}  # fmt: skip
LOW_PRECISION = {"bf16": 1e-1, "fp16": 1e-2, "lsq": 1e-2, "moving_average": 1e-2, "Muon": 1e-2}
"""Bounds of the norm of a weight's difference, relative to its own; 1e-5 for others. A number between two steps may be
rounded either way, and Muon orthogonalizes in bf16."""
LAYOUTS = {
    "replicas": Layout(2, 1, 1),
    "ZeRO 1": Layout(2, 1, 1, {"zero_stage": 1}),
    "ZeRO 2": Layout(2, 1, 1, {"zero_stage": 2}),
    "ZeRO 3": Layout(2, 1, 1, {"zero_stage": 3}),
    "tensor parallel": Layout(1, 2, 1),
    "pipeline": Layout(1, 1, 2),
}
QUANTIZERS, UPDATES = ("lsq", "moving_average"), 6
REFUSED = {
    **{frozenset({"adapter", one}): "quantize_aware.weights is int8 and adapter.rank is 2; set one of"
       for one in QUANTIZERS},
    **{frozenset({"frozen int8", one}): "frozen_weights.dtype is int8 and quantize_aware.weights is int8; set one of"
       for one in QUANTIZERS},
    **{frozenset({"adapter", one}): "adapter.rank is 2; adapters leave the weights that would be pruned as they are"
       for one in ("magnitude", "2:4")},
    **{frozenset({one, "schedule-free"}): f"averaging.kind is {one}, but the optimizer AdamWScheduleFree averages"
       for one in ("ema", "swa")},
}  # fmt: skip
QUICK = {
    ("lsq", "fp16"): "ZeRO 3", ("moving_average", "ema"): "tensor parallel", ("magnitude", "schedule-free"): "ZeRO 2",
    ("adapter", "distillation"): "pipeline", ("frozen int8", "distillation"): "replicas", ("lsq", "2:4"): "ZeRO 1",
}  # fmt: skip
"""Pairs that are trained in one process, and in a layout; all others are slow tests."""


def can_be_asked(pair: tuple[str, str]) -> bool:
    """Whether no field of RUN.yaml would have two values."""
    one, other = (METHODS[name] for name in pair)
    return not (one.keys() & other.keys()) - {"training"}


PAIRS = [pair for pair in itertools.combinations(METHODS, 2) if can_be_asked(pair)]
TRAINED = [pair for pair in PAIRS if frozenset(pair) not in REFUSED]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "teacher.onnx"
    model = CASE.model()
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.Tensor(value.const_value.numpy() * np.float32(1.5), name=value.name)
    ir.save(model, path)
    return path


def spread(
    pair: tuple[str, ...], teacher: Path, layout: Layout, folder: Path | None = None, updates: int = UPDATES
) -> Result:
    sections: dict[str, dict[str, Any]] = {}
    for section, fields in (item for name in pair for item in METHODS[name].items()):
        sections[section] = {**sections.get(section, {}), **fields}
    if "distillation" in pair:
        sections["distillation"]["teacher_path"] = str(teacher)
    rules = [{"lambda": 0.1, "epsilon": 1e-3}, *([SLOW_SCALES] if "quantize_aware" in sections else [])]
    sections["optimizer"] = {**sections.get("optimizer", {}), "optimizer_attributes": rules}
    if layout.data > 1:
        sections["distributed"] = {**layout.sections()["distributed"], "synchronize_batch_norm": True}
    if folder is not None:
        sections["paths"] = {"output_dir": str(folder / "out"), "model_path": str(folder / "model.onnx")}
        sections["checkpoint"] = {"checkpoints_dir": str(folder / "checkpoints")}
    return train(CASE, layout, updates=updates, updates_of_data=UPDATES, accumulation=2, test_samples=6,
                 sections=sections, folder=None if folder is None else str(folder))  # fmt: skip


@functools.cache
def one_process(pair: tuple[str, ...], teacher: Path) -> Result:
    return spread(pair, teacher, Layout())


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if frozenset(pair) in REFUSED], ids=" and ".join)
def test_a_pair_is_refused_before_any_work(pair: tuple[str, str], teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match=REFUSED[frozenset(pair)]):
        spread(pair, teacher, Layout(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx"}


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in TRAINED], ids=" and ".join
)
def test_a_pair_resumes_and_exports_what_it_evaluated(pair: tuple[str, str], teacher: Path, tmp_path: Path) -> None:
    """Two halves end with the bits of a run without an interruption, and a checkpoint exports the same file."""
    expected = one_process(pair, teacher)
    assert_moves(expected)
    spread(pair, teacher, Layout(), tmp_path, UPDATES // 2)
    halves = spread(pair, teacher, Layout(), tmp_path)
    assert halves.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(halves.tensors[name], tensor), name
    path = tmp_path / "out" / "model_trained.onnx"
    export_checkpoint(tmp_path / "model.onnx", tmp_path / "checkpoints", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()
    assert_exported_what_it_evaluated(pair, expected, path)
    if {"magnitude", "2:4"} & set(pair):
        stored = [numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer]
        shares = [float((array == 0).mean()) for array in stored if array.ndim == 2 and array.dtype.kind in "fi"]
        assert sum(share >= 0.5 for share in shares) == (3 if "frozen int8" in pair else 4)


def assert_exported_what_it_evaluated(pair: tuple[str, str], result: Result, path: Path) -> None:
    first = 8 * 2 * UPDATES
    test = {name: array[first:] for name, array in CASE.data(first + 6).items()}
    (scores,) = onnxruntime.InferenceSession(path).run(None, {"x": test["x"]})
    cross_entropy = torch.nn.functional.cross_entropy(torch.from_numpy(scores), torch.from_numpy(test["labels"]))
    metrics = result.metrics[-1]
    is_exact = not {*LOW_PRECISION, "frozen int8"} & set(pair)
    assert metrics.get("label_loss", metrics["loss"]) == pytest.approx(
        float(cross_entropy), rel=1e-5 if is_exact else 3e-2
    )


SPREAD = [
    pytest.param(pair, layout, marks=() if QUICK.get(pair) == layout else pytest.mark.slow,
                 id=f"{' and '.join(pair)}, {layout}")
    for pair in TRAINED for layout in LAYOUTS
]  # fmt: skip


@pytest.mark.parametrize(("pair", "layout"), SPREAD)
def test_a_pair_trains_like_one_process(pair: tuple[str, str], layout: str, teacher: Path, tmp_path: Path) -> None:
    """Its state, its evaluation, and what an evaluation of the exported file gives."""
    expected, actual = one_process(pair, teacher), spread(pair, teacher, LAYOUTS[layout], tmp_path)
    bound = max(LOW_PRECISION.get(name, 1e-5) for name in pair)
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        if name.startswith(("weights/", "states/", "average/")):
            assert float((actual.tensors[name] - tensor).norm()) < bound * max(float(tensor.norm()), 1e-3), name
    assert_exported_what_it_evaluated(pair, actual, tmp_path / "out" / "model_trained.onnx")
    assert actual.losses == pytest.approx(expected.losses, rel=bound)
    found, wanted = ({name: one for name, one in result.metrics[-1].items() if "accuracy" not in name}
                     for result in (actual, expected))  # fmt: skip
    assert found == pytest.approx(wanted, rel=bound, abs=bound)
