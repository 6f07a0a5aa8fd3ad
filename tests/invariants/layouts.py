"""One run in many layouts: data cut for every replica, and what each layout ends with, for the laws of equality."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.environment import Environment
from onward.parallel.gathering import gather_full
from onward.parallel.pipeline.pipeline import knows_gradients
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.invariants.cases import Case
from tests.invariants.rank_pool import call_on_ranks
from tests.watching import Recorder

knowing_gradients = pytest.mark.skipif(
    not knows_gradients(torch.__version__),
    reason="this torch sends only values with a gradient from stage to stage, and refuses zero-bubble schedules",
)


@dataclass(frozen=True)
class Layout:
    """How a run is spread: sizes of the mesh, and fields of section `distributed` next to them."""

    data: int = 1
    horizontal: int = 1
    pipeline: int = 1
    distributed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.data * self.horizontal * self.pipeline * self.distributed.get("context_parallel_size", 1)

    def sections(self) -> dict[str, Any]:
        sizes = {
            "data_parallel_size": self.data,
            "horizontal_parallel_size": self.horizontal,
            "pipeline_parallel_size": self.pipeline,
        }
        return {"distributed": {**sizes, **self.distributed}}

    def __str__(self) -> str:
        more = "".join(f" {value if value is not True else name}" for name, value in self.distributed.items())
        return f"{self.data}x{self.horizontal}x{self.pipeline}{more}"


@dataclass(frozen=True)
class Result:
    """What a run ends with.

    Attributes:
        losses, norms: of its reports, one an update.
        tensors: of its state, whole, by flat name; on rank 0.
        own: of its state, as this rank holds them.
        skipped: updates left out.
        metrics: of every evaluation.
        messages: what watchers were told.
        loss_scale: at the end.
        watched: tensors that the reports hold.
    """

    losses: list[float]
    norms: list[float]
    tensors: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    skipped: int
    metrics: list[dict[str, float]]
    messages: list[str]
    loss_scale: float | None
    watched: list[dict[str, torch.Tensor]]


def train(case: Case, layout: Layout, **options: Any) -> Result:
    """What rank 0 ends with; see `train_on_ranks`."""
    return train_on_ranks(case, layout, **options)[0]


def train_on_ranks(
    case: Case,
    layout: Layout,
    *,
    global_batch: int = 8,
    updates: int = 6,
    updates_of_data: int | None = None,
    accumulation: int = 1,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    test_samples: int = 0,
    last_batch: str = "wrap",
    samples: int | None = None,
    folder: str | None = None,
    here: Callable[..., Result] | None = None,
) -> list[Result]:
    """Trains a case in a layout, and gives what every rank ends with.

    Args:
        case, layout: what, and how it is spread.
        global_batch: samples of a micro-batch of all replicas together.
        updates: of the weights.
        updates_of_data: how many updates' data there are, if not just enough.
        accumulation: micro-batches of an update.
        sections: fields of RUN.yaml by section.
        test_samples: evaluate at the end on so many, with batches of 3.
        last_batch: what becomes of the rest of an epoch.
        samples: in the data, sharded among the replicas by runs of samples; else just enough for every update.
        folder: where the model and the checkpoints lie; else one that is removed at the end.
        here: the part of one rank, if not `train_here`.
    """
    here = here or train_here
    count = global_batch * accumulation * (updates_of_data or updates) if samples is None else samples
    data = case.data(count)
    parts = [
        rows_of_replica(data, replica, layout.data, global_batch)
        if samples is None
        else {name: np.array_split(array, layout.data)[replica] for name, array in data.items()}
        for replica in range(layout.data)
    ]
    test = {} if not test_samples else case.data(count + test_samples)
    test = {name: array[count:] for name, array in test.items()}
    with tempfile.TemporaryDirectory() as own:
        where = Path(folder or own)
        where.mkdir(exist_ok=True)
        if not (where / "model.onnx").exists():
            ir.save(case.model(), where / "model.onnx")
        merged = merged_sections(case, layout, where, global_batch, updates, accumulation, sections or {})
        if layout.world_size == 1:
            return [here(merged, parts, test, last_batch)]
        results: list[Result] = call_on_ranks(layout.world_size, here, merged, parts, test, last_batch)
    for other in results[1:]:
        assert np.array_equal(other.losses, results[0].losses, equal_nan=True), "every rank knows the same losses"
        if "sync_every_updates" not in layout.distributed:  # every worker has gradients of its own
            assert np.array_equal(other.norms, results[0].norms, equal_nan=True)
        assert other.metrics == results[0].metrics
        assert (other.skipped, other.loss_scale) == (results[0].skipped, results[0].loss_scale)
    return results


def merged_sections(
    case: Case,
    layout: Layout,
    folder: Path,
    global_batch: int,
    updates: int,
    accumulation: int,
    sections: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """RUN.yaml of a run."""
    merged: dict[str, dict[str, Any]] = {
        "paths": {"model_path": str(folder / "model.onnx")},
        "loss": dict(case.loss),
        "training": {
            "batch_size": global_batch // layout.data,
            "eval_batch_size": 3,
            "num_train_steps": updates * accumulation,
            "gradient_accumulation_steps": accumulation,
            "display_loss_steps": 1,
            **case.training,
        },
        "learning_rate": {"initial_lr": 3e-3},
        "optimizer": {"training_optimizer_name": "AdamW", "optimizer_attributes": [{"lambda": 0.1, "epsilon": 1e-4}]},
        **layout.sections(),
    }
    for name, fields in sections.items():
        merged[name] = {**merged.get(name, {}), **fields}
    return merged


def train_here(
    sections: Mapping[str, Any],
    parts: list[dict[str, np.ndarray]],
    test: Mapping[str, np.ndarray],
    last_batch: Any,
) -> Result:
    """The part of one rank; `parts` are the replicas' data."""
    recorder, parameters = Recorder(), Parameters.from_mapping(sections)
    runner = TrainingRunner(parameters, Environment(execution_provider="CPU", threads=1), [recorder], progress=False)
    runner.initialize(InMemoryDataLoader(parts[0]).feature_specs())
    reader, readers = runner.mesh.reader, runner.mesh.topology.reader_count
    tests = None
    if test:
        is_shared_out = parameters.data.test_data == "partitioned"
        mine = {name: array[reader::readers] for name, array in test.items()}
        tests = InMemoryDataLoader(mine if is_shared_out else test)
    if runner.round == 0:
        runner.run(InMemoryDataLoader(parts[reader], last_batch=last_batch), tests)
    runner.end_training(tests)
    tensors = {
        name: sharded for name, sharded in runner.state.sharded_tensors().items() if not name.startswith("random/")
    }
    scale = runner.state.loss_scale
    return Result(
        losses=[report.loss for report in recorder.steps],
        norms=[report.gradient_norm for report in recorder.steps],
        tensors=gather_full(runner.mesh, tensors),
        own={name: sharded.tensor.detach().clone() for name, sharded in tensors.items()},
        skipped=runner.state.counters.skipped_updates,
        metrics=[dict(report.metrics) for report in recorder.evaluations],
        messages=recorder.messages,
        loss_scale=None if scale is None else scale.scale,
        watched=[dict(report.tensors) for report in recorder.steps],
    )


