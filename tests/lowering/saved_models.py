"""Networks as ONNX Runtime saves them: quantized in every form of its quantizer, in fp16, optimized at every level."""

from __future__ import annotations

import io
import logging
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime import quantization
from torch import Tensor, nn

from tests.lowering.vision_models import RecurrentClassifier

LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
STATIC: dict[str, dict[str, Any]] = {
    "qdq": {"quant_format": quantization.QuantFormat.QDQ, "per_channel": True},
    "qdq int8": {
        "quant_format": quantization.QuantFormat.QDQ,
        "activation_type": quantization.QuantType.QInt8,
    },
    "qoperator": {"quant_format": quantization.QuantFormat.QOperator},
    "qoperator per channel": {
        "quant_format": quantization.QuantFormat.QOperator,
        "per_channel": True,
        "activation_type": quantization.QuantType.QUInt8,
        "weight_type": quantization.QuantType.QInt8,
    },
}
FORMS = ("float", "fp16", "dynamic", *STATIC)
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
TOKENS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(3))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, several activations, branches that are added and concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.ReLU6(), nn.Conv2d(8, 16, 1), nn.LeakyReLU())
        self.beside = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Sigmoid())
        self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(32, 8, 3, 1, 1)
        self.head = nn.Sequential(
            nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5), nn.Softmax(1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = self.deep(x), self.beside(x)
        return self.head(self.last(self.pool(torch.cat([left + right, left * right], 1))))


class Transformer(nn.Module):
    """Attention and a feed-forward layer with normalization before each, in operators that opset 11 has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.wide, self.narrow, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        normal = self.norms[0](x)
        q, k, v = (f(normal).reshape(2, 5, 4, 4).transpose(1, 2) for f in self.projections[:3])
        mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        x = x + self.projections[3](mixed.transpose(1, 2).reshape(2, 5, 16))
        return self.head(x + self.narrow(torch.nn.functional.gelu(self.wide(self.norms[1](x)))))


NETWORKS = {
    "images": (Separable, IMAGES),
    "recurrent": (lambda: RecurrentClassifier("LSTM"), TOKENS),
    "transformer": (Transformer, TOKENS),
}


@dataclass(frozen=True)
class Saved:
    """A model as saved, what is fed to it, and what onnxruntime computes from that."""

    model: onnx.ModelProto
    data: Tensor
    expected: np.ndarray


class _Samples(quantization.CalibrationDataReader):
    def __init__(self, feeds: dict[str, np.ndarray]) -> None:
        self.feeds = iter([feeds])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def _with_statistics(module: nn.Module) -> nn.Module:
    """Running statistics and normalization weights as after some training."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_var, 0.5, 1.5)  # type: ignore[arg-type]
            nn.init.normal_(part.running_mean, std=0.2)  # type: ignore[arg-type]
        if isinstance(part, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(part.weight, 0.8, 1.2)
            nn.init.normal_(part.bias, std=0.1)
    return module


def trace(module: nn.Module, data: Tensor, opset: int = 13) -> onnx.ModelProto:
    """torch's older exporter, which stores no shapes of weights that onnxruntime's quantizer would trip over."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (data,), file, dynamo=False, opset_version=opset, input_names=["x"])  # type: ignore[arg-type]
    return onnx.load_from_string(file.getvalue())


@lru_cache(maxsize=64)
def in_form(network: str, form: str) -> onnx.ModelProto:
    """A network in fp32, in fp16 or quantized."""
    torch.manual_seed(0)
    make, data = NETWORKS[network]
    model = trace(_with_statistics(make()).eval(), data)
    if form == "float":
        return model
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        onnx.save(onnx.shape_inference.infer_shapes(model), before)
        level, root = logging.root.level, logging.getLogger()
        root.setLevel(logging.ERROR)
        try:
            if form == "fp16":
                from onnxruntime.transformers.float16 import convert_float_to_float16

                return convert_float_to_float16(onnx.load(before), keep_io_types=True)
            if form == "dynamic":
                quantization.quantize_dynamic(before, after)
            else:
                quantization.quantize_static(before, after, _Samples({"x": data.numpy()}), **STATIC[form])
        finally:
            root.setLevel(level)
        return onnx.load(after)


def run_as_saved(model: onnx.ModelProto, data: Tensor) -> np.ndarray:
    """The first output, by onnxruntime without further optimization."""
    return _session(model, "none").run(None, {"x": data.numpy()})[0]


def optimized(model: onnx.ModelProto, level: str, folder: Path) -> onnx.ModelProto:
    """What onnxruntime saves after optimizing at a level."""
    _session(model, level, folder / "optimized.onnx")
    return onnx.load(folder / "optimized.onnx")


def _session(model: onnx.ModelProto, level: str, saved: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, LEVELS[level])
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if saved is not None:
        options.optimized_model_filepath = str(saved)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=256)
def saved_by_onnxruntime(network: str, form: str, level: str) -> Saved:
    """What onnxruntime saves of a network in some form after optimizing at a level."""
    data = NETWORKS[network][1]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "saved.onnx"
        _session(in_form(network, form), level, path)
        model = onnx.load(path)
    return Saved(model, data, run_as_saved(model, data))
