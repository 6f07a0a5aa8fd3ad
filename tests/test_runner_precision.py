"""Numbers that overflow, are none or have few bits; gradients that are clipped; attributes of single weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ParametersError
from onward.optim.loss_scale import LossScale
from tests.mlp import (
    FEATURES,
    assert_same_bits,
    batches_of,
    data,
    save_mlp,
    start,
    state_bits,
    weights,
    weights_of,
    write_adam_run,
    write_shards,
)

TRAIN = data(32)
FP16 = {"use_mixed_precision": True}
BF16 = {"use_mixed_precision": True, "use_bfloat16": True}
ADAMW = {"training_optimizer_name": "AdamW"}


def loader(features: Mapping[str, np.ndarray] = TRAIN) -> InMemoryDataLoader:
    return InMemoryDataLoader(features)


# ------------------------------------------------------------------------------------------------ overflow and NaN


def test_a_static_loss_scale_that_overflows_skips_every_update(tmp_path: Path) -> None:
    """Weights, moments and running statistics keep their bits; the skipped updates are counted and shown."""
    save_mlp(tmp_path, normalized=True)
    mixed = {**FP16, "loss_scale": 2.0**30}
    runner, recorder = start(tmp_path, optimizer=ADAMW, mixed_precision=mixed)
    before = state_bits(runner)
    with pytest.raises(ParametersError) as caught:
        runner.run(loader())
    assert str(caught.value) == (
        "all 8 weight updates of this round were skipped, since their gradients were not finite: nothing was trained. "
        "mixed_precision.loss_scale is 1.07374e+09, at which gradients overflow. Set it to 0 for dynamic loss scaling "
        "or to a smaller value, or set use_bfloat16: true."
    )
    (summary,) = recorder.summaries
    assert_same_bits(state_bits(runner), before)
    assert (summary.updates, summary.skipped_updates) == (8, 8)
    assert [report.skipped_updates for report in recorder.steps] == list(range(1, 9))
    assert {report.loss_scale for report in recorder.steps} == {2.0**30}
    assert not any(np.isfinite(report.gradient_norm) for report in recorder.steps)
    assert all(np.isfinite(report.loss) for report in recorder.steps)
    assert runner.state.counters.update == 8


def test_the_command_ends_with_2_and_writes_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also when the same command is run again over the checkpoint of the round that was for nothing."""
    save_mlp(tmp_path)
    write_shards(tmp_path / "train", TRAIN)
    fields = [
        "--mixed_precision.use_mixed_precision=true",
        "--mixed_precision.loss_scale=1e9",
        "--checkpoint.checkpoints_dir=checkpoints",
        "--paths.output_dir=out",
    ]
    file = str(write_adam_run(tmp_path))
    fields = [field.replace("=checkpoints", f"={tmp_path}/c").replace("=out", f"={tmp_path}/out") for field in fields]
    for what in ("this round", "this run"):
        assert main(["train", file, *fields]) == 2
        shown = capsys.readouterr()
        assert f"all 8 weight updates of {what} were skipped" in shown.err
        assert "mixed_precision.loss_scale is 1e+09" in shown.err
        assert "trained model written" not in shown.out
        assert not list(tmp_path.glob("out/*.onnx"))


def test_data_without_numbers_end_the_run_and_say_where_to_look(tmp_path: Path) -> None:
    runner, recorder = start(tmp_path, training={"num_train_steps": 400, "display_loss_steps": 10})
    broken = {**TRAIN, "x": np.full_like(TRAIN["x"], np.nan)}
    with pytest.raises(ParametersError, match=r"the last 11 weight updates were skipped, .*Look for such values in"):
        runner.run(loader(broken))
    assert recorder.steps[-1].update == 10
    assert runner.state.counters.update <= 11


def test_a_dynamic_loss_scale_halves_until_nothing_overflows(tmp_path: Path) -> None:
    """From 2^20 on: one halving for each skipped update, none for any other."""
    runner, recorder = start(tmp_path, mixed_precision=FP16, training={"num_train_steps": 16})
    runner.state.loss_scale = LossScale(scale=2.0**20)
    before = weights_of(runner)
    summary = runner.run(loader())
    scale = 2.0**20
    for report in recorder.steps:
        skipped = not np.isfinite(report.gradient_norm)
        scale = scale / 2 if skipped else scale
        assert report.loss_scale == scale
    assert 3 <= summary.skipped_updates <= 8
    assert scale == 2.0 ** (20 - summary.skipped_updates)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(runner).items())


