"""Mixed precision on a device: fp16 steps with fp32 masters, against `onward train` in fp32.

ONNX Runtime's CPU kernels compute fp16 nodes in fp32; torch's overflow at a lower loss scale, and skip another update.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onward.data.in_memory import InMemoryDataLoader
from onward.device.bundle import write_bundle
from onward.device.returning import write_checkpoint
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from onward_device import SkippedUpdatesError, Trainer
from tests.device.bundles import batches, bundle_of, run_file, samples, sections
from tests.mlp import ON_ONE_THREAD, save_mlp, start

RATE = {"learning_rate": {"initial_lr": 1e-2}}
FP16 = {"mixed_precision": {"use_mixed_precision": True}}


def fp16_products(path: Path) -> int:
    model = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False))
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    return sum(types.get(node.output[0]) == TensorProto.FLOAT16 for node in products)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_in_fp16_follow_those_in_fp32(accumulation: int, tmp_path: Path) -> None:
    save_mlp(tmp_path)
    # Adam would make a full step of a gradient that is a rounding error.
    optimizer = {"training_optimizer_name": "SGDOptimizer", "optimizer_attributes": [{"momentum": 0.9}]}
    training = {"gradient_accumulation_steps": accumulation}
    changes = {"training": training, "optimizer": optimizer}
    features = samples()
    runner, recorder = start(tmp_path, **sections(**changes))
    runner.run(InMemoryDataLoader(dict(features)))
    trainer = Trainer.load(bundle_of(tmp_path, **changes, **FP16))
    graph = "step" if accumulation == 1 else "train"
    assert fp16_products(tmp_path / "bundle" / f"{graph}.onnx") >= 4
    losses = [trainer.train_step(batch) for batch in batches(features)]
    updates = np.mean(np.reshape(losses, (-1, accumulation)), 1)
    assert updates == pytest.approx(recorder.losses, rel=2e-3)
    assert updates != pytest.approx(recorder.losses, rel=1e-6)
    state = trainer.state()
    assert state["w1"].dtype == np.float32
    assert np.abs(state["w1"] - runner.net.weights["w1"].detach().numpy()).max() < 2e-3
    assert state["loss_scale"] == 65536
    assert state["finite_updates"] == 50 // accumulation
    assert not trainer.skipped_updates


def test_an_overflow_skips_the_update_and_halves_the_scale(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    checkpoints = {"checkpoint": {"checkpoints_dir": "saved"}}
    trainer = Trainer.load(bundle_of(tmp_path, **RATE, **FP16, **checkpoints))
    first, second = batches(samples(), 2)
    before = trainer.state()["w1"]
    trainer.train_step({**first, "x": first["x"] * np.float32(3e4)})
    assert trainer.skipped_updates == 1
    assert trainer.state()["loss_scale"] == 32768
    np.testing.assert_array_equal(trainer.state()["w1"], before)
    trainer.train_step(second)
    assert (trainer.state()["finite_updates"], trainer.skipped_updates) == (1, 1)
    assert not np.array_equal(trainer.state()["w1"], before)
    trainer.save_state(tmp_path / "state.safetensors")
    write_checkpoint(tmp_path / "run.yaml", tmp_path / "state.safetensors")
    resumed = TrainingRunner(Parameters.load(tmp_path / "run.yaml"), ON_ONE_THREAD, progress=False)
    resumed.initialize()
    scale = resumed.state.loss_scale
    assert scale is not None
    assert (scale.scale, scale.finite_updates) == (32768, 1)


def test_a_window_of_finite_updates_doubles_the_scale(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    trainer = Trainer.load(bundle_of(tmp_path, **RATE, **FP16))
    state = trainer.state()
    state["finite_updates"], state["loss_scale"] = np.array(1999), np.array(1024, np.float32)
    trainer._set_state(state)
    trainer.train_step(batches(samples(), 1)[0])
    assert (trainer.state()["loss_scale"], trainer.state()["finite_updates"]) == (2048, 0)


def test_a_static_scale_is_no_state_and_changes_no_gradient(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    losses = []
    for scale in (8.0, 1024.0):
        folder = tmp_path / str(scale)
        folder.mkdir()
        save_mlp(folder)
        mixed = {"mixed_precision": {"use_mixed_precision": True, "loss_scale": scale}}
        trainer = Trainer.load(bundle_of(folder, **RATE, **mixed))
        assert "loss_scale" not in trainer.state()
        losses.append([trainer.train_step(batch) for batch in batches(samples(), 10)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_skipped_updates_are_reported_once_and_end_after_ten_in_a_row(accumulation: int, tmp_path: Path) -> None:
    """A fixed scale at which every gradient overflows, while the losses look like those of training."""
    save_mlp(tmp_path)
    mixed = {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 1e12}}
    trainer = Trainer.load(bundle_of(tmp_path, training={"gradient_accumulation_steps": accumulation}, **mixed))
    given = batches(samples(), 11 * accumulation)
    before = trainer.state()["w1"]
    words = (
        r"update 1 was skipped: its loss, gradient or batch statistics are not finite \(gradient norm (inf|nan), loss"
    )
    with pytest.warns(RuntimeWarning, match=words) as told:
        losses = [trainer.train_step(batch) for batch in given[:-1]]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "counted in Trainer.skipped_updates; more than 10 in a row raise an error." in str(told[0].message)
    assert np.isfinite(losses).all()
    words = (
        r"the last 11 weight updates were skipped.* \(update 11: gradient norm (inf|nan), loss .* allows 10 in a row\. "
        r"mixed_precision\.loss_scale of the bundle's run is 1e\+12, at which gradients overflow\. Write the bundle "
        r"again with 0 for dynamic loss scaling"
    )
    with pytest.raises(SkippedUpdatesError, match=words):
        trainer.train_step(given[-1])
    assert (trainer.updates, trainer.skipped_updates) == (11, 11)
    np.testing.assert_array_equal(trainer.state()["w1"], before)


def test_updates_by_which_the_dynamic_scale_falls_do_not_count(tmp_path: Path) -> None:
    """It halves from 65536 to 1, the minimum, in 16 updates; from then on on_bad_loss.skip counts."""
    save_mlp(tmp_path)
    trainer = Trainer.load(bundle_of(tmp_path, **RATE, **FP16, on_bad_loss={"skip": 2}))
    batch = batches(samples(), 1)[0]
    spoiled = {**batch, "x": batch["x"] * np.float32(np.nan)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(16):
            trainer.train_step(spoiled)
    assert trainer.state()["loss_scale"] == 1
    with pytest.warns(RuntimeWarning, match="update 17 was skipped"):
        trainer.train_step(spoiled)
    trainer.train_step(batch)  # ends the row
    trainer.train_step(spoiled)
    trainer.train_step(spoiled)
    with pytest.raises(SkippedUpdatesError, match=r"the last 3 weight .* 2 in a row\. Look for infinite, NaN or very"):
        trainer.train_step(spoiled)


@pytest.mark.parametrize(
    ("field", "distillation", "reason"),
    [
        ("use_bfloat16", {}, "ONNX Runtime computes neither bf16 nor FP8 on every device"),
        ("float8", {}, "ONNX Runtime computes neither bf16 nor FP8 on every device"),
        ("use_mixed_precision", {"teacher_path": "teacher.onnx"}, "a teacher keeps its types"),
    ],
)
def test_other_precisions_are_left_out_with_a_note(
    field: str, distillation: dict[str, str], reason: str, tmp_path: Path
) -> None:
    save_mlp(tmp_path)
    (tmp_path / "teacher.onnx").write_bytes((tmp_path / "mlp.onnx").read_bytes())
    asked = {"mixed_precision": {"use_mixed_precision": True, field: True}, "distillation": distillation}
    notes: list[str] = []
    write_bundle(run_file(tmp_path, **asked), tmp_path / "bundle", notify=notes.append)
    hint = "" if distillation else " Set use_mixed_precision alone for fp16."
    assert (
        f"mixed_precision is for `onward train` here: {reason}. The bundle computes in the model's own types.{hint}"
    ) in notes
    assert not any("left out of the bundle" in note for note in notes)
    assert fp16_products(tmp_path / "bundle" / "step.onnx") == 0


def test_normalized_layers_and_overlapping_maxima_run_in_fp16(tmp_path: Path) -> None:
    """ONNX Runtime refuses graphs whose statistics are fp16, and adds at indices in fp32 alone."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
    net (float[batch, 8] x, float[batch, 4] target) => (float[batch, 4] y)
    <float[8] scale = {1, 2, 1, 2, 1, 2, 1, 2}, float[8] shift = {0, 1, 0, 1, 0, 1, 0, 1},
     int64[2] axes = {1, 2}, int64[2] flat = {0, -1}> {
        normalized = LayerNormalization (x, scale, shift)
        image = Unsqueeze (normalized, axes)
        largest = MaxPool <kernel_shape = [1, 3], strides = [1, 2], pads = [0, 1, 0, 1]> (image)
        y = Reshape (largest, flat)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "mlp.onnx")
    x = np.random.default_rng(0).standard_normal((4, 8))
    batch = {"x": x.astype(np.float32), "target": np.eye(4, dtype=np.float32)}
    loss = {"loss": {"type": "mean_squared_error", "prediction": "y", "label": "target"}}
    losses = []
    for mixed in ({}, FP16):
        trainer = Trainer.load(bundle_of(tmp_path, **RATE, **loss, **mixed))
        losses.append([trainer.train_step(batch) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1] != losses[0]


@pytest.mark.parametrize("activation", ["Relu (hidden)", "Clip (hidden, zero, six)"])
def test_gradients_too_large_for_fp16_behind_a_clipped_activation_count_for_nothing(
    activation: str, tmp_path: Path
) -> None:
    """As in torch: the second unit is off, and its gradient, 60,000 times the scaled loss's, is no reason to skip."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
    net (float[batch, 2] x, float[batch, 1] target) => (float[batch, 1] y)
    <float[2, 2] first = {1.0, 0.0, 0.0, 1.0}, float[2, 1] last = {1.0, 60000.0}> {
        zero = Constant <value_float = 0.0> ()
        six = Constant <value_float = 6.0> ()
        hidden = MatMul (x, first)
        active = %s
        y = MatMul (active, last)
    }"""
    onnx.save(onnx.parser.parse_model(text % activation), tmp_path / "mlp.onnx")
    loss = {"loss": {"type": "mean_squared_error", "prediction": "y", "label": "target"}}
    mixed = {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 1024.0}}
    plain = {"optimizer": {"training_optimizer_name": "SGDOptimizer", "optimizer_attributes": []}}
    trainer = Trainer.load(bundle_of(tmp_path, **RATE, **loss, **mixed, **plain))
    before = trainer.state()["first"]
    trainer.train_step({"x": np.array([[1.0, -1.0]], np.float32), "target": np.array([[3.0]], np.float32)})
    assert trainer.skipped_updates == 0
    changed = trainer.state()["first"] - before
    assert changed[0, 0] > 0
    assert changed[:, 1].tolist() == [0, 0]
