"""Arithmetic of weight updates as ONNX nodes: what several formulas need, and numbers that are computed once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter


@dataclass(kw_only=True)
class UpdateArithmetic:
    """Writes operators on weights, moments and numbers, in float32, of float64 weights in float64.

    Attributes:
        writer: of the graph.
        rate: the learning rate, float32 of rank 0.
        first_rate: with which state begins that depends on one (of torch's Rprop and ASGD), as `rate`.
        updates_before: updates done so far, int64 of rank 0.
        shared: what is written already, by what it is.
    """

    writer: NodeWriter
    rate: ir.Value
    first_rate: ir.Value
    updates_before: ir.Value
    shared: dict[tuple[Any, ...], ir.Value]

    def like(self, value: ir.Value, other: ir.Value) -> ir.Value:
        """A value in the type of another."""
        assert other.dtype is not None
        return value if value.dtype == other.dtype else self.typed(self.writer.cast(value, other.dtype), other.dtype)

    def widen(self, value: ir.Value) -> ir.Value:
        """A value in the type that is computed in."""
        wide = ir.DataType.DOUBLE if value.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
        return value if value.dtype is wide else self.typed(self.writer.cast(value, wide), wide)

    def decayed(self, weight: ir.Value, rate: ir.Value, decay: float) -> ir.Value:
        """A weight after decay that is scaled by the learning rate."""
        if not decay:
            return weight
        share = self.op("Mul", rate, self.number(decay, weight))
        return self.op("Mul", weight, self.op("Sub", self.number(1.0, weight), share))

    def rate_of(self, factor: float, weight: ir.Value) -> ir.Value:
        """The learning rate times the factor of a group, in the type of a weight."""
        key = ("rate", factor, weight.dtype)
        if key not in self.shared:
            rate = self.like(self.rate, weight)
            self.shared[key] = rate if factor == 1 else self.op("Mul", rate, self.number(factor, weight))
        return self.shared[key]

    def correction(self, decay: float, count: ir.Value, weight: ir.Value) -> ir.Value:
        """1 - decay**count, a small difference of numbers close to 1.

        In float32 -2 t / (1 - t) with t = tanh(count * log(decay) / 2), which loses no digits; it needs no float64,
        which WebGPU has not.
        """
        key = ("correction", decay, weight.dtype)
        if key not in self.shared and not decay:
            self.shared[key] = self.number(1.0, weight)
        if key not in self.shared:
            updates = self.like(count, weight)
            if weight.dtype is ir.DataType.DOUBLE:
                self.shared[key] = self.op(
                    "Sub", self.number(1.0, weight), self.op("Pow", self.number(decay, weight), updates)
                )
            else:
                tangent = self.op("Tanh", self.op("Mul", updates, self.number(math.log(decay) / 2, weight)))
                rest = self.op("Sub", self.number(1.0, weight), tangent)
                self.shared[key] = self.op("Mul", self.number(-2.0, weight), self.op("Div", tangent, rest))
        return self.shared[key]

    def root_of_correction(self, decay: float, count: ir.Value, weight: ir.Value) -> ir.Value:
        """The square root of `correction`."""
        key = ("root of correction", decay, weight.dtype)
        if key not in self.shared:
            self.shared[key] = self.op("Sqrt", self.correction(decay, count, weight))
        return self.shared[key]

    def blend(self, old: ir.Value, new: ir.Value, decay: float) -> ir.Value:
        """A running mean: decay * old + (1 - decay) * new."""
        kept = self.op("Mul", old, self.number(decay, old))
        return self.op("Add", kept, self.op("Mul", new, self.number(1 - decay, old)))

    def add_scaled(self, value: ir.Value, other: ir.Value, factor: float) -> ir.Value:
        """A value plus a multiple of another."""
        return value if not factor else self.op("Add", value, self.op("Mul", other, self.number(factor, other)))

    def subtract(self, weight: ir.Value, rate: ir.Value, direction: ir.Value) -> ir.Value:
        """A weight less a multiple of a direction."""
        return self.op("Sub", weight, self.op("Mul", rate, direction))

    def number(self, number: float, like: ir.Value) -> ir.Value:
        """A constant in the type of a value."""
        key = ("number", float(number), like.dtype)
        if key not in self.shared:
            dtype = np.float64 if like.dtype is ir.DataType.DOUBLE else np.float32
            self.shared[key] = self.writer.constant(number, f"number_{number:g}", dtype)
        return self.shared[key]

    def op(self, op_type: str, *inputs: ir.Value) -> ir.Value:
        """An operator whose result has the type of its inputs, written once for the same inputs, as of rates."""
        key = ("result", op_type, *inputs)
        if key not in self.shared:
            self.shared[key] = self.typed(self.writer.apply(op_type, *inputs), inputs[0].dtype)
        return self.shared[key]

    @staticmethod
    def typed(value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """The value, its type set."""
        value.type = None if dtype is None else ir.TensorType(dtype)
        return value
