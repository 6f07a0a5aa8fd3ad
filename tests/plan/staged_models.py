"""Networks to cut: an MLP as bare ONNX, a U-Net with skip connections, and the reference models in small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onward.graph.loss import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.models import create_model

GPT2 = {"size": "tiny", "layers": 4, "heads": 2, "width": 16, "vocab_size": 31, "context_length": 12, "dropout": 0.0}
BERT = {"size": "tiny", "layers": 4, "heads": 2, "width": 16, "vocab_size": 31, "context_length": 12, "dropout": 0.0}


class Sketch:
    """Writes an ONNX graph by hand, one node a call, with small random weights."""

    def __init__(self, seed: int = 0) -> None:
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self._random = np.random.default_rng(seed)

    def input(self, name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.inputs.append(value)
        return value

    def weight(self, name: str, *shape: int, array: Any = None) -> ir.Value:
        if array is None:
            array = self._random.normal(0, (2.0 / max(1, int(np.prod(shape[1:])))) ** 0.5, shape).astype(np.float32)
        tensor = ir.Tensor(np.asarray(array), name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.initializers.append(value)
        return value

    def node(self, op_type: str, name: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A node whose output has its name."""
        output = ir.Value(name=name)
        found = ir.convenience.convert_attributes(attributes)
        self.nodes.append(ir.Node("", op_type, list(inputs), found, outputs=[output], name=f"node_{name}"))
        return output

    def model(self, *outputs: ir.Value, opset: int = 18) -> ir.Model:
        for value in outputs:
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        graph = ir.Graph(
            self.inputs, outputs, nodes=self.nodes, initializers=self.initializers, opset_imports={"": opset}, name="g"
        )
        return ir.Model(graph, ir_version=10)


def mlp(layers: int = 4, width: int = 8) -> ir.Model:
    """Linear layers with ReLU, named fc0, fc1, ...: values fc<i>, relu<i>; the last gives `logits`."""
    sketch = Sketch()
    value = sketch.input("x", ["batch", width])
    for index in range(layers):
        weight, bias = sketch.weight(f"fc{index}.weight", width, width), sketch.weight(f"fc{index}.bias", width)
        last = index == layers - 1
        value = sketch.node("Gemm", "logits" if last else f"fc{index}", value, weight, bias)
        if not last:
            value = sketch.node("Relu", f"relu{index}", value)
    return sketch.model(value)


def u_net(depth: int = 3, channels: int = 4) -> ir.Model:
    """Down and up again, every level joined with its mirror image by a skip; batch normalization at every convolution.

    Values down<i>, up<i>; the output `image` has the shape of the input `x` [batch, 1, 16, 16].
    """
    sketch = Sketch()
    value = sketch.input("x", ["batch", 1, 16, 16])
    skips = []

    def block(name: str, source: ir.Value, before: int, after: int) -> ir.Value:
        made = sketch.node("Conv", f"{name}.conv", source, sketch.weight(f"{name}.weight", after, before, 3, 3),
                           pads=[1, 1, 1, 1])  # fmt: skip
        scale = sketch.weight(f"{name}.scale", array=np.linspace(0.5, 1.5, after, dtype=np.float32))
        shift = sketch.weight(f"{name}.shift", array=np.linspace(-0.5, 0.5, after, dtype=np.float32))
        mean = sketch.weight(f"{name}.mean", array=np.zeros(after, np.float32))
        variance = sketch.weight(f"{name}.variance", array=np.ones(after, np.float32))
        made = sketch.node("BatchNormalization", f"{name}.norm", made, scale, shift, mean, variance)
        return sketch.node("Relu", name, made)

    before = 1
    for level in range(depth):
        value = block(f"down{level}", value, before, channels)
        before = channels
        if level < depth - 1:
            skips.append(value)
            value = sketch.node("MaxPool", f"pool{level}", value, kernel_shape=[2, 2], strides=[2, 2])
    for level in reversed(range(depth - 1)):
        weight = sketch.weight(f"wide{level}.weight", channels, channels, 2, 2)
        up = sketch.node("ConvTranspose", f"wide{level}", value, weight, strides=[2, 2])
        joined = sketch.node("Concat", f"joined{level}", up, skips[level], axis=1)
        value = block(f"up{level}", joined, 2 * channels, channels)
    image = sketch.node("Conv", "image", value, sketch.weight("out.weight", 1, channels, 1, 1),
                        sketch.weight("out.bias", 1))  # fmt: skip
    image.shape = ir.Shape(["batch", 1, 16, 16])
    return sketch.model(image)


def graph_of(name: str) -> TrainingGraph:
    """A training graph by name: mlp, gpt2, bert, squeezenet, u_net."""
    if name == "mlp":
        return make_training_graph(mlp(), loss=LossSpec("softmax_cross_entropy", prediction="logits", label="labels"))
    if name == "u_net":
        return make_training_graph(u_net(), loss=LossSpec("mean_squared_error", prediction="image", label="target"))
    if name == "gpt2":
        model = create_model("gpt2", **GPT2)
        return make_training_graph(
            model, loss=LossSpec("softmax_cross_entropy", prediction="logits", label="labels", ignore_index=-1),
            count_correct=True,
        )  # fmt: skip
    if name == "bert":
        return make_training_graph(create_model("bert", **BERT), loss=LossSpec("bert"), count_correct=True)
    assert name == "squeezenet"
    model = create_model("squeezenet", classes=5, image_size=32, dropout=0.0)
    output = str(model.graph.outputs[0].name)
    return make_training_graph(model, loss=LossSpec("softmax_cross_entropy", prediction=output, label="labels"))


def batch_of(name: str, seed: int, samples: int = 2) -> Mapping[str, torch.Tensor]:
    """Random features of a micro-batch for `graph_of(name)`."""
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    if name == "mlp":
        return {"x": torch.randn(samples, 8, generator=generator), "labels": whole(8, samples)}
    if name == "u_net":
        return {f: torch.randn(samples, 1, 16, 16, generator=generator) for f in ("x", "target")}
    if name == "gpt2":
        return {"input_ids": whole(31, samples, 9), "labels": whole(31, samples, 9)}
    if name == "bert":
        return {
            "input1": whole(31, samples, 10), "input2": whole(2, samples, 10), "input3": torch.ones(samples, 10).long(),
            "masked_lm_positions": whole(10, samples, 3), "masked_lm_ids": whole(30, samples, 3) + 1,
            "next_sentence_labels": whole(2, samples),
        }  # fmt: skip
    return {"images": torch.randn(samples, 3, 32, 32, generator=generator), "labels": whole(5, samples)}
