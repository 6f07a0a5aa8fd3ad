"""Models that ONNX Runtime optimized and saved compute and differentiate like the module they came from."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import onward
from onward.errors import OperatorError
from tests.lowering.test_exports_vision import IMAGE, TOKENS, _close, _export
from tests.lowering.vision_models import RecurrentClassifier, SmallResNet, SmallUNet, randomize


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


def _optimize(model: onnx.ModelProto, level: str, folder: Path) -> onnx.ModelProto:
    """What onnxruntime saves after optimizing at a level."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


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
    model = _optimize(_export(module, (data,), 18, optimize=True), "ORT_ENABLE_EXTENDED", tmp_path)
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


def test_a_layout_of_one_processor_is_refused_with_the_way_out(tmp_path: Path) -> None:
    module = randomize(SmallResNet()).eval()
    model = _optimize(_export(module, (IMAGE,), 18, optimize=True), "ORT_ENABLE_ALL", tmp_path)
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
