"""Files whose export fixed the batch train with any: graphs of both exporters, proven and compared with torch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import onward
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError, ParametersError
from onward.graph.rebatching.passes import NotRebatched
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.lowering.rebatching_proof import BOUND, prove_rebatching
from tests.lowering.saved_models import Separable
from tests.lowering.vision_models import RecurrentClassifier, SmallUNet
from tests.mlp import build_mlp, data, start, weights_of


class Flat(nn.Module):
    """A flattening to stored sizes, with batch normalization before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        return self.head(x.view(x.shape[0], -1))


class Tokens(nn.Module):
    """Attention over tokens; a class token that was expanded to the batch, or a mean."""

    def __init__(self, class_token: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(20, 16), nn.Parameter(torch.randn(1, 6, 16))
        self.token = nn.Parameter(torch.randn(1, 1, 16)) if class_token else None
        self.norm, self.qkv, self.out, self.head = (
            nn.LayerNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, 3),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions[:, : x.shape[1]]
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 16))
        return self.head(x[:, 0] if self.token is not None else x.mean(1))


class Recurrent(nn.Module):
    """A recurrent net over steps, whose initial states the exporter stores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = getattr(nn, kind)(6, 8, bidirectional=kind == "GRU")
        self.head = nn.Linear(16 if kind == "GRU" else 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x.transpose(0, 1))[0][-1])


class Resized(nn.Module):
    """An image resized to stored sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.conv(x), size=(12, 12), mode="bilinear").flatten(1)


class Squeezed(nn.Module):
    """A batch of one that is squeezed away and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.squeeze(0)).relu()).unsqueeze(0)


class Scaled(nn.Module):
    """A second input that has no batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x) * scale


def _encoder() -> nn.Module:
    """Steps are joined with the batch in one axis, steps first, and taken apart again."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


IMAGE, STEPS, TOKENS = torch.randn(1, 3, 8, 8), torch.randn(1, 5, 6), torch.randint(0, 20, (1, 5))
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "flat": (Flat, (IMAGE,)),
    "separable": (Separable, (torch.randn(1, 3, 16, 16),)),
    "unet": (SmallUNet, (torch.randn(1, 3, 16, 16),)),
    "resized": (Resized, (IMAGE,)),
    "mean of tokens": (lambda: Tokens(False), (TOKENS,)),
    "class token": (lambda: Tokens(True), (TOKENS,)),
    "encoder": (_encoder, (torch.randn(1, 5, 16),)),
    "lstm": (lambda: Recurrent("LSTM"), (STEPS,)),
    "gru": (lambda: Recurrent("GRU"), (STEPS,)),
    "rnn": (lambda: Recurrent("RNN"), (STEPS,)),
    "recurrent classifier": (lambda: RecurrentClassifier("LSTM"), (TOKENS,)),
    "squeezed": (Squeezed, (STEPS,)),
    "an input without batch": (Scaled, (STEPS, torch.randn(4))),
}  # fmt: skip
OF_TWO = ("flat", "mean of tokens", "class token", "lstm", "recurrent classifier")


def _export(module: nn.Module, inputs: tuple[Tensor, ...], dynamo: bool) -> onnx.ModelProto:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        if dynamo:
            exported = torch.onnx.export(module, inputs, dynamo=True, opset_version=18, verbose=False)
            assert exported is not None
            return exported.model_proto
        file = io.BytesIO()
        torch.onnx.export(module, inputs, file, dynamo=False, opset_version=17)
        return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(("name", "samples"), [*((name, 1) for name in CASES), *((name, 2) for name in OF_TWO)])
def test_any_number_of_samples_is_computed_as_the_module_does(name: str, samples: int, dynamo: bool) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    module = make().eval()
    inputs = tuple(x.repeat(samples, *(1,) * (x.dim() - 1)) if x.shape[0] == 1 else x for x in inputs)
    model = _export(module, inputs, dynamo)
    assert prove_rebatching(model) <= BOUND
    graph = make_training_graph(model, rebatch=True)
    assert graph.rebatching is not None
    assert graph.rebatching.size == samples
    net = OnnxModule(graph)
    more = tuple(
        x if x.dim() == 1 else torch.randint(0, 20, (7, 5)) if x.dtype == torch.int64 else torch.randn(7, *x.shape[1:])
        for x in inputs
    )
    if name == "squeezed":
        with torch.no_grad():
            expected = torch.cat([module(x) for x in more[0].split(1)])
    else:
        expected = module(*more)
    torch.testing.assert_close(net(*more).detach(), expected.detach(), rtol=1e-4, atol=1e-5)


class Mixed(nn.Module):
    """Each of these computes one sample with the help of others, or one of them only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.how == "mean":
            return y - y.mean((0, 1), keepdim=True)
        if self.how == "softmax":
            return y.softmax(0)
        if self.how == "cumulated":
            return y.cumsum(0)
        if self.how == "joined":
            return y.reshape(5, 4).softmax(0)
        return y[0]


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("how", ["mean", "softmax", "cumulated", "joined", "first"])
def test_models_that_mix_samples_are_refused(how: str, dynamo: bool) -> None:
    model = _export(Mixed(how).eval(), (STEPS,), dynamo)
    with pytest.raises(NotRebatched, match=r"mixes the samples of a batch|its samples are not independent|merged with"):
        prove_rebatching(model)


def test_samples_in_another_axis_of_the_output_are_refused() -> None:
    """A batch of one that is squeezed away, and an axis of one that comes behind the others instead."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[1, 4, 3] x) => (float[1, 3, 4] y)
        <int64[1] first = {0}> { a = Squeeze (x, first) b = Transpose <perm = [1, 0]> (a) y = Unsqueeze (b, first) }"""
    )
    with pytest.raises(NotRebatched, match=r"its output 'y' has the batch in axis 2, merged with other axes"):
        prove_rebatching(model)


