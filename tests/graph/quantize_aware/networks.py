"""Networks that are trained to be quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from onward.data.in_memory import InMemoryDataLoader
from onward.runner import TrainingRunner
from tests.graph.exported import export
from tests.mlp import data, start

SLOW_SCALES = {"optimizer_attributes": [{"weights": "*_scale", "learning_rate_factor": 0.01}]}


INT8 = {"weights": "int8"}


def build_image_net() -> onnx.ModelProto:
    """`x [n, 1, 8, 8]` -> Conv, Relu, MaxPool, Conv, Relu, Gemm, Relu, MatMul -> `logits [n, 4]`."""
    draw = np.random.default_rng(3).standard_normal
    tensors = {
        "c1": draw((6, 1, 3, 3)) / 2, "d1": draw(6) / 9, "c2": draw((8, 6, 3, 3)) / 6, "d2": draw(8) / 9,
        "g": draw((16, 32)) / 6, "h": draw(16) / 9, "m": draw((16, 4)) / 4,
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "c1", "d1"], ["a1"], pads=[1, 1, 1, 1], name="conv1"),
        helper.make_node("Relu", ["a1"], ["r1"], name="relu1"),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2], name="pool1"),
        helper.make_node("Conv", ["p1", "c2", "d2"], ["a2"], name="conv2"),
        helper.make_node("Relu", ["a2"], ["r2"], name="relu2"),
        helper.make_node("Flatten", ["r2"], ["flat"], name="flatten"),
        helper.make_node("Gemm", ["flat", "g", "h"], ["a3"], transB=1, name="gemm"),
        helper.make_node("Relu", ["a3"], ["r3"], name="relu3"),
        helper.make_node("MatMul", ["r3", "m"], ["logits"], name="matmul"),
    ]
    graph = helper.make_graph(
        nodes, "images",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def pictures(samples: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    label = generator.integers(0, 4, samples)
    shapes = generator.standard_normal((4, 1, 8, 8))
    return {"x": (shapes[label] + generator.standard_normal((samples, 1, 8, 8)) / 2).astype(np.float32), "label": label}


def trained(folder: Path, model: onnx.ModelProto, asked: dict[str, Any], steps: int = 8, **more: Any) -> TrainingRunner:
    onnx.save(model, folder / "mlp.onnx")
    runner, _ = start(
        folder, quantize_aware=asked, paths={"output_dir": folder / "out"}, optimizer=SLOW_SCALES,
        training={"num_train_steps": steps}, **more,
    )  # fmt: skip
    runner.run(InMemoryDataLoader(pictures(64) if model.graph.name == "images" else data(32)))
    runner.end_training()
    return runner


class Mobile(nn.Module):
    """Convolutions with batch norm and ReLU6, one of them depthwise, around a skip; a linear layer with batch norm."""

    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int, size: int, **options: Any) -> nn.Sequential:
            conv = nn.Conv2d(before, after, size, padding=size // 2, bias=size == 3, **options)
            return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU6())

        self.stem, self.expand, self.depth = block(1, 8, 3, stride=2), block(8, 16, 1), block(16, 16, 3, groups=16)
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        generator = torch.Generator().manual_seed(0)
        for name, tensor in self.state_dict().items():
            if tensor.dim() == 1 and "num_batches" not in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + (0.5 if "weight" in name else 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head((x + self.project(self.depth(self.expand(x)))).mean((2, 3)))


class Transformer(nn.Module):
    """Linear layers of three axes, attention, layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(x.squeeze(1))).mean(1))


def exported(module: nn.Module, path: Path, dynamo: bool) -> Path:
    """As exporters write it that fold nothing: batch norms and transposed weights stay, where that can be asked for."""
    torch.manual_seed(0)
    names = {"input_names": ["x"], "output_names": ["logits"]}
    older = {
        "dynamic_axes": {"x": {0: "n"}}, "training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False
    }  # fmt: skip
    newer = {"dynamic_shapes": ({0: torch.export.Dim("n")},)}
    return export(module.eval(), (torch.rand(2, 1, 8, 8),), path, 18, dynamo, **names, **(newer if dynamo else older))
