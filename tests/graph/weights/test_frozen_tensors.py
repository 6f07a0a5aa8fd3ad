"""What does not train by its evidence, and how that is reported: quantized weights, signal tables, lifted constants."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

import onward
from onward.errors import ModelError, ParametersError
from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.training_graph import make_training_graph
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.graph.exported import export
from tests.one_node import run_onnxruntime

RNG = np.random.default_rng(0)


def model_of(text: str, **tensors: np.ndarray) -> onnx.ModelProto:
    """`a__b` stands for the name `a.b`."""
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g ' + text)
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    for name, array in tensors.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name.replace("__", ".")))
    return model


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def quantized() -> onnx.ModelProto:
    """A layer quantized dynamically, one by QDQ, and a float one."""
    return model_of(
        """(float[N, 8] x) => (float[N, 4] y)
        { q, s, z = DynamicQuantizeLinear(x)  p = MatMulInteger(q, w1, z, zero)  f = Cast<to = 1>(p)
          both = Mul(s, w1_scale)  a = Mul(f, both)  b = Relu(a)
          r = QuantizeLinear(b, b_scale, zero)  d = DequantizeLinear(r, b_scale, zero)
          v = DequantizeLinear(w2, w2_scale, zero)  c = MatMul(d, v)  y = Add(c, bias) }""",
        w1=RNG.integers(-100, 100, (8, 8)).astype(np.int8), w2=RNG.integers(-100, 100, (8, 4)).astype(np.int8),
        zero=np.int8(0), w1_scale=np.float32([0.01]), w2_scale=np.float32(0.02), b_scale=np.float32(0.1),
        bias=normal(4),
    )  # fmt: skip


def test_integers_and_their_scales_do_not_train_and_that_is_reported() -> None:
    model = quantized()
    model.graph.node[0].op_type = "DynamicQuantizeLinear"
    graph = make_training_graph(model)
    assert graph.weights == ("bias",)
    assert {graph.frozen[name] for name in ("w1", "w2")} == {"a weight stored as 8-bit integers"}
    assert {graph.frozen[name] for name in ("w1_scale", "w2_scale", "b_scale")} == {"a quantization scale"}
    (note,) = (note for note in graph.notes if "are not trainable" in note)
    assert note.startswith("99 of 103 parameters are not trainable: 2 x a weight stored as 8-bit integers (w1, w2; 96 ")
    assert "train the model from before quantization and quantize it afterwards (onward export --quantize)" in note
    text = render(inspect(model))
    assert "2  a weight stored as 8-bit integers          96  96 B  w1, w2" in text
    assert "3  a quantization scale                        3  12 B  w1_scale, w2_scale, b_scale" in text


def test_a_scale_named_exactly_trains_an_integer_cannot() -> None:
    assert "b_scale" in make_training_graph(quantized(), weights_to_train=["b_scale", "bias"]).weights
    with pytest.raises(ModelError, match="weights_to_train names 'w1', a weight stored as 8-bit integers, which"):
        make_training_graph(quantized(), weights_to_train=["w1"])


def hann(length: int) -> np.ndarray:
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)


def fourier(length: int) -> np.ndarray:
    """The rows of an STFT: cosines, then sines, under a window."""
    angles = 2 * np.pi * np.outer(np.arange(length // 2 + 1), np.arange(length)) / length
    return (np.concatenate([np.cos(angles), np.sin(angles)]) * hann(length)).astype(np.float32)


def constant_q(length: int) -> np.ndarray:
    """Kernels of frequencies a third of an octave apart, each as long as its frequency asks."""
    rows = []
    for octave in np.arange(0, 4, 1 / 3):
        size = int(length / 2 ** (octave / 2))
        row, begin = np.zeros(length), (length - size) // 2
        row[begin : begin + size] = hann(size) * np.cos(2 * np.pi * 6 * 2**octave * np.arange(size) / length)
        rows.append(row)
    return np.array(rows, np.float32)


def mel(filters: int, bins: int) -> np.ndarray:
    edges = np.geomspace(2, bins, filters + 2)
    places = np.arange(bins)[:, None]
    up = (places - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - places) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(up, down)).astype(np.float32)


@pytest.mark.parametrize("named", [True, False], ids=["by name", "by numbers"])
def test_signal_tables_do_not_train(named: bool) -> None:
    tables = ("stft__forward_basis_buffer", "mel__melscale__fb") if named else ("val_3", "val_9")
    model = model_of(
        f"""(float[N, 1, 512] x) => (float[N, 3, 4] y)
        {{ s = Conv<strides = [128]>(x, {tables[0]})  p = Mul(s, s)  t = Transpose<perm = [0, 2, 1]>(p)
           m = MatMul(t, {tables[1]})  l = MatMul(m, head)  y = Add(l, bias) }}""",
        **{tables[0]: fourier(256)[:, None], tables[1]: np.tile(mel(20, 129), (2, 1))[:258] if named else mel(20, 258)},
        head=normal(20, 4), bias=normal(4),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("head", "bias")
    reasons = [graph.frozen[name.replace("__", ".")] for name in tables]
    if named:
        assert set(reasons) == {"a table of signal processing by its name"}
    else:
        assert reasons == ["a table of sines and cosines (a Fourier transform)", "a bank of triangular filters (mel)"]
    exact = tables[0].replace("__", ".")
    assert exact in make_training_graph(model, weights_to_train=[exact, "head"]).weights


@pytest.mark.parametrize(
    ("array", "table"),
    [
        (fourier(128)[:, None], True),
        (constant_q(1024)[:, None], True),
        (normal(64, 1, 128), False),
        (np.eye(128, dtype=np.float32)[:, None], False),
        (np.abs(normal(64, 1, 256)), False),
        (np.cumsum(normal(64, 1, 256), -1), False),
        (np.maximum(0, normal(64, 1, 256) - 1.2).astype(np.float32), False),
        (np.full((64, 1, 128), 0.02, np.float32), False),
        (np.repeat(fourier(128)[4:5, None], 64, 0), False),
    ],
    ids=["stft", "constant q", "random", "identity", "positive", "smooth", "sparse", "one number", "one frequency"],
)
def test_which_numbers_are_a_signal_table(array: np.ndarray, table: bool) -> None:
    model = model_of("(float[N, 1, L] x) => (float[N, C, M] y) { y = Conv(x, w) }", w=array.astype(np.float32))
    assert make_training_graph(model).weights == (() if table else ("w",))


def test_windows_and_folded_constants_do_not_train() -> None:
    model = model_of(
        """(float[N, 64] x) => (float[N, 4] y)
        { a = Mul(x, window) b = Mul(a, gain) c = MatMul(b, dense) d = Add(c, const_fold_opt__211)
          e = Add(d, bias) y = Mul(e, const_fold_opt__7) }""",
        window=hann(64).astype(np.float32), gain=normal(64), dense=normal(64, 4), bias=normal(4),
        const_fold_opt__211=np.float32([1.0]), const_fold_opt__7=normal(4),
    )  # fmt: skip
    for node in model.graph.node:
        node.input[:] = [name.replace("opt.", "opt__") for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("opt.", "opt__")
    graph = make_training_graph(model)
    assert graph.weights == ("gain", "dense", "bias", "const_fold_opt__7")
    assert graph.frozen == {"window": "a window function", "const_fold_opt__211": "a constant folded by tf2onnx"}


class Wired(nn.Module):
    """A cell whose parameters, kept in a dict, are used elementwise only, as liquid time-constant networks do."""

    def __init__(self, units: int, registered: bool) -> None:
        super().__init__()
        self.table: dict[str, nn.Parameter] = {}
        shapes = {"w": (units, units), "mu": (units, units), "leak": (units,), "inputs": (3, units), "cm": (units,)}
        for name, shape in shapes.items():
            self.table[name] = nn.Parameter(torch.rand(shape) + 0.5)
            if registered:
                self.register_parameter(name, self.table[name])
        mask = (torch.rand(units, units) > 0.5).float()
        self.table["mask"] = nn.Parameter(mask, requires_grad=False)

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = self.table
        for t in x.unbind(1):
            drive = (t[:, :, None] * p["inputs"]).sum(1)
            inner = (torch.sigmoid(v[:, :, None] - p["mu"]) * p["w"] * p["mask"]).sum(1)
            v = (p["cm"] * v + drive + inner) / (1 + p["leak"])
        return v


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("units", [5, 40])
def test_parameters_that_the_exporter_took_for_constants_train(units: int, registered: bool, tmp_path: Path) -> None:
    """Also where each use of one has a copy of its own (1,600 elements)."""
    torch.manual_seed(0)
    module, inputs = Wired(units, registered), (torch.randn(2, 2, 3), torch.randn(2, units))
    net = onward.to_torch(export(module, inputs, tmp_path / "m.onnx", 18, True))
    trained = {name: one for name, one in module.table.items() if name != "mask"}
    assert sorted(tuple(w.shape) for w in net.weights.values()) == sorted(tuple(p.shape) for p in trained.values())
    assert "a mask" in net.graph.frozen.values()
    assert any("lost their names at export" in note and "ParameterDict" in note for note in net.graph.notes)
    both = (list(net.weights.values()), list(trained.values()))
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in both]
    for _ in range(3):
        for one, optimizer in zip((net, module), optimizers, strict=True):
            optimizer.zero_grad()
            one(*inputs).square().mean().backward()
            optimizer.step()
    onward.export(net, tmp_path / "t.onnx")
    other = (torch.randn(2, 2, 3), torch.randn(2, units))
    found = run_onnxruntime(onnx.load(tmp_path / "t.onnx"), *other)[0]
    np.testing.assert_allclose(found, module(*other).detach(), rtol=1e-4, atol=1e-5)


def only_constants() -> onnx.ModelProto:
    return model_of("(float[N, 64] x) => (float[N, 64] y) { y = Mul(x, window) }", window=hann(64).astype(np.float32))


NOTHING = (
    "The model has no trainable weights. Its tensors are: 1 x a window function (window; 64 parameters, 256 bytes). "
    "List those that are parameters in training.weights_to_train (weights_to_train=[...] of onward.to_torch)."
)


def test_a_model_without_trainable_weights_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=re.escape(NOTHING)):
        onward.to_torch(only_constants())
    onnx.save(only_constants(), tmp_path / "m.onnx")
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": str(tmp_path / "m.onnx")},
            "loss": {"type": "mean_squared_error", "prediction": "y", "label": "t"},
            "training": {"num_train_steps": 1, "batch_size": 1},
            "learning_rate": {"initial_lr": 0.1},
        }
    )
    with pytest.raises(ParametersError) as raised:
        TrainingRunner(parameters).initialize()
    assert str(raised.value) == NOTHING
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(onward.to_torch(only_constants(), weights_to_train=["window"]).weights) == ["window"]


def test_a_model_of_integers_only_says_what_to_do() -> None:
    model = quantized()
    del model.graph.initializer[-1]
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("Identity", ["c"], ["y"]))
    with pytest.warns(UserWarning, match="get no gradient: dequantize the model"):
        onward.to_torch(model)
