"""What a proposal leaves as it is: running statistics for small batches, inputs that no sample has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.proposal.propose import propose
from tests.graph.repair.test_fixed_inputs import batch_first, voice_model
from tests.graph.repair.test_frozen_statistics import normalized_model
from tests.mlp import build_mlp, data


def _with_data(folder: Path, model: onnx.ModelProto, features: dict[str, np.ndarray]) -> tuple[Path, Path]:
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "data.npz", **features)
    return folder / "model.onnx", folder / "data.npz"


@pytest.mark.parametrize(
    ("model", "samples", "frozen"),
    [(normalized_model(), 32, True), (normalized_model(), 4096, None), (build_mlp(), 32, None)],
)
def test_statistics_are_kept_where_batches_are_small(
    tmp_path: Path, model: onnx.ModelProto, samples: int, frozen: bool | None
) -> None:
    found = propose(*_with_data(tmp_path, model, data(samples)), folder=tmp_path)
    assert found.value("training.freeze_batch_norm") is frozen
    assert (found.value("training.batch_size") < 16) == (samples == 32)


def test_states_and_rates_are_fixed_unless_the_data_have_them(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((16, 4, 3)).astype(np.float32)
    labels = {"label": np.arange(16) % 2}
    found = propose(*_with_data(tmp_path, batch_first(voice_model()), {"x": x, **labels}), folder=tmp_path)
    assert found.value("data.fixed_inputs") == {"sr": 16000.0, "state": 0.0}


def test_an_input_that_the_prediction_does_not_need_is_packed_where_the_data_have_it(tmp_path: Path) -> None:
    """A run reads every input of the graph; without this one, the trial of `onward init` failed."""
    model = build_mlp()
    model.graph.input.append(onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, ["batch", 3]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("mask_out", onnx.TensorProto.BOOL, ["batch", 3]))
    model.graph.node.append(onnx.helper.make_node("Identity", ["mask"], ["mask_out"]))
    features = {**data(32), "mask": np.ones((32, 3), bool)}
    found = propose(*_with_data(tmp_path, model, features), folder=tmp_path)
    assert found.packing is not None
    assert set(getattr(found.packing.options.source, "arrays", ())) in (set(), {"x", "mask", "label"})


def test_numbers_are_no_distributions_because_the_model_gives_some(tmp_path: Path) -> None:
    """Behind a softmax, labels that are negative or do not sum to one are compared as numbers."""
    model = build_mlp()
    model.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["p"]))
    model.graph.output[0].name = "p"
    x = data(32)["x"]
    shares = np.exp(np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32))
    shares /= shares.sum(axis=1, keepdims=True)
    for label, loss in ((shares, "softmax_cross_entropy"), (shares - 0.5, "mean_squared_error")):
        found = propose(*_with_data(tmp_path, model, {"x": x, "label": label}), folder=tmp_path)
        assert found.value("loss.type") == loss


def quantized_mlp() -> onnx.ModelProto:
    """Its matrices are stored as int8."""
    model, kept = build_mlp(), []
    for tensor in model.graph.initializer:
        if len(tensor.dims) < 2:
            kept.append(tensor)
            continue
        codes = np.rint(onnx.numpy_helper.to_array(tensor) * 50).astype(np.int8)
        kept += [onnx.numpy_helper.from_array(codes, f"{tensor.name}_q")]
        kept += [onnx.numpy_helper.from_array(np.float32(0.02), f"{tensor.name}_scale")]
        inputs = [one.name for one in kept[-2:]]
        model.graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", inputs, [tensor.name]))
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def test_adapters_are_proposed_for_integers_and_where_memory_is_short(tmp_path: Path) -> None:
    """92 parameters take 1,472 bytes with gradients and moments."""
    found = propose(*_with_data(tmp_path, quantized_mlp(), data(32)), folder=tmp_path)
    reasons = {choice.field: choice.reason for choice in found.choices}
    assert (found.value("adapter.rank"), found.value("adapter.alpha")) == (8, 16)
    assert reasons["adapter.rank"].startswith(
        "weights of layers are stored as integers (1 of them), which get no gradient"
    )
    assert (found.value("learning_rate.initial_lr"), reasons["learning_rate.initial_lr"][:18]) == (
        2e-4,
        "usual for adapters",
    )
    files = _with_data(tmp_path, build_mlp(), data(32))
    assert propose(*files, folder=tmp_path, memory_bytes=3000).value("adapter.rank") is None
    found = propose(*files, folder=tmp_path, memory_bytes=2900)
    (why,) = [choice.reason for choice in found.choices if choice.field == "adapter.rank"]
    assert why.startswith(
        "training all 9.2e-05 M parameters takes 1.5e-06 GB for weights, gradients and moments, more "
    )
