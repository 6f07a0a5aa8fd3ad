from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.utils.flop_counter import FlopCounterMode

from onward.data.batches import Batch
from onward.data.in_memory import InMemoryDataLoader
from onward.engine import utilization
from onward.engine.building.preparation import read_training_graph
from onward.engine.matmul_rate import matmul_rate
from onward.engine.utilization import Utilization, operations_of_sample
from onward.operating_system import peak_memory_bytes
from tests.mlp import CLASSES, FEATURES, HIDDEN, data, parameters, save_mlp, start

RATE = 1e9


@pytest.fixture
def fixed_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "MEASURED_FROM_SECONDS", 0.0)
    monkeypatch.setattr(utilization, "matmul_rate", lambda *_: RATE)


def batches(samples: int = 32) -> InMemoryDataLoader:
    return InMemoryDataLoader(data(samples))


def shapes(samples: int) -> dict[str, tuple[int, ...]]:
    return {"x": (samples, FEATURES), "label": (samples,)}


def torchs_count(samples: int) -> int:
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES))
    with FlopCounterMode(display=False) as counter:
        net(torch.ones(samples, FEATURES)).sum().backward()
    return counter.get_total_flops()


def test_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    graph = read_training_graph(parameters(tmp_path))
    for samples in (1, 4, 9):
        assert operations_of_sample(graph, shapes(samples)) == torchs_count(samples) / samples
    assert operations_of_sample(graph, {"x": (4, FEATURES)}) is None, "the label is missing"
    assert operations_of_sample(graph, {"x": (4, FEATURES + 1), "label": (4,)}) is None


@pytest.mark.parametrize("kind", ["if", "sizes that depend on values", "another domain"])
def test_what_cannot_be_counted_has_no_mfu(tmp_path: Path, kind: str) -> None:
    model = onnx.load(save_mlp(tmp_path))
    graph = model.graph
    if kind == "if":
        bodies = [
            helper.make_graph(
                [helper.make_node("Identity", ["active"], [f"{name}_out"])], name, [],
                [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)],
            )
            for name in ("then_branch", "else_branch")
        ]  # fmt: skip
        graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
        graph.node.insert(2, helper.make_node("If", ["flag"], ["chosen"], then_branch=bodies[0], else_branch=bodies[1]))
        graph.node.insert(2, helper.make_node("Greater", ["total", "zero"], ["flag"]))
        graph.node.insert(2, helper.make_node("ReduceSum", ["active"], ["total"], keepdims=0))
        graph.initializer.append(helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]))
        graph.node[-1].input[0] = "chosen"
    elif kind == "another domain":
        graph.node[1].op_type, graph.node[1].domain = "Gelu", "com.microsoft"
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    else:
        graph.node.insert(2, helper.make_node("NonZero", ["x"], ["places"]))
        graph.initializer.append(helper.make_tensor("first", TensorProto.INT64, [1], [0]))
        graph.node.insert(3, helper.make_node("Gather", ["places", "first"], ["rows"], axis=0))
        graph.initializer.append(helper.make_tensor("flat", TensorProto.INT64, [1], [-1]))
        graph.node.insert(4, helper.make_node("Reshape", ["rows", "flat"], ["row_list"]))
        graph.node.insert(5, helper.make_node("Gather", ["active", "row_list"], ["picked"], axis=0))
        graph.node[-1].input[0] = "picked"
    onnx.save(model, tmp_path / "mlp.onnx")
    loss = {"type": "mean_squared_error", "prediction": "logits", "label": "target"} if kind.startswith("s") else None
    changes = {} if loss is None else {"loss": loss}
    read = read_training_graph(parameters(tmp_path, **changes))
    given = {"x": (4, FEATURES), "label": (4,)} if loss is None else {"x": (4, FEATURES), "target": (4, CLASSES)}
    assert operations_of_sample(read, given) is None


def test_reports_summary_and_files_hold_mfu_and_peak_memory(tmp_path: Path, fixed_rate: None) -> None:
    runner, recorder = start(tmp_path, tensorboard={"log_dir": tmp_path / "tb"})
    summary = runner.run(batches())
    runner.end_training()
    for report in recorder.steps:
        assert report.mfu == pytest.approx(torchs_count(1) * report.samples_per_second / RATE, rel=1e-12)
        assert report.peak_memory_bytes is not None
        assert 2**25 < report.peak_memory_bytes <= peak_memory_bytes()
    assert summary.mfu == pytest.approx(torchs_count(1) * summary.stable_samples_per_second / RATE, rel=1e-12)
    assert summary.peak_memory_bytes == pytest.approx(peak_memory_bytes(), rel=0.05)
    records = [json.loads(line) for line in (tmp_path / "tb" / "metrics.jsonl").read_text().splitlines()]
    assert [r["mfu"] for r in records if r["kind"] == "step"] == [r.mfu for r in recorder.steps]
    assert next(r["mfu"] for r in records if r["kind"] == "end") == summary.mfu
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    assert [p.value for p in board.Scalars("train/mfu")] == pytest.approx([r.mfu for r in recorder.steps], rel=1e-6)
    assert len(board.Scalars("train/peak_memory_bytes")) == len(recorder.steps)


def test_nothing_is_measured_in_the_first_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise AssertionError("measured too early")

    monkeypatch.setattr(utilization, "matmul_rate", refuse)
    runner, recorder = start(tmp_path)
    summary = runner.run(batches())
    assert summary.mfu is None
    assert {report.mfu for report in recorder.steps} == {None}


def test_more_than_all_is_measured_again_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "MEASURED_FROM_SECONDS", 0.0)
    rates = iter([1e3, 2e3])
    monkeypatch.setattr(utilization, "matmul_rate", lambda *_: next(rates))
    save_mlp(tmp_path)
    said: list[str] = []
    used = Utilization(read_training_graph(parameters(tmp_path)), torch.device("cpu"), torch.float32, 1, said.append)
    (batch,) = (dataclasses.replace(one) for one in [next(batches().batches(4))])
    used.see(batch)
    operations = torchs_count(1)
    assert used.mfu(100.0, 1.0) == operations * 100 / 2e3
    assert used.mfu(100.0, 1.0) == operations * 100 / 2e3
    (text,) = said
    assert f"MFU is {operations * 100 / 2e3:.0%}, above 100%" in text
    assert "compare throughput" in text


def test_samples_of_other_shapes_have_no_mfu(tmp_path: Path, fixed_rate: None) -> None:
    save_mlp(tmp_path)
    used = Utilization(read_training_graph(parameters(tmp_path)), torch.device("cpu"), torch.float32, 2, print)
    first = next(batches().batches(4))

    def batch(samples: int, features: int) -> Batch:
        arrays = {"x": np.zeros((samples, features), np.float32), "label": np.zeros(samples, np.int64)}
        return dataclasses.replace(first, features=arrays)

    used.see(batch(4, FEATURES))
    used.see(batch(2, FEATURES))
    assert used.mfu(100.0, 1.0) == torchs_count(1) * 100 / 2 / RATE, "of two processes"
    used.see(batch(4, FEATURES + 1))
    assert used.mfu(100.0, 1.0) is None
    assert used.known_mfu(100.0) is None


def test_measuring_leaves_the_random_numbers_of_a_run_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    matmul_rate(torch.device("cpu"), torch.float32, 0.01)
    assert torch.equal(torch.rand(3), expected)
