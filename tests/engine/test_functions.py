"""Own losses and metrics: equal to the built-in ones, exact on resume, refused where they cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.callbacks import Callback
from onward.errors import ParametersError
from onward.parallel.launch.process import start as start_mesh
from onward.parameters.distributed import Distributed
from onward.runner import TrainingRunner
from tests.mlp import (
    ON_ONE_THREAD,
    assert_same_bits,
    build_mlp,
    data,
    parameters,
    save_mlp,
    start,
    state_bits,
    weights_of,
)
from tests.ranks import run_on_ranks

Tensors = Mapping[str, torch.Tensor]
TRAIN = data(32)
TEST = data(11, seed=1)


def loader(features: Mapping[str, np.ndarray] = TRAIN, **options: Any) -> InMemoryDataLoader:
    return InMemoryDataLoader(features, **options)


def cross_entropy(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"], batch["label"])


def summed(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"], batch["label"], reduction="sum")


def own(function: Any = cross_entropy, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": function, **fields}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"training": {"gradient_accumulation_steps": 2}},
    "clipped": {"optimizer": {"max_norm_clip": 0.5, "training_optimizer_name": "Adam"}},
    "bf16": {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}},
    "fp16": {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 1024.0}},
    "recomputed": {"recompute": {"segments": True}},
    "short batches": {"training": {"batch_size": 5}, "data": {"last_batch": "short"}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_own_loss_trains_as_the_built_in_one(tmp_path: Path, setting: str) -> None:
    built_in, expected = start(tmp_path, **SETTINGS[setting])
    mine, found = start(tmp_path, loss=own(), **SETTINGS[setting])
    summaries = [runner.run(loader(), loader(TEST)) for runner in (built_in, mine)]
    # Logits are rounded to bf16 where the function gets them; the graph's loss reads them before that.
    bound = 1e-6 if setting not in ("bf16", "fp16") else 2e-2
    assert found.losses == pytest.approx(expected.losses, abs=bound, rel=bound)
    for name, weight in weights_of(mine).items():
        torch.testing.assert_close(weight, weights_of(built_in)[name], rtol=bound, atol=bound)
    assert summaries[0].steps == summaries[1].steps == 8
    reports = [runner.evaluate(loader(TEST)).metrics["loss"] for runner in (built_in, mine)]
    assert reports[1] == pytest.approx(reports[0], abs=bound)


def test_a_loss_that_is_a_sum(tmp_path: Path) -> None:
    given = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label", "reduction": "sum"}
    built_in, expected = start(tmp_path, loss=given)
    mine, found = start(tmp_path, loss=own(summed, reduction="sum"))
    for runner in (built_in, mine):
        runner.run(loader())
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    reports = [runner.evaluate(loader(TEST)).metrics["loss"] for runner in (built_in, mine)]
    assert reports[1] == pytest.approx(reports[0], rel=1e-6)


def test_what_the_function_gets(tmp_path: Path) -> None:
    """The model's outputs, not more, in fp32; every feature of the data, also those that nobody else reads."""
    seen = []

    def loss(outputs: Tensors, batch: Tensors) -> torch.Tensor:
        seen.append(
            ({n: (t.dtype, t.requires_grad) for n, t in outputs.items()}, {n: t.dtype for n, t in batch.items()})
        )
        weights = batch["weight"].float()
        each = functional.cross_entropy(outputs["logits"], batch["label"], reduction="none")
        return (each * weights).sum() / weights.sum()

    features = {**TRAIN, "weight": np.linspace(0.1, 1.0, 32)}
    runner, recorder = start(tmp_path, loss=own(loss), mixed_precision=SETTINGS["bf16"]["mixed_precision"])
    runner.run(loader(features))
    assert seen[0] == (
        {"logits": (torch.float32, True)},
        {"x": torch.float32, "label": torch.int64, "target": torch.float32, "weight": torch.float64},
    )
    assert len(recorder.losses) == len(seen) == 8


class Power(Exception):
    pass


class CutAt(Callback):
    def __init__(self, update: int) -> None:
        self.update = update

    def on_update(self, report: Any) -> None:
        if report.update == self.update:
            raise Power


