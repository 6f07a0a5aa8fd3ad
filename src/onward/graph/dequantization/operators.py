"""Each quantized operator as the real one between `DequantizeLinear` and `QuantizeLinear`: what it means by definition.

A function here gives back whether it could rewrite its node; what it leaves alone computes on as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.graph.dequantization.writing import Quantized, RealWriter, is_per_tensor, stored
from onward.graph.nodes.structure import MICROSOFT

Rewrite = Callable[[RealWriter, ir.Node], bool]


def _inputs(node: ir.Node, count: int) -> list[ir.Value | None]:
    return [*node.inputs, *[None] * (count - len(node.inputs))]


def _attributes(node: ir.Node, without: Iterable[str] = ()) -> list[ir.Attr]:
    dropped = set(without)
    return [ir.Attr(one.name, one.type, one.value) for one in node.attributes.values() if one.name not in dropped]


def _integer(node: ir.Node, name: str, default: int) -> int:
    given = node.attributes.get(name)
    return default if given is None else given.as_int()


_KEEPS_RANK = frozenset(
    {
        "Add", "AveragePool", "Clip", "Concat", "DequantizeLinear", "GlobalAveragePool", "Identity", "LeakyRelu",
        "MaxPool", "Mul", "NhwcMaxPool", "QLinearAdd", "QLinearAveragePool", "QLinearLeakyRelu", "QLinearMul",
        "QLinearSigmoid", "QuantizeLinear", "Relu", "Sigmoid", "Softmax",
    }
)  # fmt: skip
"""Operators whose output has as many axes as their first input, in the networks in which an image is on it."""


def _rank(value: ir.Value | None) -> int | None:
    """The number of axes, by the weight of the convolution that a value comes from where the file does not say it."""
    while value is not None and value.shape is None:
        node = value.producer()
        if node is None:
            return None
        if node.op_type == "Transpose" and "perm" in node.attributes:
            return len(node.attributes["perm"].as_ints())
        if node.op_type in ("Conv", "QLinearConv"):
            value = node.inputs[3 if node.op_type == "QLinearConv" else 1]
        elif node.op_type in _KEEPS_RANK:
            value = node.inputs[0]
        else:
            return None
    return None if value is None or value.shape is None else len(value.shape)


def _operand(
    tensor: ir.Value | None, scale: ir.Value | None, zero_point: ir.Value | None, axis: int | None = None
) -> Quantized | None:
    """A quantized operand; `axis` is that of scales of more than one element. None: it cannot be written."""
    if tensor is None or scale is None:
        return None
    if is_per_tensor(scale) and is_per_tensor(zero_point):
        return Quantized(tensor, scale, zero_point)
    if axis is None:
        return None
    return Quantized(tensor, scale, zero_point, axis)


def _operands(triples: Sequence[ir.Value | None]) -> list[Quantized | None]:
    """Tensor, scale and zero point of each operand, one after the other."""
    return [_operand(*parts) for parts in zip(triples[::3], triples[1::3], triples[2::3], strict=True)]


def _real_bias(writer: RealWriter, bias: ir.Value | None, left: ir.Value, right: ir.Value) -> ir.Value | None:
    """A stored bias in units of two scales as real numbers; None where something is not stored."""
    numbers, one, other = stored(bias), stored(left), stored(right)
    if bias is None or numbers is None or one is None or other is None:
        return None
    real = (numbers.astype(np.float64) * one.reshape(-1) * other.reshape(-1)).astype(np.float32)
    return writer.store(real, real_name(str(bias.name)))


def real_name(name: str) -> str:
    """The name that ONNX Runtime's quantizer gave a tensor, without its ending."""
    return name.removesuffix("_quantized")


def _finish(writer: RealWriter, node: ir.Node, value: ir.Value, scale: ir.Value | None, zero: ir.Value | None) -> bool:
    """Quantizes the result as the node did, and lets it take the node's place."""
    if scale is None:
        writer.replace(node.outputs[0], value)
    else:
        writer.replace(node.outputs[0], writer.quantize(value, scale, zero, node))
    return True


