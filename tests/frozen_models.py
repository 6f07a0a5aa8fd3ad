"""Stacks of linear layers whose weights are large enough to be layers, and runs that freeze them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization import QuantFormat
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

from onward.models.graph_writer import GraphWriter, constant, normal
from tests.invariants.cases import Case

WIDTH, CLASSES, WORDS, LAYERS = 128, 40, 200, 4
ELEMENTS = WIDTH * WIDTH


def build_stack(opset: int = 20) -> ir.Model:
    """`ids [batch, 4]` -> `logits [batch, 4, 40]`: a table, four layers, the odd ones transposed, and a last one."""
    writer = GraphWriter("stack", opset, 0)
    ids = writer.input("ids", ir.DataType.INT64, ["batch", 4])
    x = writer.op("Gather", writer.weight("table", (WORDS, WIDTH), normal(1.0)), ids)
    for layer in range(LAYERS):
        with writer.scope(f"layer{layer}"):
            weight = writer.weight("weight", (WIDTH, WIDTH), normal(0.1))
            weight = writer.op("Transpose", weight, perm=[1, 0]) if layer % 2 else weight
            product = writer.op("MatMul", x, weight)
            sum_ = writer.op("Add", product, writer.weight("bias", (WIDTH,), constant(0.1)))
            x = writer.op("Relu", sum_, name=f"relu{layer}")
    logits = writer.op("MatMul", x, writer.weight("head", (WIDTH, CLASSES), normal(0.1)), name="logits")
    return writer.finish([(logits, ["batch", 4, CLASSES])])


def by_nbits(model: onnx.ModelProto, **settings: Any) -> onnx.ModelProto:
    quantizer = MatMulNBitsQuantizer(model, algo_config=DefaultWeightOnlyQuantConfig(block_size=32, **settings))
    quantizer.process()
    found: onnx.ModelProto = quantizer.model.model
    return found


def by_bnb4(model: onnx.ModelProto) -> onnx.ModelProto:
    quantizer = MatMulBnb4Quantizer(model, MatMulBnb4Quantizer.NF4, 64)
    quantizer.process()
    found: onnx.ModelProto = quantizer.model.model
    return found


QUANTIZERS = {
    "4 bits": lambda m: by_nbits(m, is_symmetric=False),
    "8 bits": lambda m: by_nbits(m, is_symmetric=True, bits=8),
    "blocked QDQ": lambda m: by_nbits(m, is_symmetric=True, quant_format=QuantFormat.QDQ),
    "nf4": by_bnb4,
}


def build_quantized(name: str) -> ir.Model:
    """The stack without the transpositions, whose products the quantizers leave alone, quantized by ONNX Runtime."""
    plain = build_stack(21)
    for node in [node for node in plain.graph if node.op_type == "Transpose"]:
        node.outputs[0].replace_all_uses_with(node.inputs[0])  # type: ignore[arg-type]
        plain.graph.remove(node, safe=True)
    return ir.from_proto(QUANTIZERS[name](ir.to_proto(plain)))


def stack_data(count: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {"ids": generator.integers(0, WORDS, (count, 4)), "label": generator.integers(0, CLASSES, (count, 4))}


LOSS = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"}
STACK = Case(build_stack, LOSS, stack_data, {"weights_to_train": ["*.bias"]})
ADAPTED = Case(build_stack, LOSS, stack_data)
QUANTIZED = Case(lambda: build_quantized("4 bits"), LOSS, stack_data)


def sections(model: Any, **more: Mapping[str, Any]) -> dict[str, Any]:
    """A RUN.yaml that trains biases alone."""
    return {
        "paths": {"model_path": str(model)},
        "loss": LOSS,
        "training": {"batch_size": 8, "num_train_steps": 4, "display_loss_steps": 1, "weights_to_train": ["*.bias"]},
        "learning_rate": {"initial_lr": 1e-2},
        **more,
    }