def noisy(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    """Draws random numbers, which a resumed run must draw alike."""
    return functional.cross_entropy(outputs["logits"] + 0.1 * torch.randn(4), batch["label"])


def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"loss": own(noisy), "optimizer": {"training_optimizer_name": "Adam"}}
    runners = []
    for name in ("whole", "cut"):
        checkpoint = {"checkpoints_dir": tmp_path / name, "checkpoint_period": 2}
        runner, _ = start(tmp_path, *([CutAt(5)] if name == "cut" else []), checkpoint=checkpoint, **changes)
        if name == "cut":
            with pytest.raises(Power):
                runner.run(loader())
            runner.wait_for_checkpoint()
            runner, _ = start(tmp_path, checkpoint=checkpoint, **changes)
            assert runner.resumed_update == 5  # what was trained before the failure is saved
        runner.run(loader())
        runners.append(state_bits(runner))
    assert_same_bits(runners[1], runners[0])


# ---------------------------------------------------------------------------------------------------------- metrics


def accuracy(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    return (outputs["logits"].argmax(1) == batch["label"]).float().mean()


def recall_of_zero(outputs: Tensors, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over other things than samples: a pair of sums."""
    zero = batch["label"] == 0
    return ((outputs["logits"].argmax(1) == 0) & zero).sum(), zero.sum()


METRICS = {"share": accuracy, "recall": recall_of_zero, "number": lambda outputs, batch: 3}


@pytest.mark.parametrize("loss", ["built in", "own"])
@pytest.mark.parametrize("size", [1, 4, 11])
def test_metrics_are_of_the_entire_test_set(tmp_path: Path, loss: str, size: int) -> None:
    """The same whatever the batches, the last of which is smaller; those of all predictions at once."""
    save_mlp(tmp_path)
    changes = {"loss": own()} if loss == "own" else {}
    asked = parameters(tmp_path, training={"eval_batch_size": size}, **changes)
    runner = TrainingRunner(asked, ON_ONE_THREAD, progress=False, metrics=METRICS)
    runner.initialize()
    metrics = runner.evaluate(loader(TEST)).metrics
    expected = np.maximum(TEST["x"] @ weights_of(runner)["w1"].numpy() + weights_of(runner)["b1"].numpy(), 0)
    logits = expected @ weights_of(runner)["w2"].numpy() + weights_of(runner)["b2"].numpy()
    hits = logits.argmax(1) == TEST["label"]
    assert metrics["share"] == pytest.approx(hits.mean(), abs=1e-7)
    zero = TEST["label"] == 0
    assert metrics["recall"] == pytest.approx(hits[zero].mean(), abs=1e-7)
    assert metrics["number"] == 3
    if loss == "built in":
        assert metrics["share"] == pytest.approx(metrics["accuracy"], abs=1e-7)


def on_two_ranks(folder: Path, loss: dict[str, Any] | None, zero_stage: int) -> tuple[list[float], dict[str, float]]:
    mesh = start_mesh(Distributed(data_parallel_size=2, zero_stage=zero_stage), "cpu")
    distributed = {"data_parallel_size": 2, "zero_stage": zero_stage}
    changes: dict[str, Any] = {"loss": own()} if loss is None else {"loss": loss}
    asked = parameters(
        folder, distributed=distributed, data={"last_batch": "short", "test_data": "partitioned"}, **changes
    )
    losses: list[float] = []

    class Losses(Callback):
        def on_step(self, report: Any) -> None:
            losses.append(report.loss)

    runner = TrainingRunner(asked, ON_ONE_THREAD, [Losses()], mesh, progress=False, metrics=METRICS)
    runner.initialize()
    runner.run({name: array[:27] for name, array in TRAIN.items()})
    return losses, dict(runner.evaluate(TEST).metrics)


BUILT_IN = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"}


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_data_parallel_with_batches_of_unequal_size(tmp_path: Path, zero_stage: int) -> None:
    """27 samples on two ranks in batches of 4: an own loss weighs as the built-in one does; metrics are of all."""
    save_mlp(tmp_path)
    mine = run_on_ranks(2, on_two_ranks, tmp_path, None, zero_stage)
    built_in = run_on_ranks(2, on_two_ranks, tmp_path, BUILT_IN, zero_stage)
    assert mine[0] == mine[1]
    assert mine[0][0] == pytest.approx(built_in[0][0], rel=1e-6)
    for name, value in mine[0][1].items():
        assert value == pytest.approx(built_in[0][1][name], rel=1e-6)
    assert mine[0][1]["share"] == pytest.approx(built_in[0][1]["accuracy"], abs=1e-7)


def two_outputs(folder: Path) -> None:
    """A second output behind its own weight, which a loss may leave unused."""
    model = build_mlp()
    model.graph.node.append(onnx.helper.make_node("Gemm", ["active", "w3", "b2"], ["other"], name="third"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 4), np.float32) * 0.1, "w3"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, ["batch", 4]))
    onnx.save(model, folder / "mlp.onnx")


def unused_on_two_ranks(folder: Path) -> tuple[list[str], bool]:
    mesh = start_mesh(Distributed(data_parallel_size=2), "cpu")
    asked = parameters(folder, distributed={"data_parallel_size": 2}, loss=own())
    runner = TrainingRunner(asked, ON_ONE_THREAD, (), mesh, progress=False)
    runner.initialize()
    before = weights_of(runner)
    runner.run(TRAIN)
    return list(runner.net.weights), torch.equal(weights_of(runner)["w3"], before["w3"])


def test_an_output_that_the_loss_does_not_use(tmp_path: Path) -> None:
    two_outputs(tmp_path)
    assert run_on_ranks(2, unused_on_two_ranks, tmp_path) == [(["w1", "b1", "w2", "b2", "w3"], True)] * 2


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda o, b: o["logits"],
            r"the loss function .*<lambda> returned float32 \[4, 4\]; expected one float number.*mean",
        ),
        (lambda o, b: 0.5, r"returned a float; expected one float number as a torch tensor"),
        (lambda o, b: b["label"].sum(), r"returned int64 \[\]; expected one float number"),
        (lambda o, b: o["logits"].detach().mean(), r"without a gradient; compute it from the outputs \('logits'\)"),
    ],
)
def test_what_is_no_loss(tmp_path: Path, function: Any, words: str) -> None:
    runner, _ = start(tmp_path, loss=own(function))
    with pytest.raises(ParametersError, match=words):
        runner.run(loader())


def test_an_exception_in_a_loss_names_what_it_was_given(tmp_path: Path) -> None:
    def loss(outputs: Tensors, batch: Tensors) -> torch.Tensor:
        return outputs["logit"].mean()

    runner, _ = start(tmp_path, loss=own(loss))
    with pytest.raises(KeyError) as caught:
        runner.run(loader())
    assert "Raised in the loss function" in caught.value.__notes__[0]
    assert "outputs: 'logits' float32 [4, 4]; batch: 'x' float32 [4, 6]" in caught.value.__notes__[0]


@pytest.mark.parametrize("given", [torch.ones(3), "much", (1, 2, 3), None])
def test_what_is_no_metric(tmp_path: Path, given: Any) -> None:
    save_mlp(tmp_path)
    runner = TrainingRunner(
        parameters(tmp_path), ON_ONE_THREAD, progress=False, metrics={"mine": lambda outputs, batch: given}
    )
    runner.initialize()
    with pytest.raises(ParametersError, match=r"of 'mine' returned .*; expected a number, the mean over the batch, or"):
        runner.evaluate(loader(TEST))


def test_a_metric_cannot_be_called_loss(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    runner = TrainingRunner(parameters(tmp_path), ON_ONE_THREAD, progress=False, metrics={"loss": accuracy})
    with pytest.raises(ParametersError, match="'loss' is what every evaluation has; choose another name"):
        runner.initialize()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"distributed": {"pipeline_parallel_size": 2}}, "distributed.pipeline_parallel_size"),
        ({"distributed": {"horizontal_parallel_size": 2}}, "distributed.horizontal_parallel_size"),
        ({"paths": {"model_with_loss_func_path": "loss.onnx"}}, "paths.model_with_loss_func_path"),
        ({"paths": {"model_with_training_graph_path": "training.onnx"}}, "paths.model_with_training_graph_path"),
        ({"training": {"find_batch_size": True}}, "training.find_batch_size"),
        ({"training": {"is_perf_test": True}}, "training.is_perf_test"),
    ],
)
def test_where_a_loss_must_be_in_the_graph(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    words = rf"loss.type is 'function', which is computed outside of the graph .*, and {field} needs the loss in the"
    with pytest.raises(ParametersError, match=words):
        parameters(tmp_path, loss=own(), **changes)


def test_a_function_cannot_come_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match=r"loss.type 'function' is for Python: pass loss=Loss"):
        parameters(tmp_path, loss={"type": "function"})
    with pytest.raises(ParametersError, match=r"loss.function is given, but belongs to function"):
        parameters(tmp_path, loss={**BUILT_IN, "function": cross_entropy})


def test_own_metrics_need_complete_outputs(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    with pytest.raises(AssertionError, match=r"metrics: mine are functions of complete outputs.*training.metrics"):
        run_on_ranks(2, sharded, tmp_path)


def sharded(folder: Path) -> None:
    mesh = start_mesh(Distributed(horizontal_parallel_size=2), "cpu")
    asked = parameters(folder, distributed={"horizontal_parallel_size": 2})
    TrainingRunner(asked, ON_ONE_THREAD, (), mesh, progress=False, metrics={"mine": accuracy}).initialize()
