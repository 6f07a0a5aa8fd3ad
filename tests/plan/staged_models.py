"""Networks to cut: an MLP as bare ONNX, a U-Net with skip connections, and the reference models in small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.models import create_model
from onward.plan.pipeline.joined_models import join_stage_models

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


AWKWARD_STAGES = {
    "fc0": 0, "relu0": 0, "turned": 0, "flag": 0, "best": 0,
    "looked": 1, "back": 1, "fc1": 1, "sum1": 1, "side_fc": 1,
    "gated": 2, "fc2": 2,
    "total": 3, "shaped": 3, "added": 3, "logits": 3,
}  # fmt: skip
"""A stage for every node of `awkward` that is bound to one."""


def awkward() -> ir.Model:
    """Everything that makes cutting hard, over four stages as in `AWKWARD_STAGES`.

    A value that is not in one piece of memory (`turned`) and one whose gradient is not (`fc2`); integers (`best`) and
    booleans (`flag`) that depend on activations; a branch that depends on nothing received (`side_fc`); a shape of an
    early activation read late (`size`); an input-only mask read on two stages; a weight read on two stages (`w1`).
    """
    sketch = Sketch(seed=3)
    x, side = sketch.input("x", ["batch", 6]), sketch.input("side", ["batch", 6])
    w1, b1 = sketch.weight("w1", 8, 8), sketch.weight("b1", 8)
    zero = sketch.weight("zero", array=np.zeros((), np.float32))
    fc0 = sketch.node("Gemm", "fc0", x, sketch.weight("w0", 6, 8), sketch.weight("b0", 8))
    relu0 = sketch.node("Relu", "relu0", fc0)
    turned = sketch.node("Transpose", "turned", relu0, perm=[1, 0])
    flag = sketch.node("Greater", "flag", fc0, sketch.weight("low", array=np.full((), -0.5, np.float32)))
    best = sketch.node("ArgMax", "best", fc0, axis=1, keepdims=0)
    size = sketch.node("Shape", "size", relu0)
    mask = sketch.node("Cast", "mask", sketch.node("Greater", "above", x, zero), to=1)
    scale = sketch.node("ReduceMean", "scale", mask, sketch.weight("axes", array=np.array([1])), keepdims=1)
    looked = sketch.node("Gather", "looked", sketch.weight("table", 8, 8), best)
    back = sketch.node("Transpose", "back", turned, perm=[1, 0])
    fc1 = sketch.node("Gemm", "fc1", back, w1, b1)
    sum1 = sketch.node("Sum", "sum1", fc1, looked, scale)
    side_fc = sketch.node("Gemm", "side_fc", side, sketch.weight("ws", 6, 8))
    gated = sketch.node("Where", "gated", flag, sum1, scale)
    fc2 = sketch.node("Gemm", "fc2", gated, sketch.weight("w2", 8, 8))
    total = sketch.node("ReduceSum", "total", fc2, sketch.weight("last", array=np.array([1])), keepdims=1)
    shaped = sketch.node("Reshape", "shaped", side_fc, size)
    added = sketch.node("Add", "added", shaped, total)
    logits = sketch.node("Gemm", "logits", added, w1, sketch.weight("b3", 8))
    logits.shape = ir.Shape(["batch", 8])
    return sketch.model(logits)


def two_towers() -> ir.Model:
    """Two chains that never meet, with an output each: `a` and `b`."""
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    ends = []
    for tower in "ab":
        first = sketch.node("Gemm", f"{tower}0", x, sketch.weight(f"{tower}0.weight", 4, 4))
        ends.append(sketch.node("Gemm", tower, first, sketch.weight(f"{tower}.weight", 4, 4)))
        ends[-1].shape = ir.Shape(["batch", 4])
    return sketch.model(*ends)


_TABLE = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
"""A weight of two stages that were cut beforehand."""


def first_stage() -> ir.Model:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    inner = sketch.node("Gemm", "inner", x, sketch.weight("tied", array=_TABLE), sketch.weight("constant", 4))
    hidden = sketch.node("Relu", "hidden", inner)
    hidden.shape = ir.Shape(["batch", 4])
    return sketch.model(hidden)


def second_stage() -> ir.Model:
    """Its value `inner`, node `node_inner` and weight `constant` have names of the first; `tied` is the same."""
    sketch = Sketch(seed=1)
    hidden, x = sketch.input("hidden", ["batch", 4]), sketch.input("x", ["batch", 4])
    inner = sketch.node("Gemm", "inner", hidden, sketch.weight("tied", array=_TABLE), sketch.weight("constant", 4))
    added = sketch.node("Add", "added", inner, x)
    logits = sketch.node("Gemm", "logits", added, sketch.weight("last", 4, 4))
    logits.shape = ir.Shape(["batch", 4])
    return sketch.model(logits)


def graph_of(name: str) -> TrainingGraph:
    """A training graph by name: mlp, awkward, joined, two_towers, gpt2, gpt2_dropout, bert, squeezenet, u_net."""
    if name == "mlp":
        return make_training_graph(
            mlp(), loss=LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
        )
    if name == "awkward":
        return make_training_graph(
            awkward(), loss=LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
        )
    if name == "joined":
        joined = join_stage_models([first_stage(), second_stage()])
        return make_training_graph(joined, loss=LossSpec(type="mean_squared_error", prediction="logits", label="y"))
    if name == "two_towers":
        return make_training_graph(two_towers(), loss=LossSpec(type="mean_squared_error", prediction="a", label="y"))
    if name == "u_net":
        return make_training_graph(
            u_net(), loss=LossSpec(type="mean_squared_error", prediction="image", label="target")
        )
    if name in ("gpt2", "gpt2_dropout"):
        model = create_model("gpt2", **{**GPT2, "dropout": 0.1 if name == "gpt2_dropout" else 0.0})
        return make_training_graph(
            model, loss=LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels", ignore_index=-1),
            count_correct=True,
        )  # fmt: skip
    if name == "bert":
        return make_training_graph(create_model("bert", **BERT), loss=LossSpec(type="bert"), count_correct=True)
    assert name == "squeezenet"
    model = create_model("squeezenet", classes=5, image_size=32, dropout=0.0)
    output = str(model.graph.outputs[0].name)
    return make_training_graph(model, loss=LossSpec(type="softmax_cross_entropy", prediction=output, label="labels"))


def batch_of(name: str, seed: int, samples: int = 2) -> Mapping[str, torch.Tensor]:
    """Random features of a micro-batch for `graph_of(name)`."""
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    if name == "mlp":
        return {"x": torch.randn(samples, 8, generator=generator), "labels": whole(8, samples)}
    if name == "joined":
        return {feature: torch.randn(samples, 4, generator=generator) for feature in ("x", "y")}
    if name == "awkward":
        return {
            "x": torch.randn(samples, 6, generator=generator),
            "side": torch.randn(samples, 6, generator=generator),
            "labels": whole(8, samples),
        }
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
