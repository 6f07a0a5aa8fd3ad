"""Profiles of entire runs, with gradient accumulation and in pipelines, against the clock of the run itself."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.loop import Clock
from onward.lowering.program import Program
from onward.parallel.pipeline.pipeline import knows_gradients
from onward.parameters import Parameters
from onward.plan.pipeline.schedules import SPLITS_BACKWARD
from onward.report.profiler import NodeProfiler
from onward.runner import TrainingRunner
from tests.invariants.rank_pool import call_on_ranks
from tests.mlp import ON_ONE_THREAD
from tests.watching import Recorder

WIDTH, BATCH, MICRO_BATCHES, UPDATES = 64, 64, 4, 4
STEPS = MICRO_BATCHES * UPDATES
LAYERS = tuple(f"layer{index}" for index in range(4))
CUTS = {2: "relu1", 4: "relu0,relu1,relu2"}
SCHEDULES = {"1F1B": 2, "GPipe": 2, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4, "ZBVZeroBubble": 4}
ALL, WITHIN, ACROSS, BEYOND = (1, STEPS), (6, 7), (8, 9), (STEPS - 1, 10 * STEPS)
"""Ranges asked for: every step, steps of one update, steps of two updates, and more than the round has."""

WIDENED = {ALL: (1, STEPS), WITHIN: (5, 8), ACROSS: (5, 12), BEYOND: (STEPS - MICRO_BATCHES + 1, STEPS)}
"""The ranges of entire updates."""


@dataclass(frozen=True)
class Profiled:
    """What a run reports of its profile, and what its clocks measured.

    Attributes:
        line: the first of the printed table.
        rows: of the CSV file.
        steps: the first and the last that the table is of.
        seconds: of every step of the round, as the run counts them.
        twin_seconds: of these, what making the twins of programs took.
    """

    line: str
    rows: list[dict[str, str]]
    steps: tuple[int, int]
    seconds: list[float]
    twin_seconds: float

    def printed(self, unit: str) -> float:
        """Milliseconds of the first line."""
        found = re.search(rf"([\d.]+) ms {unit}", self.line)
        assert found, self.line
        return float(found[1])


def write_model(folder: Path) -> None:
    """Four layers of `Gemm` and `Relu`."""
    generator, nodes, weights, last = np.random.default_rng(3), [], [], "x"
    for index, name in enumerate(LAYERS):
        values = (generator.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [f"h{index}"], name=name))
        nodes.append(helper.make_node("Relu", [f"h{index}"], [f"relu{index}"], name=f"relu{index}"))
        last = f"relu{index}"
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["batch", WIDTH])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")


def profile_here(folder: str, first: int, last: int, distributed: Mapping[str, Any], accumulation: int) -> Profiled:
    """Trains on this rank; the profile that it writes."""
    generator = np.random.default_rng(5)
    features = {name: generator.standard_normal((BATCH * STEPS, WIDTH)).astype(np.float32) for name in ("x", "y")}
    training = {
        "batch_size": BATCH,
        "num_train_steps": STEPS,
        "gradient_accumulation_steps": accumulation,
        "display_loss_steps": UPDATES,
        "evaluation_period": accumulation,
    }
    sections = {
        "paths": {"model_path": f"{folder}/m.onnx"},
        "loss": {"type": "mean_squared_error", "prediction": f"relu{len(LAYERS) - 1}", "label": "y"},
        "training": training,
        "learning_rate": {"initial_lr": 1e-3},
        "distributed": dict(distributed),
        "profiler": {"first_step": first, "last_step": last, "trace_dir": f"{folder}/profile"},
    }
    seconds: list[float] = []
    twins: list[float] = []
    make_twin = NodeProfiler._make_twin

    def clocked_twin(profiler: NodeProfiler, program: Program) -> Program:
        started = time.perf_counter()
        twin = make_twin(profiler, program)
        twins.append(time.perf_counter() - started)
        return twin

    class Counting(Clock):
        def add(self, passed: float, waited_seconds: float, samples: int) -> None:
            seconds.append(passed)
            super().add(passed, waited_seconds, samples)

    recorder, loader = Recorder(), InMemoryDataLoader(features)
    runner = TrainingRunner(Parameters.from_mapping(sections), ON_ONE_THREAD, [recorder], progress=False)
    runner.initialize(loader.feature_specs())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onward.training_round.Clock", Counting)
        patch.setattr(NodeProfiler, "_make_twin", clocked_twin)
        runner.run(loader, InMemoryDataLoader({name: array[:BATCH] for name, array in features.items()}))
    rank = f"-rank{runner.mesh.rank}" if runner.mesh.rank else ""
    (text,) = [message for message in recorder.messages if message.startswith("profile of")]
    begin, end = (int(number) for number in re.findall(r"profile of steps (\d+) to (\d+)", text)[0])
    table = Path(folder) / "profile" / f"steps-{begin}-{end}{rank}.nodes.csv"
    with open(table, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return Profiled(text.splitlines()[0], rows, (begin, end), seconds, sum(twins))


def assert_possible(found: Profiled, accumulation: int) -> None:
    """What a profile says of a step agrees with the clock of the run and with itself.

    The time a step is within 20% of the run's own, making the profiler's twins of the programs subtracted; 2 ms are
    allowed for what the run's clock leaves out (between two steps), and for the processor being taken away there.
    """
    begin, end = found.steps
    steps = end - begin + 1
    clocked = 1e3 * (sum(found.seconds[begin - 1 : end]) - found.twin_seconds) / steps
    # Wide, since a busy machine stops a process in one of the two clocks and not in the other; the median over steps
    # that only store a micro-batch, which was shown once, was off by a factor of 180.
    assert clocked / 2 - 2 <= found.printed("a step") <= 3 * clocked + 20, found.line
    if accumulation > 1:
        of_update = found.printed(f"an update of {accumulation} steps")
        assert of_update == pytest.approx(accumulation * found.printed("a step"), abs=0.01)
    assert found.printed("forward") + found.printed("backward") <= found.printed("a step") + 0.01, found.line
    assert sum(float(row["share"]) for row in found.rows) == pytest.approx(1.0, abs=1e-4)
    assert all(float(row["share"]) >= 0 for row in found.rows)
    calls = {
        row["name"]: int(row["calls"]) for row in found.rows if not row["name"].startswith("(") and row["operator"]
    }
    assert calls
    assert set(calls.values()) == {steps}, calls


@pytest.mark.parametrize(
    ("accumulation", "asked", "profiled"),
    [(1, WITHIN, WITHIN), (1, ALL, ALL), *((MICRO_BATCHES, asked, widened) for asked, widened in WIDENED.items())],
)
def test_a_profile_with_gradient_accumulation(
    tmp_path: Path, accumulation: int, asked: tuple[int, int], profiled: tuple[int, int]
) -> None:
    """In one process: the range is widened to entire updates, evaluation in between is not counted."""
    write_model(tmp_path)
    found = profile_here(str(tmp_path), *asked, {}, accumulation)
    assert found.steps == profiled
    assert_possible(found, accumulation)
    assert set(LAYERS) <= {row["name"] for row in found.rows}


@pytest.mark.parametrize(
    ("schedule", "asked"), [("1F1B", ALL), ("1F1B", BEYOND), *((schedule, ACROSS) for schedule in SCHEDULES)]
)
def test_a_profile_of_a_pipeline(tmp_path: Path, schedule: Any, asked: tuple[int, int]) -> None:
    """On both ranks; steps that only keep a micro-batch for the update's last step count as any other."""
    if schedule in SPLITS_BACKWARD and not knows_gradients(torch.__version__):
        pytest.skip("this torch refuses zero-bubble schedules")
    write_model(tmp_path)
    distributed = {
        "pipeline_parallel_size": 2,
        "pipeline_schedule": schedule,
        "pipeline_partition_cut_list": CUTS[SCHEDULES[schedule]],
    }
    profiles = call_on_ranks(2, profile_here, str(tmp_path), *asked, distributed, MICRO_BATCHES)
    for found in profiles:
        assert found.steps == WIDENED[asked]
        assert_possible(found, MICRO_BATCHES)
    names = [{row["name"] for row in found.rows} & set(LAYERS) for found in profiles]
    assert names[0] | names[1] == set(LAYERS)
    assert not names[0] & names[1]