def _turned(writer: RealWriter, value: ir.Value, rank: int, to_last: bool, before: ir.Node) -> ir.Value:
    order = [0, *range(2, rank), 1] if to_last else [0, rank - 1, *range(1, rank - 1)]
    (turned,) = writer.node("Transpose", [value], before, attributes={"perm": order})
    return turned


def convolution(writer: RealWriter, node: ir.Node) -> bool:
    """QLinearConv, also of channels-last images (com.microsoft)."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = _inputs(node, 9)
    image, weight = _operand(x, x_scale, x_zero), _operand(w, w_scale, w_zero, 0)
    if image is None or weight is None or y_scale is None:
        return False
    rank = _rank(w)
    turned = bool(_integer(node, "channels_last", 0))
    real_bias = None if bias is None else _real_bias(writer, bias, image.scale, weight.scale)
    if (bias is not None and real_bias is None) or (turned and rank is None):
        return False
    real = writer.real(image, node)
    if turned and rank is not None:
        real = _turned(writer, real, rank, False, node)
    inputs = [real, writer.real(weight, node), real_bias]
    (value,) = writer.node("Conv", inputs, node, copied=_attributes(node, ["channels_last"]))
    if turned and rank is not None:
        value = _turned(writer, value, rank, True, node)
    return _finish(writer, node, value, y_scale, y_zero)


def _last_axis(value: ir.Value | None, back: int = 1) -> int | None:
    rank = _rank(value)
    return None if rank is None or rank < back else rank - back


def matrix_product(writer: RealWriter, node: ir.Node) -> bool:
    """QLinearMatMul."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = _inputs(node, 8)
    left = _operand(a, a_scale, a_zero, _last_axis(a, 2))
    right = _operand(b, b_scale, b_zero, _last_axis(b))
    if left is None or right is None or y_scale is None:
        return False
    (value,) = writer.node("MatMul", [writer.real(left, node), writer.real(right, node)], node)
    return _finish(writer, node, value, y_scale, y_zero)


def gemm(writer: RealWriter, node: ir.Node) -> bool:
    """QGemm; its C counts in units of alpha and both scales."""
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = _inputs(node, 9)
    left = _operand(a, a_scale, a_zero)
    right = _operand(b, b_scale, b_zero, 0 if _integer(node, "transB", 0) else 1)
    if left is None or right is None:
        return False
    bias = None if c is None else _real_bias(writer, c, left.scale, right.scale)
    if c is not None and bias is None:
        return False
    alpha = node.attributes.get("alpha")
    if bias is not None and alpha is not None and alpha.as_float() != 1.0:
        return False
    inputs = [writer.real(left, node), writer.real(right, node), bias]
    (value,) = writer.node("Gemm", inputs, node, copied=_attributes(node))
    return _finish(writer, node, value, y_scale, y_zero)


def _elementwise(op_type: str, operands: int, leading: int = 0) -> Rewrite:
    """An operator of (tensor, scale, zero point) triples after `leading` plain inputs; the result's come last."""

    def rewrite(writer: RealWriter, node: ir.Node) -> bool:
        given = _inputs(node, leading + 3 * operands + 2)
        quantized = _operands(given[leading : leading + 3 * operands])
        y_scale, y_zero = given[leading + 3 * operands :][:2]
        if any(one is None for one in quantized) or y_scale is None:
            return False
        real = [writer.real(one, node) for one in quantized if one is not None]
        attributes = _attributes(node, ["opset", "channels_last"])
        (value,) = writer.node(op_type, [*given[:leading], *real], node, copied=attributes)
        return _finish(writer, node, value, y_scale, y_zero)

    return rewrite


def softmax(writer: RealWriter, node: ir.Node) -> bool:
    """QLinearSoftmax, where the model's own opset means the same by its axis."""
    rank, meant = _rank(node.inputs[0]), _integer(node, "opset", writer.opset)
    axis = _integer(node, "axis", -1)
    if (meant < 13) != (writer.opset < 13) and (rank is None or axis % rank != rank - 1):
        return False
    return _elementwise("Softmax", 1)(writer, node)


