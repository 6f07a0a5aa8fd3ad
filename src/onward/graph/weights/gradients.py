"""Through which inputs of which operators a gradient flows, and what it reaches from the loss."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.graph.classical.rewriting import DOMAIN as CLASSICAL_DOMAIN
from onward.graph.nodes.structure import ML_DOMAIN
from onward.graph.weights.quantization import gives_real_numbers, is_only_dequantized

TRAINABLE_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Element types that can carry a gradient."""

WITHOUT_GRADIENT: dict[str, frozenset[int] | None] = {
    "Gather": frozenset({1}),
    "GatherElements": frozenset({1}),
    "GatherND": frozenset({1}),
    "Reshape": frozenset({1}),
    "Expand": frozenset({1}),
    "Slice": frozenset({1, 2, 3, 4}),
    "Squeeze": frozenset({1}),
    "Unsqueeze": frozenset({1}),
    "Split": frozenset({1}),
    "Tile": frozenset({1}),
    "Pad": frozenset({1, 2, 3}),
    "Resize": frozenset({1, 2, 3}),
    "Upsample": frozenset({1}),
    "TopK": frozenset({1}),
    "Where": frozenset({0}),
    "Dropout": frozenset({1, 2}),
    "If": frozenset({0}),
    "Loop": frozenset({0, 1}),
    "RNN": frozenset({4}),
    "GRU": frozenset({4}),
    "LSTM": frozenset({4}),
    "CastLike": frozenset({1}),
    "Compress": frozenset({1}),
    "CenterCropPad": frozenset({1}),
    "Col2Im": frozenset({1, 2}),
    "MaxRoiPool": frozenset({1}),
    "RoiAlign": frozenset({2}),
    "SequenceAt": frozenset({1}),
    "SequenceInsert": frozenset({2}),
    "SequenceErase": frozenset({1}),
    "SplitToSequence": frozenset({1}),
    "AffineGrid": frozenset({1}),
    "DFT": frozenset({1, 2}),
    "STFT": frozenset({1, 3}),
    "TensorScatter": frozenset({2}),
    "RotaryEmbedding": frozenset({3}),
    "ReverseSequence": frozenset({1}),
    "OneHot": frozenset({0, 1}),
    "ScatterElements": frozenset({1}),
    "ScatterND": frozenset({1}),
    "Scatter": frozenset({1}),
    "ReduceSum": frozenset({1}),
    "ReduceMean": frozenset({1}),
    "ReduceMax": frozenset({1}),
    "ReduceMin": frozenset({1}),
    "ReduceProd": frozenset({1}),
    "ReduceL1": frozenset({1}),
    "ReduceL2": frozenset({1}),
    "ReduceLogSum": frozenset({1}),
    "ReduceLogSumExp": frozenset({1}),
    "ReduceSumSquare": frozenset({1}),
    "BatchNormalization": frozenset({3, 4}),
    "SoftmaxCrossEntropyLoss": frozenset({2}),
    "NegativeLogLikelihoodLoss": frozenset({1, 2}),
    "Trilu": frozenset({1}),
    "CumSum": frozenset({1}),
    "QuantizeLinear": frozenset({2}),
    "DequantizeLinear": frozenset({2}),
    "Clip": frozenset({1, 2}),
    **dict.fromkeys(
        (
            "Shape", "Size", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
            "Not", "And", "Or", "Xor", "IsNaN", "IsInf", "NonZero", "ConstantFill", "ConstantOfShape", "Range",
            "EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "NonMaxSuppression",
            "Hardmax", "Sign", "Floor", "Ceil", "Round", "Unique", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseNot",
            "BitwiseXor", "SequenceLength", "OptionalHasElement", "StringNormalizer", "QLinearConv", "QLinearMatMul",
        )
    ),
}  # fmt: skip
"""Operator -> inputs through which no gradient flows; None: through none of them."""

ELSEWHERE: dict[tuple[str, str], frozenset[int] | None] = {
    (ML_DOMAIN, "ArrayFeatureExtractor"): frozenset({1}),
    **dict.fromkeys(
        (CLASSICAL_DOMAIN, name) for name in ("Lookup", "OneHotCategories", "TreeClassifier", "TreeRegressor")
    ),
}
"""The same for operators of other domains: (domain, operator) -> inputs."""


_QUANTIZES = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
_MULTIPLIES_INTEGERS = frozenset({"MatMulInteger", "ConvInteger"})


def is_without_gradient(node: ir.Node, index: int) -> bool:
    """Whether no gradient flows back through an input of a node."""
    if node.domain == "com.microsoft":
        # What ONNX Runtime's quantizer writes for numbers that stay quantized.
        return node.op_type.startswith("QLinear") or (node.op_type == "QGemm" and not gives_real_numbers(node))
    if node.domain != "":
        blocked = ELSEWHERE.get((node.domain, node.op_type), frozenset())
        return blocked is None or index in blocked
    if node.op_type in _QUANTIZES and not is_only_dequantized(node.outputs[0]):
        return True
    if node.op_type in _MULTIPLIES_INTEGERS and not gives_real_numbers(node):
        return True
    blocked = WITHOUT_GRADIENT.get(node.op_type, frozenset())
    if blocked is None or index in blocked:
        return True
    to = node.attributes.get("to")
    if node.op_type != "Cast" or to is None:
        return False
    if to.type is ir.AttributeType.STRING:  # before opset 6 the type was given by name
        return to.as_string().upper() not in {data_type.name for data_type in TRAINABLE_TYPES}
    return ir.DataType(to.as_int()) not in TRAINABLE_TYPES


def reached_by_gradient(graph: ir.Graph, roots: Sequence[str]) -> set[str]:
    """Names of initializers that a gradient from the values named `roots` reaches, nested graphs included."""
    by_name = {str(v.name): v for v in graph.outputs}
    by_name.update({str(o.name): o for node in graph for o in node.outputs})
    stack = [by_name[name] for name in roots if name in by_name]
    seen: set[ir.Value] = set()
    names: set[str] = set()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_initializer():
            names.add(str(value.name))
        node = value.producer()
        if node is None:
            continue
        passing = [v for i, v in enumerate(node.inputs) if v is not None and not is_without_gradient(node, i)]
        stack.extend(v for v in passing if v.dtype is None or v.dtype in TRAINABLE_TYPES or v.producer() is not None)
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                stack.extend(attribute.as_graph().outputs)
    return names