def test_one_overflow_among_accumulated_batches_skips_their_update(tmp_path: Path) -> None:
    features = {**TRAIN, "x": TRAIN["x"].copy()}
    features["x"][1] = 60000.0  # in the first of two micro-batches of the first update
    training = {"gradient_accumulation_steps": 2, "num_train_steps": 4}
    mixed = {**FP16, "loss_scale": 128.0}
    runner, recorder = start(tmp_path, mixed_precision=mixed, training=training)
    runner.run(loader(features))
    assert [report.skipped_updates for report in recorder.steps] == [1, 1]
    clean, _ = start(tmp_path, mixed_precision=mixed, training={**training, "num_train_steps": 2})
    clean.run(loader({name: array[8:] for name, array in features.items()}))
    assert_same_bits(weights_of(runner), weights_of(clean))


def test_a_nan_in_the_data_costs_one_update_and_nothing_else(tmp_path: Path) -> None:
    """In fp32: as if the batch had not been there, running statistics included."""
    save_mlp(tmp_path, normalized=True)
    features = {**TRAIN, "x": TRAIN["x"].copy()}
    features["x"][9, 2] = np.nan
    runner, recorder = start(tmp_path, optimizer=ADAMW)
    summary = runner.run(loader(features))
    assert summary.skipped_updates == 1
    assert [report.skipped_updates for report in recorder.steps] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [np.isnan(report.loss) for report in recorder.steps] == [False, False, True, *[False] * 5]
    without = {name: np.delete(array, range(8, 12), axis=0) for name, array in TRAIN.items()}
    clean, others = start(tmp_path, optimizer=ADAMW, training={"num_train_steps": 7})
    clean.run(loader(without))
    assert_same_bits(weights_of(runner), weights_of(clean))
    assert [loss for loss in recorder.losses if not np.isnan(loss)] == others.losses


# ---------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("mixed", "bound"),
    [(FP16, 2**-10), ({**FP16, "loss_scale": 256.0}, 2**-10), (BF16, 2**-7)],
    ids=["fp16", "static", "bf16"],
)
@pytest.mark.parametrize("normalized", [False, True])
def test_losses_in_16_bits_stay_near_those_in_32(
    tmp_path: Path, mixed: dict[str, Any], bound: float, normalized: bool
) -> None:
    """40 steps of SGD: within one unit in the last place of the format, fp16's 2^-10 or bf16's 2^-7, of the first."""
    save_mlp(tmp_path, normalized=normalized)
    curves = []
    for precision in ({}, mixed):
        runner, recorder = start(
            tmp_path,
            mixed_precision=precision,
            training={"num_train_steps": 40},
        )
        # A first update that overflows would shift the whole curve.
        if runner.state.loss_scale is not None and runner.state.loss_scale.dynamic:
            runner.state.loss_scale = LossScale(scale=1024.0)
        assert runner.run(loader()).skipped_updates == 0
        assert all(tensor.dtype == torch.float32 for tensor in weights_of(runner).values())
        curves.append(np.array(recorder.losses))
    worst = np.abs(curves[1] - curves[0]).max() / curves[0][0]
    assert 0 < worst < bound
    assert curves[0][-8:].mean() < 0.6 * curves[0][:8].mean()


def test_fp32_masters_take_updates_that_16_bits_could_not_hold(tmp_path: Path) -> None:
    """100 updates of 2^-12 of a weight add up, though each is below what bf16 can distinguish."""
    model = onnx.load(save_mlp(tmp_path))
    runner, _ = start(
        tmp_path,
        mixed_precision=BF16,
        learning_rate={"initial_lr": 1e-5},
        optimizer=ADAMW,
        training={"num_train_steps": 100},
    )
    runner.run(loader())
    initial = onnx.numpy_helper.to_array(model.graph.initializer[2])
    moved = np.abs(runner.net.weights["w2"].detach().numpy() - initial)
    assert (moved > 0).all()
    assert 1e-4 < moved.max() < 1.1e-3


# ------------------------------------------------------------------------------------------------------------ clipping


def gradients() -> dict[str, torch.Tensor]:
    """Of the first batch, by torch in float64."""
    batch = next(batches_of(TRAIN, 4))
    w = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in weights().items()}
    logits = torch.relu(torch.from_numpy(batch["x"]).double() @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["label"]))
    return dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))