def pooling(op_type: str) -> Rewrite:
    """QLinearAveragePool and QLinearGlobalAveragePool, also of channels-last images."""

    def rewrite(writer: RealWriter, node: ir.Node) -> bool:
        if not _integer(node, "channels_last", 0):
            return _elementwise(op_type, 1)(writer, node)
        x, x_scale, x_zero, y_scale, y_zero = _inputs(node, 5)
        image, rank = _operand(x, x_scale, x_zero), _rank(x)
        if image is None or rank is None or y_scale is None:
            return False
        real = _turned(writer, writer.real(image, node), rank, False, node)
        (value,) = writer.node(op_type, [real], node, copied=_attributes(node, ["channels_last"]))
        return _finish(writer, node, _turned(writer, value, rank, True, node), y_scale, y_zero)

    return rewrite


def max_pooling(writer: RealWriter, node: ir.Node) -> bool:
    """NhwcMaxPool, of quantized channels-last images: the standard's MaxPool, which takes them from opset 12 on."""
    image, rank = node.inputs[0], _rank(node.inputs[0])
    if image is None or rank is None or writer.opset < 12:
        return False
    channels_first = _turned(writer, image, rank, False, node)
    (value,) = writer.node("MaxPool", [channels_first], node, copied=_attributes(node))
    writer.replace(node.outputs[0], _turned(writer, value, rank, True, node))
    return True


def concatenation(writer: RealWriter, node: ir.Node) -> bool:
    """QLinearConcat."""
    y_scale, y_zero, *rest = node.inputs
    quantized = _operands(rest)
    if any(one is None for one in quantized) or y_scale is None:
        return False
    real = [writer.real(one, node) for one in quantized if one is not None]
    (value,) = writer.node("Concat", real, node, copied=_attributes(node))
    return _finish(writer, node, value, y_scale, y_zero)


def real_matrix_product(writer: RealWriter, node: ir.Node) -> bool:
    """MatMulIntegerToFloat."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = _inputs(node, 7)
    left, right = _operand(a, a_scale, a_zero), _operand(b, b_scale, b_zero, _last_axis(b))
    if left is None or right is None:
        return False
    return _product(writer, node, writer.real(left, node), right, bias)


def dynamic_matrix_product(writer: RealWriter, node: ir.Node) -> bool:
    """DynamicQuantizeMatMul."""
    a, b, b_scale, b_zero, bias = _inputs(node, 5)
    right = _operand(b, b_scale, b_zero, _last_axis(b))
    if a is None or right is None:
        return False
    quantized, scale, zero = writer.node("DynamicQuantizeLinear", [a], node, outputs=3)
    return _product(writer, node, writer.real(Quantized(quantized, scale, zero), node), right, bias)


def _product(writer: RealWriter, node: ir.Node, left: ir.Value, right: Quantized, bias: ir.Value | None) -> bool:
    (value,) = writer.node("MatMul", [left, writer.real(right, node)], node)
    if bias is not None:
        (value,) = writer.node("Add", [value, bias], node)
    return _finish(writer, node, value, None, None)


def attention(writer: RealWriter, node: ir.Node) -> bool:
    """QAttention as the `Attention` of the same domain."""
    x, weight, bias, x_scale, w_scale, mask, x_zero, w_zero, past = _inputs(node, 9)
    image, projection = _operand(x, x_scale, x_zero), _operand(weight, w_scale, w_zero, 1)
    if image is None or projection is None:
        return False
    inputs = [writer.real(image, node), writer.real(projection, node), bias, mask, past]
    count = len(node.outputs)
    copied = _attributes(node)
    values = writer.node("Attention", inputs, node, domain=MICROSOFT, copied=copied, outputs=count)
    for old, new in zip(list(node.outputs), values, strict=True):
        writer.replace(old, new)
    return True


def integer_product(writer: RealWriter, node: ir.Node) -> bool:
    """MatMulInteger and ConvInteger, cast and multiplied by both scales, as `quantize_dynamic` writes them."""
    x, w, x_zero, w_zero = _inputs(node, 4)
    cast = _only_reader(node.outputs[0], "Cast")
    scaled = None if cast is None else _only_reader(cast.outputs[0], "Mul")
    if x is None or w is None or cast is None or scaled is None:
        return False
    scale = next((one for one in scaled.inputs if one is not cast.outputs[0]), None)
    pair = None if scale is None else scale.producer()
    scales = None if pair is None or pair.op_type != "Mul" else _of_operands(pair.inputs, x, w)
    if scales is None:
        return False
    is_conv = node.op_type == "ConvInteger"
    left = _operand(x, scales[0], x_zero)
    right = _operand(w, scales[1], w_zero, 0 if is_conv else _last_axis(w))
    if left is None or right is None:
        return False
    inputs = [writer.real(left, scaled), writer.real(right, scaled)]
    (value,) = writer.node("Conv" if is_conv else "MatMul", inputs, scaled, copied=_attributes(node))
    writer.replace(scaled.outputs[0], value)
    for gone in (cast, node):
        writer.graph.remove(gone, safe=True)
    return True


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type != op_type:
        return None
    return uses[0].node


def _of_operands(scales: Sequence[ir.Value | None], x: ir.Value, w: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Two factors in the order of the operands whose scales they are: of one that is computed, or of a stored one."""
    for first, second in (scales, scales[::-1]):
        if first is not None and second is not None and _is_scale_of(first, x) and _is_scale_of(second, w):
            return first, second
    return None


