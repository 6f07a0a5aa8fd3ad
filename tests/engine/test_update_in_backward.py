"""Updates inside the backward pass: the bits of ordinary ones, whatever the optimizer and the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.engine import steps
from onward.errors import OnwardError
from onward.models import create_model
from onward.optimizers.registry import OPTIMIZERS
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD, SQUARES, assert_same_bits, data, parameters, save_mlp, start, state_bits
from tests.watching import Recorder

IN_BACKWARD = {"speed": {"update_in_backward": True}}


def both(run: Callable[[bool], tuple[dict[str, torch.Tensor], Recorder]]) -> list[dict[str, torch.Tensor]]:
    """Asserts that both modes end in the same bits and report the same; returns the bits."""
    (own, own_reports), (expected, expected_reports) = run(True), run(False)
    assert_same_bits(own, expected)
    assert len(own_reports.steps) == len(expected_reports.steps) > 0
    for one, other in zip(own_reports.steps, expected_reports.steps, strict=True):
        np.testing.assert_array_equal(
            [one.loss, one.gradient_norm, one.skipped_updates], [other.loss, other.gradient_norm, other.skipped_updates]
        )
        assert_same_bits(one.tensors, other.tensors)
    return [own, expected]


def trained(folder: Path, is_inside: bool, features: Any = None, **changes: Any) -> tuple[Any, Recorder]:
    """The state after a run of the small network."""
    speed = {**changes.pop("speed", {}), "update_in_backward": is_inside}
    runner, recorder = start(folder, speed=speed, **changes)
    runner.run(InMemoryDataLoader(data(32) if features is None else features))
    return state_bits(runner), recorder


@pytest.mark.parametrize("name", [kind.name for kind in OPTIMIZERS])
def test_every_optimizer_gives_the_bits_of_its_ordinary_update(tmp_path: Path, name: str) -> None:
    """Two groups, dropout, running statistics; weights, moments, statistics, generators, losses and norms."""
    if name == "AdamW8bit":
        pytest.importorskip("torchao")
    save_mlp(tmp_path, normalized=True, dropout=0.2)
    optimizer: dict[str, Any] = {
        "training_optimizer_name": name,
        "optimizer_attributes": [{"weights": "b*", "learning_rate_factor": 0.5}],
    }
    if name == "SGDOptimizer":
        optimizer["optimizer_attributes"].append({"weights": "w*", "momentum": 0.9})
    both(lambda is_inside: trained(tmp_path, is_inside, optimizer=optimizer, training={"num_train_steps": 5}))


OTHERS: dict[str, dict[str, Any]] = {
    "unfreezing": {"training": {"unfreeze": [{"after_updates": 3, "weights": ["w1", "b1"]}]}},
    "averaging": {"averaging": {"kind": "ema", "decay": 0.5}},
    "pruning": {"pruning": {"pattern": "magnitude", "sparsity": 0.5, "start_update": 2}},
    "watched tensors": {"tensorboard": {"histogram_names": ["*"], "norm_names": ["w*_grad"]}},
    "checked weights": {"machine": {"check_weights_period": 2}},
    "a weight without gradient": {"training": {"weights_to_train": ["w1", "b2"]}},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=list(OTHERS))
def test_what_it_goes_together_with(tmp_path: Path, changes: dict[str, Any]) -> None:
    optimizer = {"training_optimizer_name": "AdamW"}
    both(lambda is_inside: trained(tmp_path, is_inside, optimizer=optimizer, **changes))


NETWORKS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "nothing fused": {"speed": {"fuse": False, "join_layers": False}},
    "recompute": {"recompute": {"segments": True}},
    "bf16": {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}},
    "adapters": {"adapter": {"rank": 2}},
}


def gpt2_run(folder: Path, is_inside: bool, **changes: Any) -> tuple[dict[str, torch.Tensor], Recorder]:
    """A GPT-2 whose embedding is its last layer's weight, over three updates."""
    path = folder / "gpt2.onnx"
    if not path.exists():
        options = {"layers": 2, "heads": 2, "width": 64, "vocab_size": 160, "context_length": 64}
        ir.save(create_model("gpt2", size="tiny", dropout=0.1, **options), path)
    drawn = np.random.default_rng(0).integers(0, 160, (12, 65))
    asked = parameters(
        folder,
        paths={"model_path": path},
        loss={"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
        training={"batch_size": 4, "num_train_steps": 3},
        learning_rate={"initial_lr": 1e-3},
        optimizer={"training_optimizer_name": "AdamW"},
        **{**changes, "speed": {**changes.get("speed", {}), "update_in_backward": is_inside}},
    )
    recorder = Recorder()
    runner = TrainingRunner(asked, ON_ONE_THREAD, [recorder], progress=False)
    loader = InMemoryDataLoader({"input_ids": drawn[:, :-1], "labels": drawn[:, 1:].copy()})
    runner.initialize(loader.feature_specs())
    most = gradients_alive(runner, lambda: runner.run(loader))
    count = len(runner.state.weights)
    assert (most <= 3) if is_inside else (most == count > 20 or "adapter" in changes)
    return state_bits(runner), recorder


def gradients_alive(runner: TrainingRunner, run: Callable[[], Any]) -> int:
    """At how many weights there are gradients at once, when one of them arrives."""
    most, weights = 0, list(runner.state.torch_parameters.values())

    def count(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(weight.grad is not None for weight in weights))

    hooks = [weight.register_post_accumulate_grad_hook(count) for weight in weights]
    run()
    for hook in hooks:
        hook.remove()
    return most


@pytest.mark.parametrize("changes", NETWORKS.values(), ids=list(NETWORKS))
def test_a_tied_weight_is_updated_after_both_of_its_readers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Through fused functions, those that join layers, sparse gradients of lookups, and recomputed segments."""
    both(lambda is_inside: gpt2_run(tmp_path, is_inside, **changes))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
def test_an_update_whose_loss_or_gradients_are_all_not_finite_is_skipped_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: float, on_device: bool
) -> None:
    """1e30 squared is an infinite loss, whose gradients are finite."""
    save_mlp(tmp_path, normalized=number != 1e30)
    features = data(32)
    features["target" if number == 1e30 else "x"][9, 2] = number
    monkeypatch.setattr(steps, "skips_on_device", lambda _: on_device)
    optimizer = {"training_optimizer_name": "AdamW"}
    own, _ = both(lambda inside: trained(tmp_path, inside, features, optimizer=optimizer, loss=SQUARES))
    assert all(tensor.isfinite().all() for tensor in own.values())


@pytest.mark.parametrize("on_device", [False, True])
def test_a_gradient_that_is_not_finite_leaves_its_own_weight_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """And its moments: as after one update, the others as after two. The second update is counted as skipped."""
    monkeypatch.setattr(steps, "skips_on_device", lambda _: on_device)
    optimizer, ends = {"training_optimizer_name": "AdamW"}, {}
    for count in (1, 2):
        ends[count], _ = trained(tmp_path, False, optimizer=optimizer, training={"num_train_steps": count})
    runner, recorder = start(tmp_path, **IN_BACKWARD, training={"num_train_steps": 2}, optimizer=optimizer)
    factors = iter((1.0, torch.inf))
    runner.state.weights["w1"].source.register_hook(lambda gradient: gradient * next(factors))
    summary = runner.run(InMemoryDataLoader(data(32)))
    expected = {name: ends[1 if name.endswith("/w1") else 2][name] for name in ends[1]}
    assert_same_bits(state_bits(runner), expected)
    assert summary.skipped_updates == 1
    assert [np.isfinite(report.gradient_norm) for report in recorder.steps] == [True, False]


def test_a_run_resumes_in_either_mode(tmp_path: Path) -> None:
    """Bit by bit, with no word about other fields."""
    found = []
    for first, second in ((False, False), (True, False), (False, True)):
        folder = tmp_path / f"{first} {second}"
        for is_inside, count in ((first, 3), (second, 6)):
            runner, recorder = start(
                tmp_path,
                speed={"update_in_backward": is_inside},
                training={"num_train_steps": count},
                optimizer={"training_optimizer_name": "AdamW"},
                checkpoint={"checkpoints_dir": folder},
            )
            assert runner.resumed_update == (3 if count == 6 else None)
            runner.run(InMemoryDataLoader(data(32)))
            runner.wait_for_checkpoint()
        assert not [text for text in recorder.messages if "update_in_backward" in text]
        found.append(state_bits(runner))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_half_of_an_update_is_neither_saved_nor_trained_further_nor_exported(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, **IN_BACKWARD, checkpoint={"checkpoints_dir": tmp_path / "saved"})
    first, passes = runner.state.weights["w1"].source, 0

    def fail(gradient: torch.Tensor) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise RuntimeError("gone")

    failing = first.register_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        runner.run(InMemoryDataLoader(data(32)))
    failing.remove()
    (note,) = caught.value.__notes__
    assert note == (
        "The failed step had updated some of the weights inside its backward pass (speed.update_in_backward), so that "
        "nothing was saved; the last checkpoint is unaffected."
    )
    assert not list((tmp_path / "saved").glob("*[0-9]"))
    words = r"^step 3 failed inside its backward pass, when speed\.update_in_backward had updated some of the weights"
    for use in (runner.save_checkpoint, runner.end_training, lambda: runner.run(InMemoryDataLoader(data(32)))):
        with pytest.raises(OnwardError, match=words):
            use()


def test_a_step_that_fails_before_it_changed_a_weight_is_saved_as_ever(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, **IN_BACKWARD, checkpoint={"checkpoints_dir": tmp_path / "saved"})
    loader, features = InMemoryDataLoader(data(32)), 0

    def fail(_: Any, __: Any) -> None:
        nonlocal features
        features += 1
        if features == 3:
            raise RuntimeError("gone")

    runner.state.networks[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        runner.run(loader)
    assert "to step 2, are saved as" in caught.value.__notes__[0]
