"""Random numbers of a training graph as a function of a seed and of counters, in standard integer operators.

The same seed and counters give the same numbers in every runtime, and after a state was saved and loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.operators import Fact, operators_with

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39)
"""Of a 32-bit hash, both below 2**31: a product of one with a word fits into int64, in which runtimes multiply."""

_SHIFTS = (15, 12, 15)
_GOLDEN = 0x9E3779B9
"""Distinguishes nodes: multiples of the golden ratio, in 32 bits."""


def draw_from_counters(model: ir.Model, counters: Sequence[ir.Value]) -> int:
    """Replaces every node that draws random numbers by integer arithmetic, in place.

    Args:
        model: of opset 18, its dropout in training mode.
        counters: int64 inputs of rank 0; other values of any of them give other numbers.

    Returns:
        How many nodes were replaced.

    Raises:
        ModelError: a node draws numbers of a kind that is not known here, or is in a nested graph.
    """
    found = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _draws(node)]
    if not found:
        return 0
    numbers = _Numbers(NodeWriter(model, "random/"), counters)
    for number, node in enumerate(found, start=1):
        if node.op_type == "Multinomial" or node.graph is not model.graph:
            where = "" if node.graph is model.graph else " inside of an If, Loop or Scan"
            raise ModelError(
                f"the model draws random numbers with {node.op_type}{where}, which a device bundle cannot repeat from "
                "a seed. Remove the operator from the model, or train it with `onward train`."
            )
        for old, new in zip(node.outputs, numbers.replace(node, number), strict=False):
            new.type, new.shape = old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    model.graph.sort()
    return len(found)


def _draws(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in operators_with(Fact.RANDOM)


class _Numbers:
    """Writes random numbers of nodes."""

    def __init__(self, writer: NodeWriter, counters: Sequence[ir.Value]) -> None:
        self.writer = writer
        self._constants: dict[tuple[float, type], ir.Value] = {}
        key = self._word(counters[0])
        for counter in counters[1:]:
            key = self._xor(self._hash(key), self._word(counter))
        self._key = self._hash(key)

    def replace(self, node: ir.Node, number: int) -> list[ir.Value]:
        """What a node would compute, from the numbers of a stream of its own."""
        apply, first = self.writer.apply, node.inputs[0] if node.inputs else None
        if "shape" in node.attributes:
            shape = self.writer.constant(node.attributes["shape"].as_ints(), "shape")
        else:
            assert first is not None
            shape = apply("Shape", first)
        dtype = ir.DataType(node.attributes.get_int("dtype", int((first and first.dtype) or ir.DataType.FLOAT)))
        if node.op_type == "Dropout":
            assert first is not None
            return self._dropout(first, node.inputs[1], self._uniform(shape, number))
        if node.op_type == "Bernoulli":
            assert first is not None
            chance = self.writer.cast(first, ir.DataType.FLOAT)
            return [self.writer.cast(apply("Less", self._uniform(shape, number), chance), dtype)]
        if node.op_type.startswith("RandomUniform"):
            low, high = (node.attributes.get_float(name, default) for name, default in (("low", 0.0), ("high", 1.0)))
            return [self._scaled(self._uniform(shape, number), high - low, low, dtype)]
        mean, scale = (node.attributes.get_float(name, default) for name, default in (("mean", 0.0), ("scale", 1.0)))
        return [self._scaled(self._normal(shape, number), scale, mean, dtype)]

    def _dropout(self, data: ir.Value, ratio: ir.Value | None, uniform: ir.Value) -> list[ir.Value]:
        apply, dtype = self.writer.apply, data.dtype or ir.DataType.FLOAT
        ratio = self._number(0.5, np.float32) if ratio is None else self.writer.cast(ratio, ir.DataType.FLOAT)
        kept = apply("GreaterOrEqual", uniform, ratio)
        one = self._number(1.0, np.float32)
        factor = apply("Where", kept, apply("Div", one, apply("Sub", one, ratio)), self._number(0.0, np.float32))
        factor = factor if dtype is ir.DataType.FLOAT else self.writer.cast(factor, dtype)
        return [apply("Mul", data, factor), kept]

    def _normal(self, shape: ir.Value, number: int) -> ir.Value:
        """Box and Muller (1958)."""
        apply = self.writer.apply
        one, two_pi = self._number(1.0, np.float32), self._number(2 * math.pi, np.float32)
        radius = apply("Log", apply("Sub", one, self._uniform(shape, 2 * number, "radius")))
        radius = apply("Sqrt", apply("Mul", radius, self._number(-2.0, np.float32)))
        return apply("Mul", radius, apply("Cos", apply("Mul", self._uniform(shape, 2 * number + 1, "angle"), two_pi)))

    def _scaled(self, value: ir.Value, factor: float, offset: float, dtype: ir.DataType) -> ir.Value:
        if (factor, offset) != (1.0, 0.0):
            value = self.writer.apply("Mul", value, self._number(factor, np.float32))
            value = self.writer.apply("Add", value, self._number(offset, np.float32))
        return value if dtype is ir.DataType.FLOAT else self.writer.cast(value, dtype)

    def _uniform(self, shape: ir.Value, stream: int, purpose: str = "") -> ir.Value:
        """Numbers from 0 to 1, 1 excluded: multiples of 2**-24, float32."""
        apply = self.writer.apply
        salt = stream * _GOLDEN + (1 if purpose else 0)
        key = self._hash(self._xor(self._key, self._number(salt & _WORD, np.uint32)))
        second = self._hash(self._xor(key, self._number(_GOLDEN, np.uint32)))
        size = apply("ReduceProd", shape, keepdims=0)
        index = apply("Range", self._number(0, np.int64), size, self._number(1, np.int64))
        bits = self._hash(self._xor(self._word(index), key), second)
        high = self.writer.cast(self._shifted(bits, 8), ir.DataType.FLOAT)
        return apply("Reshape", apply("Mul", high, self._number(2.0**-24, np.float32)), shape)

    def _hash(self, word: ir.Value, key: ir.Value | None = None) -> ir.Value:
        """A bijection of 32-bit words in which every bit of the input changes each of the output with chance 1/2."""
        word = self._multiplied(self._xor(word, self._shifted(word, _SHIFTS[0])), _MULTIPLIERS[0])
        word = word if key is None else self._xor(word, key)
        word = self._multiplied(self._xor(word, self._shifted(word, _SHIFTS[1])), _MULTIPLIERS[1])
        return self._xor(word, self._shifted(word, _SHIFTS[2]))

    def _word(self, value: ir.Value) -> ir.Value:
        """The last 32 bits of an int64."""
        masked = self.writer.apply("BitwiseAnd", value, self._number(_WORD, np.int64))
        return self.writer.cast(masked, ir.DataType.UINT32)

    def _multiplied(self, word: ir.Value, factor: int) -> ir.Value:
        """Modulo 2**32; in int64, since not every runtime multiplies unsigned words."""
        wide = self.writer.cast(word, ir.DataType.INT64)
        return self._word(self.writer.apply("Mul", wide, self._number(factor, np.int64)))

    def _shifted(self, word: ir.Value, places: int) -> ir.Value:
        return self.writer.apply("BitShift", word, self._number(places, np.uint32), direction="RIGHT")

    def _xor(self, one: ir.Value, other: ir.Value) -> ir.Value:
        return self.writer.apply("BitwiseXor", one, other)

    def _number(self, number: float, dtype: type) -> ir.Value:
        key = (number, dtype)
        if key not in self._constants:
            self._constants[key] = self.writer.constant(number, f"number_{number:g}", dtype)
        return self._constants[key]