def rows_of_replica(data: Mapping[str, np.ndarray], replica: int, replicas: int, batch: int) -> dict[str, np.ndarray]:
    """Of every `batch` rows those of one replica, so that the replicas' batches together are the full one."""
    size = batch // replicas
    return {
        name: array.reshape(-1, replicas, size, *array.shape[1:])[:, replica].reshape(-1, *array.shape[1:])
        for name, array in data.items()
    }


def differences(actual: Result, expected: Result) -> tuple[float, float]:
    """The largest relative difference of a loss, and the largest of a weight relative to its largest element."""
    assert len(actual.losses) == len(expected.losses) > 0
    loss = max(abs(a - e) / abs(e) for a, e in zip(actual.losses, expected.losses, strict=True))
    return loss, tensor_difference(actual, expected, ("weights/", "states/"))


def tensor_difference(actual: Result, expected: Result, kinds: tuple[str, ...]) -> float:
    """The largest difference of a tensor of these kinds, relative to its largest element."""
    assert actual.tensors.keys() == expected.tensors.keys()
    worst = 0.0
    for name, tensor in expected.tensors.items():
        if name.startswith(kinds):
            scale = max(float(tensor.abs().max()), 1e-3)
            worst = max(worst, float((actual.tensors[name] - tensor).abs().max()) / scale)
    return worst


def assert_follows(actual: Result, expected: Result, of_losses: float, of_weights: float) -> None:
    """Losses and weights within bounds, and a run in which something happens."""
    loss, weight = differences(actual, expected)
    assert loss < of_losses, f"losses differ by {loss:.2e} relative"
    assert weight < of_weights, f"weights differ by {weight:.2e} of their largest element"
    assert_moves(expected)


def assert_moves(result: Result) -> None:
    """Losses that stand still would prove nothing."""
    spread = max(result.losses) - min(result.losses)
    assert len(set(result.losses)) == len(result.losses)
    assert spread > 1e-3 * max(result.losses), result.losses
    assert all(norm > 0 for norm in result.norms)
