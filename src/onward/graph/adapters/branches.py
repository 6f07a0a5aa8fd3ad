"""The nodes of adapters: a low-rank branch next to each node that reads a weight, or the sum of both where none fits.

A branch never makes the product of the two matrices, which is as large as the weight: `(x A') B'` is added to `x W'`.
Names of results stay: what a node gave under a name is given, adapted, under the same name.
"""

from __future__ import annotations

import string

import onnx_ir as ir

from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.inserting import Inserter, InsertionPoint
from onward.graph.adapters.uses import Reading, Use, contraction
from onward.graph.nodes.known_values import integer
from onward.graph.weights.quantized_weights import PACKED, UNPACKING

_DATA_INPUT = {Reading.RIGHT: 0, Reading.LEFT: 1, Reading.LOOKUP: 1, Reading.CONVOLUTION: 0}
"""Where the node has what the weight is multiplied with; a reading that is not listed gets no branch."""

_BIAS_INPUT = {"Gemm": 2, "Conv": 2, "Linear": 2, "MatMulNBits": 5}
"""Where the node has a bias, as its last input."""


class Branches:
    """Writes the branches of one weight's adapter.

    Args:
        inserter: into the model.
        adapted: the weight.
        tensors: the adapter's, by name; with factors instead of magnitudes, no norm is computed.
        dtype: what the adapter computes in.
        dropout: fraction of what a branch reads that is left out in training.
    """

    def __init__(
        self,
        inserter: Inserter,
        adapted: AdaptedWeight,
        tensors: dict[str, ir.Value],
        dtype: ir.DataType,
        dropout: float = 0.0,
    ) -> None:
        self.to, self.adapted, self.dtype, self.dropout = inserter, adapted, dtype, dropout
        self.a, self.b = tensors[adapted.a], tensors[adapted.b]
        self.magnitude = tensors.get(adapted.magnitude, tensors.get(adapted.factor))
        self._is_factor = adapted.factor in tensors
        self._sums: dict[ir.Value, ir.Value] = {}

    def add(self, use: Use, before: ir.Node) -> None:
        """Adapts one use of the weight; the first half of a branch is written before the node `before`."""
        self.to.begin(f"adapter/{self.adapted.weight}", use.node)
        is_against = use.outputs_first != self.adapted.outputs_first
        has_branch = use.reading in _DATA_INPUT or (use.reading is Reading.CONTRACTION and self.magnitude is None)
        if not has_branch or (is_against and self.magnitude is not None):
            self._read_sum(use)
            return
        scale = self.adapted.scale * _alpha(use.node)
        front = InsertionPoint(self.to.graph, before)
        data = self._seen(front, use)
        hidden = self.to.scaled(front, self._first_product(front, use, data), scale, self.dtype)
        base, bias = self._base(use)
        readers = [(one.node, one.idx) for one in base.uses()]
        producer = base.producer()
        assert producer is not None
        behind = InsertionPoint(self.to.graph, producer, is_behind=True)
        seen = self._base_of(behind, use, data) if self.magnitude is not None else base
        total = self.to.write(behind, "Add", seen, self._second_product(behind, use, hidden))
        if self.magnitude is not None:
            total = self.to.write(behind, "Mul", total, self._factor(behind, use, _spread(use, self.adapted)))
        if seen is not base:  # as PEFT has it, the factor is of what passes the dropout
            total = self.to.write(behind, "Add", total, self.to.write(behind, "Sub", base, seen))
        if bias is not None:
            total = self.to.write(behind, "Add", total, self._spread_bias(behind, use, bias))
        self.to.take_over(base, total, readers)

    def _matrix(self, place: InsertionPoint, use: Use, number: int, is_left: bool = False) -> ir.Value:
        """The first matrix as the factor [inputs, rank] of a product, or the second as [rank, outputs]; on the left,
        they are turned.

        A weight that is read one way round here and the other there has its inputs for outputs.
        """
        is_along = use.outputs_first == self.adapted.outputs_first
        matrix = (self.a, self.b)[number] if is_along else (self.b, self.a)[number]
        return matrix if is_along == is_left else self.to.transposed(place, matrix)

    def _seen(self, place: InsertionPoint, use: Use) -> ir.Value:
        """What the node multiplies with its weight, after dropout."""
        data = use.node.inputs[_DATA_INPUT.get(use.reading, 1 - use.index)]
        assert data is not None
        return data if use.reading is Reading.LOOKUP else self.to.dropped(place, data, self.dropout)

    def _base_of(self, place: InsertionPoint, use: Use, data: ir.Value) -> ir.Value:
        """What the node gives of other data, without its bias."""
        node, index = use.node, _DATA_INPUT[use.reading]
        if node.inputs[index] is data:
            return node.outputs[0]
        inputs = [data if at == index else value for at, value in enumerate(node.inputs)]
        return self.to.write_with(place, node.op_type, inputs, list(node.attributes.values()), node.domain)

    def _first_product(self, place: InsertionPoint, use: Use, data: ir.Value) -> ir.Value:
        """What the adapter reads, multiplied with the first matrix."""
        node = use.node
        if use.reading is Reading.LOOKUP:
            return self.to.write(place, "Gather", self._matrix(place, use, 0), data)
        if use.reading is Reading.CONTRACTION:
            (equation, matrix), _ = self._contractions(use)
            return self.to.write(place, "Einsum", data, matrix, equation=equation)
        if node.op_type == "Gemm" and integer(node, "transB" if use.reading is Reading.LEFT else "transA", 0):
            data = self.to.write(place, "Transpose", data, perm=[1, 0])
        if use.reading is Reading.CONVOLUTION:
            return self.to.write_with(place, "Conv", [data, self.a], list(node.attributes.values()))
        is_left = use.reading is Reading.LEFT
        first = self._matrix(place, use, 0, is_left)
        return self.to.write(place, "MatMul", *([first, data] if is_left else [data, first]))

    def _second_product(self, place: InsertionPoint, use: Use, hidden: ir.Value) -> ir.Value:
        if use.reading is Reading.CONVOLUTION:
            return self.to.write(place, "Conv", hidden, self.b)
        if use.reading is Reading.CONTRACTION:
            _, (equation, matrix) = self._contractions(use)
            return self.to.write(place, "Einsum", hidden, matrix, equation=equation)
        is_left = use.reading is Reading.LEFT
        second = self._matrix(place, use, 1, is_left)
        return self.to.write(place, "MatMul", *([second, hidden] if is_left else [hidden, second]))

    def _contractions(self, use: Use) -> tuple[tuple[str, ir.Value], tuple[str, ir.Value]]:
        """Equation and matrix of the two sums that multiply data with an adapter instead of its weight."""
        found = contraction(use.node, use.index)
        assert found is not None
        data, weight, result = found
        batch, rows, columns = weight[:-2], *weight[-2:]
        if use.is_turned == self.adapted.outputs_first:
            rows, columns = columns, rows  # outputs and inputs of the adapter
        rank = next(one for one in string.ascii_letters if one not in data + weight + result)
        a, b = (f"{batch}{rank}{columns}", self.a), (f"{batch}{rows}{rank}", self.b)
        (first, summed), second = ((a, columns), b) if columns in data else ((b, rows), a)
        hidden = data.replace(summed, rank)
        return (f"{data},{first[0]}->{hidden}", first[1]), (f"{hidden},{second[0]}->{result}", second[1])

    def _base(self, use: Use) -> tuple[ir.Value, ir.Value | None]:
        """What a branch is added to, and a bias that was in it and must be added afterwards."""
        node = use.node
        result = node.outputs[0]
        if self.magnitude is not None:
            place = _BIAS_INPUT.get(node.op_type, len(node.inputs))
            bias = node.inputs[place] if place < len(node.inputs) else None
            if bias is not None:
                node.resize_inputs(place)
            return result, bias
        readers = list(result.uses())
        if len(readers) != 1 or result.is_graph_output() or readers[0].node.op_type != "Add":
            return result, None
        # The sum with the bias stays next to its product, so that both are computed in one call.
        total = readers[0].node
        bias = total.inputs[1 - readers[0].idx]
        is_bias = bias is not None and bias.is_initializer() and bias.shape is not None and len(bias.shape) == 1
        return (total.outputs[0] if is_bias and total.domain == "" else result), None

    def _spread_bias(self, place: InsertionPoint, use: Use, bias: ir.Value) -> ir.Value:
        if use.reading is Reading.CONVOLUTION:
            return self.to.reshaped(place, bias, (-1, *(1 for _ in self.adapted.shape[2:])))
        beta = use.node.attributes.get("beta")
        return self.to.scaled(place, bias, 1.0 if beta is None else beta.as_float(), self.dtype)

    def _read_sum(self, use: Use) -> None:
        """Lets a node read the sum of weight and adapter."""
        value = use.value
        if value not in self._sums:
            place = InsertionPoint(self.to.graph, _first_reader(self.to.graph, value))
            total = self._sum(place, use, self.a, self.b)
            if self.magnitude is not None:
                total = self.to.write(place, "Mul", total, self._factor(place, use, _spread_of_sum(use, self.adapted)))
            self._sums[value] = total
        use.node.replace_input_with(use.index, self._sums[value])

    def _sum(self, place: InsertionPoint, use: Use, a: ir.Value, b: ir.Value) -> ir.Value:
        """The weight as a node reads it, and the scaled product of the matrices."""
        adapted = self.adapted
        if adapted.reading is Reading.CONVOLUTION:
            outputs, inputs = adapted.matrix
            a, b = self.to.reshaped(place, a, (-1, inputs)), self.to.reshaped(place, b, (outputs, -1))
        product = self.to.write(place, "MatMul", b, a)
        if adapted.is_flat:
            product = self.to.reshaped(place, product, adapted.shape)
        else:
            outputs, inputs = adapted.matrix
            product.shape = ir.Shape([*adapted.shape[:-2], outputs, inputs])
            if adapted.outputs_first == use.is_turned:
                product = self.to.transposed(place, product)
        return self.to.write(place, "Add", use.value, self.to.scaled(place, product, adapted.scale, self.dtype))

    def _factor(self, place: InsertionPoint, use: Use, shape: tuple[int, ...]) -> ir.Value:
        """Trained norm over norm, of every output; the norm is taken for a constant, as its authors do."""
        adapted = self.adapted
        assert self.magnitude is not None
        if self._is_factor:
            return self.to.reshaped(place, self.magnitude, shape)
        a, b = (self.to.constant_for_gradients(place, matrix) for matrix in (self.a, self.b))
        rank = len(adapted.shape)
        if adapted.is_flat:
            axes = tuple(range(1, rank))
        else:
            axes = (rank - 1 if adapted.outputs_first != use.is_turned else rank - 2,)
        norm = self.to.norm(place, self._sum(place, use, a, b), axes)
        factor = self.to.write(place, "Div", self.magnitude, norm)
        return self.to.reshaped(place, factor, shape)