@pytest.mark.parametrize("clip", [None, 0.25, 1000.0])
@pytest.mark.parametrize("mixed", [{}, {**FP16, "loss_scale": 1024.0}], ids=["fp32", "fp16"])
def test_the_global_norm_is_clipped_and_shown_as_it_was(
    tmp_path: Path, clip: float | None, mixed: dict[str, Any]
) -> None:
    """One step of SGD moves the weights by the rate times the gradient, its norm at most `clip`; 1e-5, fp16 2e-3."""
    runner, recorder = start(
        tmp_path, training={"num_train_steps": 1}, optimizer={"max_norm_clip": clip}, mixed_precision=mixed
    )
    runner.run(loader())
    expected = gradients()
    norm = float(torch.sqrt(sum((g**2).sum() for g in expected.values())))  # type: ignore[arg-type]
    assert norm > 0.5
    tolerance = 2e-3 if mixed else 1e-5
    assert recorder.steps[0].gradient_norm == pytest.approx(norm, rel=tolerance)
    factor = 1.0 if clip is None else min(1.0, clip / norm)
    for name, gradient in expected.items():
        moved = torch.from_numpy(weights()[name]) - weights_of(runner)[name]
        torch.testing.assert_close(moved.double(), 0.1 * factor * gradient, rtol=tolerance * 10, atol=tolerance / 10)


# ---------------------------------------------------------------------------------------------- attributes of weights


def test_attributes_by_rules_and_by_a_function_are_the_same(tmp_path: Path) -> None:
    rules = [
        {"weights": "*", "alpha": 0.8, "beta": 0.95, "lambda": 0.1},
        {"weights": ["b*"], "lambda": 0.0, "learning_rate_factor": 0.5},
    ]

    def attributes(weight: str) -> dict[str, Any]:
        common = {"alpha": 0.8, "beta": 0.95}
        return {**common, "lambda": 0.1} if weight[0] == "w" else {**common, "lambda": 0.0, "learning_rate_factor": 0.5}

    by_rules, _ = start(tmp_path, optimizer={**ADAMW, "optimizer_attributes": rules})
    by_function, _ = start(tmp_path, optimizer={**ADAMW, "optimizer_attributes": attributes})
    plain, _ = start(tmp_path, optimizer=ADAMW)
    for runner in (by_rules, by_function, plain):
        runner.run(loader())
    assert_same_bits(weights_of(by_function), weights_of(by_rules))
    assert not torch.equal(weights_of(plain)["w1"], weights_of(by_rules)["w1"])


def test_decay_off_for_biases_in_a_line(tmp_path: Path) -> None:
    """With inputs of zero no gradient reaches the first layer: what decays is decay alone, (1 - 0.1 * 0.5)^8."""
    features = {"x": np.zeros((32, FEATURES), np.float32), "label": TRAIN["label"]}
    rules = [{"weights": "*", "lambda": 0.5}, {"weights": "b*", "lambda": 0.0}]
    runner, _ = start(
        tmp_path, optimizer={**ADAMW, "optimizer_attributes": rules}, training={"weights_to_train": ["w1"]}
    )
    runner.run(loader(features))
    np.testing.assert_allclose(weights_of(runner)["w1"].numpy(), weights()["w1"] * 0.95**8, rtol=1e-5)


def test_a_factor_of_zero_leaves_a_weight_alone(tmp_path: Path) -> None:
    rules = [{"weights": "w2", "learning_rate_factor": 0.0}]
    runner, _ = start(tmp_path, optimizer={"optimizer_attributes": rules})
    runner.run(loader())
    assert np.array_equal(weights_of(runner)["w2"].numpy(), weights()["w2"])
    assert not np.array_equal(weights_of(runner)["w1"].numpy(), weights()["w1"])


def test_a_pattern_that_matches_nothing_is_said(tmp_path: Path) -> None:
    rules = [{"weights": ["*", "*norm*"]}, {"weights": "W1", "momentum": 0.9}]
    _, recorder = start(tmp_path, optimizer={"optimizer_attributes": rules})
    assert recorder.messages == ["optimizer_attributes: no trainable weight matches '*norm*', 'W1'."]


def test_attributes_that_are_impossible(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"optimizer_attributes": lambda weight: {"alpha": 0.9}},
            r"^optimizer_attributes\('w1'\) returned alpha; SGDOptimizer has: lambda, learning_rate_factor, momentum",
        ),
        (
            {"optimizer_attributes": [{"weights": "w1", "nesterov": True}]},
            r"^optimizer_attributes: nesterov is true while momentum is 0; set a momentum\.$",
        ),
    ]
    for optimizer, words in cases:
        with pytest.raises(ParametersError, match=words):
            start(tmp_path, optimizer=optimizer)
