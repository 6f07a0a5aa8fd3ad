"""Integer networks in real numbers: they compute what they did, every stored integer trains, and the way is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onward
from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError, ParametersError
from onward.graph.dequantization.passes import Dequantized, dequantize
from tests.lowering.saved_models import LEVELS, NETWORKS, STATIC, Saved, run_as_saved, saved_by_onnxruntime
from tests.mlp import build_mlp, data, start

CASES = [
    pytest.param(network, form, level, marks=[pytest.mark.slow] if level in ("none", "basic") else [])
    for network in NETWORKS
    for form in ("dynamic", *STATIC)
    for level in LEVELS
]


def _parameters(network: str) -> int:
    return sum(parameter.numel() for parameter in NETWORKS[network][0]().parameters())


def _difference(result: Dequantized, saved: Saved) -> float:
    """From the quantized network's output, as a share of its largest."""
    model = ir.to_proto(result.model)
    if all(node.domain == "" and "LayerNorm" not in node.op_type for node in model.graph.node):
        onnx.checker.check_model(model, full_check=True)
    return float(np.abs(run_as_saved(model, saved.data) - saved.expected).max() / np.abs(saved.expected).max())


@pytest.mark.parametrize(("network", "form", "level"), CASES)
def test_an_integer_network_in_real_numbers(network: str, form: str, level: str, tmp_path: Path) -> None:
    """With its rounding it computes the same to a step of its output's quantization; without, to a few."""
    saved = saved_by_onnxruntime(network, form, level)
    if any(node.domain == "com.microsoft.nchwc" for node in saved.model.graph.node):
        pytest.skip("onnxruntime saved the blocked layout of this processor, which is refused")
    rounded, plain = dequantize(saved.model), dequantize(saved.model, keep_rounding=False)
    assert not rounded.left
    assert not plain.left
    # Rounding inside of a recurrence has no operator; integer and real arithmetic round differently at the half.
    bound = {"dynamic": 1e-2 if network == "recurrent" else 1e-6}.get(form, 0.03)
    assert _difference(rounded, saved) <= bound
    assert _difference(plain, saved) <= 0.1
    assert not any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in plain.model.graph)
    for result in (rounded, plain):
        _assert_trains(result.model, saved, 0.9 * _parameters(network), tmp_path / "trained.onnx")


def _assert_trains(model: ir.Model, saved: Saved, elements: float, path: Path) -> None:
    net = onward.to_torch(model)
    names = [name for name, weight in net.weights.items() if "scale" not in name]
    weights = [net.weights[name] for name in names]
    assert sum(weight.numel() for weight in weights) >= elements
    with torch.no_grad():
        before = net(saved.data)
    target = before + torch.randn(before.shape, generator=torch.Generator().manual_seed(0)) * before.abs().mean()
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    losses = []
    for _ in range(8):
        loss = (net(saved.data) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        without = [n for n, w in zip(names, weights, strict=True) if w.grad is None or not torch.isfinite(w.grad).all()]
        assert not without
        optimizer.step()
    assert min(losses[1:]) < losses[0]
    onward.export(net, path)
    with torch.no_grad():
        after = net(saved.data).numpy()
    actual = run_as_saved(onnx.load(path), saved.data)
    np.testing.assert_allclose(after, actual, rtol=0, atol=0.01 * np.abs(actual).max())


def test_a_model_of_real_numbers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no quantized operator and no stored integers .* Train it as it is\."):
        dequantize(build_mlp())


def _quantized_mlp(folder: Path) -> Path:
    """`mlp.onnx` of a folder, in QOperator form."""
    from onnxruntime import quantization

    class Samples(quantization.CalibrationDataReader):
        feeds = iter([{"x": data(8)["x"]}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    onnx.save(build_mlp(), folder / "float.onnx")
    target = folder / "mlp.onnx"
    quantization.quantize_static(
        folder / "float.onnx", target, Samples(), quant_format=quantization.QuantFormat.QOperator
    )
    return target


def test_from_an_integer_file_to_a_trained_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal names the command; what it writes trains by the ordinary way."""
    path = _quantized_mlp(tmp_path)
    with pytest.raises(ParametersError, match=r"Its weights are stored as integers.*--dequantize qdq -o FILE"):
        start(tmp_path)
    for kind in ("qdq", "float"):
        folder = tmp_path / kind
        assert main(["export", str(path), "--dequantize", kind, "-o", str(folder / "mlp.onnx")]) == 0
        assert "2 QGemm dequantized; 80 stored integers" in capsys.readouterr().out
        runner, recorder = start(folder, training={"num_train_steps": 40})
        runner.run(InMemoryDataLoader(data(64)))
        losses = [report.loss for report in recorder.steps]
        assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    assert main(["export", str(path), "--dequantize", "qdq", "-o", str(path)]) == 2
    assert "cannot be written over the model itself" in capsys.readouterr().err
    assert main(["export", str(path), "--dequantize", "qdq"]) == 2
    assert "--dequantize takes one MODEL and needs -o FILE." in capsys.readouterr().err
    assert main(["export", str(path), "--dequantize", "qdq", "-o", "a.onnx", "--optimize"]) == 2
    assert "give it MODEL and -o FILE alone" in capsys.readouterr().err


def test_integers_beside_weights_are_reported() -> None:
    saved = saved_by_onnxruntime("transformer", "dynamic", "none")
    (note,) = [note for note in onward.to_torch(saved.model).graph.notes if "stored as 8-bit integers" in note]
    assert "dequantize the model (onward export MODEL --dequantize qdq -o FILE) and train the result" in note