def test_graphs_in_a_node_are_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[1, 4] x, bool c) => (float[1, 4] y)
        { y = If (c) <then_branch = a () => (float[1, 4] p) { p = Relu (x) },
                      else_branch = b () => (float[1, 4] q) { q = Neg (x) }> }"""
    )
    with pytest.raises(NotRebatched, match=r"node 'y' \(If\) contains subgraphs"):
        prove_rebatching(model)


def _fixed_mlp(folder: Path, samples: int = 1, mixed: bool = False, **options: bool) -> Path:
    """`mlp.onnx` for a fixed number of samples, its input reshaped to stored sizes on the way."""
    model = build_mlp(**options)  # type: ignore[arg-type]
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = samples
    model.graph.node[0].input[0] = "flat"
    model.graph.node.insert(0, helper.make_node("Reshape", ["x", "sizes"], ["flat"], name="flatten"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([samples, 6], np.int64), "sizes"))
    if mixed:
        model.graph.node[-1].output[0] = "scores"
        model.graph.node.append(helper.make_node("Softmax", ["scores"], ["shares"], axis=0, name="over_samples"))
        model.graph.node.append(helper.make_node("Identity", ["shares"], ["logits"]))
    onnx.save(model, folder / "mlp.onnx")
    return folder / "mlp.onnx"


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_run_with_another_batch_is_that_of_a_file_without_a_fixed_one(
    samples: int, normalized: bool, tmp_path: Path
) -> None:
    """Bit for bit, batch normalization in training mode included; the exported file keeps its own sizes."""
    fixed, free = tmp_path / "fixed", tmp_path / "free"
    results = []
    for folder in (fixed, free):
        folder.mkdir()
        if folder is fixed:
            _fixed_mlp(folder, samples, normalized=normalized)
        else:
            onnx.save(build_mlp(normalized=normalized), folder / "mlp.onnx")
        runner, recorder = start(folder, paths={"output_dir": folder / "out"})
        runner.run(InMemoryDataLoader(data(32)), InMemoryDataLoader(data(11, seed=1)))
        runner.end_training(InMemoryDataLoader(data(11, seed=1)))
        results.append((weights_of(runner), [report.loss for report in recorder.steps], runner))
    assert results[0][1] == results[1][1]
    for name, tensor in results[1][0].items():
        assert torch.equal(results[0][0][name], tensor), name
    notes = results[0][2].graph.notes
    assert notes[0].startswith(f"the batch size in the model is fixed to {samples}; for training the graph was ")
    assert notes[0].endswith("The exported model keeps its batch size.")
    trained = onnx.load(fixed / "out" / "mlp_trained.onnx")
    assert trained.graph.input[0].type.tensor_type.shape.dim[0].dim_value == samples
    session = onnxruntime.InferenceSession(fixed / "out" / "mlp_trained.onnx")
    assert session.run(None, {"x": data(samples)["x"]})[0].shape == (samples, 4)


def test_a_run_that_cannot_have_another_batch_says_what_to_do(tmp_path: Path) -> None:
    _fixed_mlp(tmp_path, mixed=True)
    with pytest.raises(ParametersError) as raised:
        start(tmp_path)
    text = str(raised.value)
    assert text.startswith(
        "training.batch_size is 4, but the batch size in the model is fixed to 1, and the graph cannot be rewritten "
        "for another, because its samples are not independent: 'logits' differs by "
    )
    assert (
        "Set training.batch_size and training.eval_batch_size to 1 and training.gradient_accumulation_steps to 4, "
        "which makes the same updates, or export the model with a dynamic batch axis" in text
    )
    runner, _ = start(tmp_path, training={"batch_size": 1, "gradient_accumulation_steps": 4, "num_train_steps": 8})
    runner.run(InMemoryDataLoader(data(32)))


def test_a_run_with_the_batch_of_the_file_is_left_alone(tmp_path: Path) -> None:
    _fixed_mlp(tmp_path, 4)
    runner, _ = start(tmp_path)
    assert runner.graph.rebatching is None


def test_to_torch_offers_any_batch_size(tmp_path: Path) -> None:
    """Outputs and gradients of a batch are those of a file with an open batch; the exported file keeps its own size."""
    model = _fixed_mlp(tmp_path)
    net, free = onward.to_torch(model, any_batch_size=True), onward.to_torch(build_mlp())
    x = torch.from_numpy(data(7)["x"])
    torch.testing.assert_close(net(x), free(x), rtol=0, atol=0)
    for one in (net, free):
        one(x).square().mean().backward()
    for name, weight in free.weights.items():
        torch.testing.assert_close(net.weights[name].grad, weight.grad, rtol=0, atol=0)
    onward.export(net, tmp_path / "exported.onnx")
    exported = onnx.load(tmp_path / "exported.onnx")
    assert exported.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    with pytest.raises(ModelError, match=r"shape \[7, 6\]|expects \[1, 6\]|\[1, 6\]"):
        onward.to_torch(model)(x)
    assert onward.to_torch(build_mlp(), any_batch_size=True)(x).shape == (7, 4)


def test_to_torch_refuses_any_batch_size_where_samples_mix(tmp_path: Path) -> None:
    model = _fixed_mlp(tmp_path, mixed=True)
    with pytest.raises(ModelError) as raised:
        onward.to_torch(model, any_batch_size=True)
    text = str(raised.value)
    assert text.startswith(
        "any_batch_size is set, but the batch size in the model is fixed to 1, and the graph cannot be rewritten for "
        "another, because its samples are not independent: 'logits' differs by "
    )
    assert "Pass batches of 1 and accumulate their gradients, or export the model with a dynamic batch axis" in text