def _is_scale_of(scale: ir.Value, tensor: ir.Value) -> bool:
    node = tensor.producer()
    if node is None:
        return tensor.const_value is not None and scale.const_value is not None
    if node.op_type == "DynamicQuantizeLinear":
        return scale is node.outputs[1]
    return node.op_type == "QuantizeLinear" and scale is node.inputs[1]


def recurrent(writer: RealWriter, node: ir.Node) -> bool:
    """DynamicQuantizeLSTM as an LSTM of real numbers: rounding inside of the recurrence has no operator of its own."""
    x, w, r, bias, lengths, hidden, cell, peephole, w_scale, w_zero, r_scale, r_zero = _inputs(node, 12)
    real = []
    for tensor, scale, zero in ((w, w_scale, w_zero), (r, r_scale, r_zero)):
        numbers, factor, shift = stored(tensor), stored(scale), stored(zero)
        if tensor is None or numbers is None or factor is None or shift is None:
            return False
        along = (numbers.shape[0], 1, -1)
        gates = (numbers.astype(np.float32) - shift.astype(np.float32).reshape(along)) * factor.reshape(along)
        real.append(writer.store(np.ascontiguousarray(gates.swapaxes(1, 2)), real_name(str(tensor.name))))
    inputs = [x, *real, bias, lengths, hidden, cell, peephole]
    values = writer.node("LSTM", inputs, node, copied=_attributes(node), outputs=len(node.outputs))
    for old, new in zip(list(node.outputs), values, strict=True):
        if old.name:
            writer.replace(old, new)
        else:
            new.name = ""
    return True


REWRITES: Mapping[tuple[str, str], Rewrite] = {
    ("", "QLinearConv"): convolution,
    (MICROSOFT, "QLinearConv"): convolution,
    ("", "QLinearMatMul"): matrix_product,
    ("", "MatMulInteger"): integer_product,
    ("", "ConvInteger"): integer_product,
    (MICROSOFT, "QGemm"): gemm,
    (MICROSOFT, "QLinearAdd"): _elementwise("Add", 2),
    (MICROSOFT, "QLinearMul"): _elementwise("Mul", 2),
    (MICROSOFT, "QLinearSigmoid"): _elementwise("Sigmoid", 1),
    (MICROSOFT, "QLinearLeakyRelu"): _elementwise("LeakyRelu", 1),
    (MICROSOFT, "QLinearSoftmax"): softmax,
    (MICROSOFT, "QLinearWhere"): _elementwise("Where", 2, leading=1),
    (MICROSOFT, "QLinearConcat"): concatenation,
    (MICROSOFT, "QLinearAveragePool"): pooling("AveragePool"),
    (MICROSOFT, "NhwcMaxPool"): max_pooling,
    (MICROSOFT, "QLinearGlobalAveragePool"): pooling("GlobalAveragePool"),
    (MICROSOFT, "MatMulIntegerToFloat"): real_matrix_product,
    (MICROSOFT, "DynamicQuantizeMatMul"): dynamic_matrix_product,
    (MICROSOFT, "DynamicQuantizeLSTM"): recurrent,
    (MICROSOFT, "QAttention"): attention,
}
"""(domain, operator) -> what writes it in real numbers."""
