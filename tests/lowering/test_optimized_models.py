"""Models that ONNX Runtime optimized or onnxsim simplified compute and differentiate like the module they came from."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import onward
from onward.errors import OperatorError
from tests.lowering.saved_models import Transformer, optimized
from tests.lowering.test_exports_vision import IMAGE, TOKENS, _close, _export
from tests.lowering.vision_models import RecurrentClassifier, SmallResNet, SmallUNet, randomize
from tests.one_node import run_onnxruntime


class Encoder(nn.Module):
    """A transformer encoder of two layers over learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.positions = nn.Parameter(torch.randn(5, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens) + self.positions).mean(1))


CASES = {
    "resnet": (SmallResNet, IMAGE, "FusedConv"),
    "unet": (SmallUNet, IMAGE, "QuickGelu"),
    "lstm": (lambda: RecurrentClassifier("LSTM"), TOKENS, "LSTM"),
    "encoder": (Encoder, TOKENS, "SkipLayerNormalization"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_model_optimized_by_onnxruntime_trains(name: str, tmp_path: Path) -> None:
    """Outputs to 1e-4; gradients of every weight that kept its name and its shape, unless batch norm scaled it."""
    make, data, fused = CASES[name]
    module = randomize(make()).eval()
    model = optimized(_export(module, (data,), 18, optimize=True), "extended", tmp_path)
    assert any(node.op_type == fused for node in model.graph.node)
    net = onward.to_torch(model)
    expected, actual = module(data), net(data)
    _close(actual, expected, expected.abs().max().item())
    expected.square().sum().backward()
    actual.square().sum().backward()
    parameters = dict(module.named_parameters())
    kept = [n for n, w in net.weights.items() if n in parameters and torch.equal(w, parameters[n])]
    assert kept
    largest = max(parameters[n].grad.abs().max().item() for n in kept)
    for weight in kept:
        _close(net.weights[weight].grad, parameters[weight].grad, largest)


@pytest.mark.parametrize("opset", [11, 13, 16])
def test_layer_normalization_below_opset_17_trains(opset: int, tmp_path: Path) -> None:
    """onnxruntime's optimizer writes it into the standard's domain, which has it from opset 17 on."""
    torch.manual_seed(0)
    module, file = randomize(Transformer()).eval(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (TOKENS,), file, dynamo=False, opset_version=opset)
    model = optimized(onnx.load_from_string(file.getvalue()), "extended", tmp_path)
    assert sum(node.op_type == "LayerNormalization" and node.domain == "" for node in model.graph.node) == 2
    net = onward.to_torch(model)
    expected, actual = module(TOKENS), net(TOKENS)
    _close(actual, expected, expected.abs().max().item())
    expected.square().sum().backward()
    actual.square().sum().backward()
    parameters = dict(module.named_parameters())
    largest = max(p.grad.abs().max().item() for p in parameters.values())
    norms = [name for name in net.weights if "norms" in name]
    assert len(norms) == 4
    for name in norms:
        _close(net.weights[name].grad, parameters[name].grad, largest)
    onward.export(net, tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    np.testing.assert_array_equal(run_onnxruntime(trained, TOKENS)[0], run_onnxruntime(model, TOKENS)[0])


def test_constants_of_written_out_operators_do_not_train(tmp_path: Path) -> None:
    """onnxruntime computes no Relu in fp16 on a CPU: it saves the operator's body, with its zero."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    torch.manual_seed(0)
    exported = _export(randomize(SmallResNet()).eval(), (IMAGE,), 18, optimize=True)
    model = optimized(convert_float_to_float16(exported, keep_io_types=True), "none", tmp_path)
    bodies = [tensor.name for tensor in model.graph.initializer if tensor.name.startswith("_inlfunc_")]
    assert bodies
    net = onward.to_torch(model)
    assert len(net.weights) == 16
    assert all(net.graph.frozen[name] == "a rank-0 constant" for name in bodies if name in net.graph.frozen)
    assert not set(bodies) & set(net.weights)


def test_a_layout_of_one_processor_is_refused_with_the_way_out(tmp_path: Path) -> None:
    module = randomize(SmallResNet()).eval()
    model = optimized(_export(module, (IMAGE,), 18, optimize=True), "all", tmp_path)
    if not any(node.domain == "com.microsoft.nchwc" for node in model.graph.node):
        pytest.skip("onnxruntime has no blocked layout for this processor")
    with pytest.raises(OperatorError, match="save it with ORT_ENABLE_EXTENDED"):
        onward.to_torch(model)


def test_bert_fused_by_the_transformers_optimizer_trains(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnxruntime.transformers import optimizer
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, attn_implementation="eager",
    )  # fmt: skip

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(config, add_pooling_layer=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.bert(input_ids=tokens).last_hidden_state

    module = randomize(Bert()).eval()
    onnx.save(_export(module, (TOKENS,), 18, optimize=True), tmp_path / "bert.onnx")
    fused = optimizer.optimize_model(str(tmp_path / "bert.onnx"), "bert", num_heads=2, hidden_size=16, opt_level=0)
    fused.save_model_to_file(str(tmp_path / "fused.onnx"))
    model = onnx.load(tmp_path / "fused.onnx")
    assert {"SkipLayerNormalization", "BiasGelu"} <= {node.op_type for node in model.graph.node}
    net = onward.to_torch(model)
    expected, actual = module(TOKENS), net(TOKENS)
    _close(actual, expected, expected.abs().max().item())
    expected.square().sum().backward()
    actual.square().sum().backward()
    word = "bert.embeddings.word_embeddings.weight"
    gradient = dict(module.named_parameters())[word].grad
    # torch gives the padding token no gradient; the exported graph knows nothing of it.
    _close(net.weights[word].grad[1:], gradient[1:], gradient.abs().max().item())


class SmallAttention(nn.Module):
    """Attention of two heads whose queries, keys and values are one projection, a mean over tokens, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attn(x).reshape(2, 4, 2, 3).transpose(1, 2)
        mixed = (heads @ heads.transpose(2, 3) / 3**0.5).softmax(-1) @ heads
        return self.head(mixed.transpose(1, 2).reshape(2, 4, 6).mean(1))


SIMPLIFIED = """<ir_version: 8, opset_import: ["": 17], producer_name: "pytorch">
net (float[2, 4, 6] x) => (float[2, 3] y) <int64[4] _v_45 = {2, 4, 2, -1}, int64[3] _v_46 = {2, 4, -1},
 int64[2] _v_59 = {-1, 6}>
{
  [Constant_0] root = Constant <value = float {1.7320508}> ()
  [Reshape_1] _v_58 = Reshape (x, _v_59)
  [Gemm_2] _v_316 = Gemm (_v_58, turned, "attn.bias")
  [Reshape_3] split = Reshape (_v_316, _v_45)
  [Transpose_4] q = Transpose <perm = [0, 2, 1, 3]> (split)
  [Transpose_5] k = Transpose <perm = [0, 2, 3, 1]> (split)
  [MatMul_6] scores = MatMul (q, k)
  [Div_7] scaled = Div (scores, root)
  [Softmax_8] shares = Softmax <axis = -1> (scaled)
  [MatMul_9] mixed = MatMul (shares, q)
  [Transpose_10] back = Transpose <perm = [0, 2, 1, 3]> (mixed)
  [Reshape_11] joined = Reshape (back, _v_46)
  [ReduceMean_12] mean = ReduceMean <axes = [1], keepdims = 0> (joined)
  [Gemm_13] y = Gemm <transB = 1> (mean, "head.weight", "head.bias")
}"""
"""What onnxsim 0.8.1 makes of this module's export: shapes and a transposed weight folded, names made up."""


def test_a_model_simplified_by_onnxsim_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = SmallAttention(), torch.randn(2, 4, 6)
    named = {"turned" if name == "attn.weight" else name: p for name, p in module.named_parameters()}
    model = onnx.parser.parse_model(SIMPLIFIED)
    for name, parameter in named.items():
        array = (parameter.T if name == "turned" else parameter).detach().numpy()
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    net = onward.to_torch(model)
    assert set(net.weights) == set(named)
    optimizers = [torch.optim.Adam(parameters, lr=0.01) for parameters in (net.weights.values(), named.values())]
    for _ in range(5):
        losses = []
        for one, optimizer in zip((net, module), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append((one(x) - 1).square().mean())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    onward.export(net, tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    for tensor in trained.graph.initializer:
        if tensor.name in named:
            array = numpy_helper.to_array(tensor)
            expected = named[tensor.name].detach()
            torch.testing.assert_close(
                torch.from_numpy((array.T if tensor.name == "turned" else array).copy()), expected, rtol=1e-4, atol=1e-5
            )
    np.testing.assert_allclose(run_onnxruntime(trained, x)[0], module(x).detach(), rtol=1e-4, atol=1e-5)


def test_batch_normalization_that_onnxsim_folded_is_said() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17], metadata_props: ["onnxsim.removed_nodes":
        "BatchNormalization (/stem/norm), Identity (same), BatchNormalization (/last/norm)"]>
        net (float[n, 2, 4] x) => (float[n, 1, 4] y) <float[1, 2, 1] _v_65 = {1, 2}, float[1] _v_66 = {3}>
        { y = Conv (x, _v_65, _v_66) }"""
    )
    (note,) = onward.to_torch(model).graph.notes
    assert note.startswith(
        "onnxsim folded batch normalization into the layers before it: 2 nodes ('/stem/norm', '/last/"
    )
    assert note.endswith("onnxsim.simplify(..., skipped_optimizers=['fuse_bn_into_conv']) keeps them.")
