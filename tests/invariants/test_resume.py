"""A run saved in any layout continues in any other as if it had never stopped, and leaves the same ONNX model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.cli import main
from tests.initializers import stored_arrays
from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, assert_moves, tensor_difference, train
from tests.invariants.rank_pool import end_ranks

OF_ALL = 5e-6
LAYOUTS = {
    "one process": Layout(),
    "replicas": Layout(2, 1, 1),
    "ZeRO 3": Layout(2, 1, 1, {"zero_stage": 3}),
    "horizontal": Layout(1, 2, 1),
    "pipeline": Layout(1, 1, 2),
    "replicas of a horizontal pair, ZeRO 2": Layout(2, 2, 1, {"zero_stage": 2}),
    "replicas of a pipeline, ZeRO 1": Layout(2, 1, 2, {"zero_stage": 1}),
    "all": Layout(2, 2, 2, {"zero_stage": 3}),
    "context, ZeRO 3": Layout(2, 1, 1, {"context_parallel_size": 2, "zero_stage": 3}),
    "ZeRO 2 in groups": Layout(4, 1, 1, {"zero_stage": 2, "zero_group_size": 2}),
}
EXPERTS = Layout(2, 1, 1, {"expert_parallel_size": 2})
SLOW = list(LAYOUTS)[5:]
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS]
TWO_RANKS = list(LAYOUTS)[1:5]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def run(layout: str, folder: Path, updates: int, model: str = "gpt2", **sections: Any) -> Result:
    """A run of which checkpoints and trained model stay in a folder; its data are for six updates."""
    where = {
        "checkpoint": {"checkpoints_dir": str(folder / "checkpoints"), "max_num_checkpoints": 1},
        "paths": {"output_dir": str(folder / "out"), "model_path": str(folder / "model.onnx")},
        "optimizer": {"max_norm_clip": 0.5},
        **sections,
    }
    return train(
        CASES[model], {**LAYOUTS, "experts": EXPERTS}[layout], updates=updates, updates_of_data=6, accumulation=2,
        sections=where, folder=str(folder),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Never interrupted, in one process."""
    result = run("one process", tmp_path_factory.mktemp("whole"), 6)
    assert_moves(result)
    return result


def saved(layout: str, folder: Path) -> Path:
    run(layout, folder, 3)
    return folder


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs of three updates by layout, made when they are needed."""
    root = tmp_path_factory.mktemp("halves")
    made: dict[str, Path] = {}

    class Halves(dict[str, Path]):
        def __missing__(self, layout: str) -> Path:
            made[layout] = self[layout] = saved(layout, root / layout.replace(" ", "-"))
            return made[layout]

    return Halves()


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def assert_goes_on(layout: str, before: Path, whole: Result, folder: Path) -> None:
    result = run(layout, copy_of(before, folder), 6)
    assert len(result.losses) == 3
    assert result.losses == pytest.approx(whole.losses[3:], rel=1e-6)
    assert tensor_difference(result, whole, ("weights/", "slots/")) < OF_ALL
    assert any(name.startswith("slots/") for name in whole.tensors)


@pytest.mark.parametrize("layout", NAMES)
def test_from_one_process_to_any(layout: str, halves: dict[str, Path], whole: Result, tmp_path: Path) -> None:
    assert_goes_on(layout, halves["one process"], whole, tmp_path / "resumed")


@pytest.mark.parametrize("layout", NAMES)
def test_from_any_to_one_process(layout: str, halves: dict[str, Path], whole: Result, tmp_path: Path) -> None:
    assert_goes_on("one process", halves[layout], whole, tmp_path / "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("before", TWO_RANKS)
@pytest.mark.parametrize("after", TWO_RANKS)
def test_from_any_of_two_ranks_to_any(
    before: str, after: str, halves: dict[str, Path], whole: Result, tmp_path: Path
) -> None:
    assert_goes_on(after, halves[before], whole, tmp_path / "resumed")


@pytest.mark.parametrize("layout", NAMES)
def test_on_the_same_layout_bit_by_bit_with_dropout_and_a_loss_scale(layout: str, tmp_path: Path) -> None:
    fp16 = {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 0}}
    expected = run(layout, tmp_path / "whole", 6, "gpt2_with_dropout", **fp16)
    run(layout, tmp_path / "part", 3, "gpt2_with_dropout", **fp16)
    actual = run(layout, tmp_path / "part", 6, "gpt2_with_dropout", **fp16)
    assert actual.losses == expected.losses[3:]
    assert actual.norms == expected.norms[3:]
    assert actual.loss_scale == expected.loss_scale
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor), name


@pytest.mark.parametrize("layout", NAMES)
def test_trained_model_and_offline_export_hold_what_the_ranks_hold(
    layout: str, halves: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy_of(halves[layout], tmp_path / "run")
    held = run(layout, folder, 3)  # nothing is left to train: it loads, and writes the model again
    assert held.losses == []
    target = tmp_path / "offline.onnx"
    command = ["export", str(folder / "model.onnx"), "--checkpoint", str(folder / "checkpoints"), "-o", str(target)]
    assert main(command) == 0
    written, offline = stored_arrays(folder / "out" / "model_trained.onnx"), stored_arrays(target)
    untrained = stored_arrays(folder / "model.onnx")
    assert written.keys() == offline.keys() == untrained.keys()
    weights = {name.removeprefix("weights/"): t for name, t in held.tensors.items() if name.startswith("weights/")}
    assert weights.keys() <= written.keys()
    for name, array in written.items():
        assert array.tobytes() == offline[name].tobytes(), name
        expected = weights[name].numpy() if name in weights else untrained[name]
        assert array.tobytes() == expected.tobytes(), name
    assert sum(written[name].tobytes() != untrained[name].tobytes() for name in weights) == len(weights)


def test_a_run_that_starts_over_would_be_noticed(whole: Result, tmp_path: Path) -> None:
    again = run("one process", tmp_path / "again", 3)
    assert tensor_difference(again, whole, ("weights/",)) > 100 * OF_ALL
    assert tensor_difference(again, whole, ("slots/",)) > 100 * OF_ALL


def test_experts_that_replicas_share(tmp_path: Path) -> None:
    """Half of the experts on each of two ranks: the checkpoint, the trained model and both ways from and to one."""
    whole = run("one process", tmp_path / "whole", 6, "mixtures")
    for before, after in (("experts", "one process"), ("one process", "experts")):
        folder = tmp_path / before
        half = run(before, folder, 3, "mixtures")
        written = stored_arrays(folder / "out" / "model_trained.onnx")
        for name, tensor in half.tensors.items():
            if name.startswith("weights/"):
                assert written[name.removeprefix("weights/")].tobytes() == tensor.numpy().tobytes(), name
        result = run(after, folder, 6, "mixtures")
        assert result.losses == pytest.approx(whole.losses[3:], rel=1e-6)
        assert tensor_difference(result, whole, ("weights/", "slots/")) < OF_ALL