def _spread(use: Use, adapted: AdaptedWeight) -> tuple[int, ...]:
    """The shape in which one number for each output is multiplied with what the node gives."""
    outputs, batch = adapted.matrix[0], () if adapted.is_flat else adapted.shape[:-2]
    if use.reading is Reading.CONVOLUTION:
        return (outputs, *(1 for _ in adapted.shape[2:]))
    return (*batch, outputs, 1) if use.reading is Reading.LEFT else (*batch, *((1,) if batch else ()), outputs)


def _spread_of_sum(use: Use, adapted: AdaptedWeight) -> tuple[int, ...]:
    """The shape in which one number for each output is multiplied with the weight as a node reads it."""
    outputs = adapted.matrix[0]
    if adapted.is_flat:
        return (outputs, *(1 for _ in adapted.shape[1:]))
    come_first = adapted.outputs_first != use.is_turned
    return (*adapted.shape[:-2], *((outputs, 1) if come_first else (1, outputs)))


def _alpha(node: ir.Node) -> float:
    """What a node multiplies its product by."""
    alpha = node.attributes.get("alpha") if node.op_type == "Gemm" else None
    return 1.0 if alpha is None else alpha.as_float()


def _first_reader(graph: ir.Graph, value: ir.Value) -> ir.Node:
    """The first node of the main graph that reads a value, or has a nested graph that does."""
    readers = {use.node for use in value.uses()}
    for node in graph:
        if node in readers:
            return node
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                nested = ir.traversal.RecursiveGraphIterator(attribute.as_graph())
                if any(inner in readers for inner in nested):
                    return node
    raise AssertionError(f"no node reads {value.name!r}")


def operand_type(use: Use, weight: ir.Value) -> ir.DataType:
    """The float type in which a node computes with a weight."""
    maker = use.value.producer()
    if use.node.op_type in PACKED:
        scales = use.node.inputs[2]
        return ir.DataType.FLOAT if scales is None or scales.dtype is None else scales.dtype
    if maker is not None and maker.op_type == "Cast":
        return ir.DataType(integer(maker, "to", 1))
    while maker is not None and maker.op_type not in ("DequantizeLinear", *UNPACKING) and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    scale = None if maker is None else maker.inputs[1]
    found = weight.dtype if scale is None else scale.dtype
    return found if found is not None and found.is_floating_point() else ir.DataType.FLOAT


__all__ = ["Branches", "operand_type"]
