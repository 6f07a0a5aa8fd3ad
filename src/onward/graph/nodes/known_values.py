"""What is known of the values of a graph before it runs: shapes, element types, numbers that follow from constants.

Shape arithmetic is followed too: a number that comes out of the shape of a value is known where that size is fixed,
and has the name of its dimension where it is open.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.shape_inference import inferred_values
from onward.graph.operators import Fact, has_fact

Size = int | str
"""A size of a shape: a number, or the name of an open dimension, which stands for one number everywhere."""

LARGEST_EVALUATED = 64
"""Constants of more elements than this are no shapes and no factors."""

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Sqrt": np.sqrt,
    "Neg": np.negative,
    "Reciprocal": lambda x: 1.0 / x,
}

_FOLLOWED = frozenset(
    {*_ARITHMETIC, "Identity", "Cast", "CastLike", "Concat", "Gather", "Squeeze", "Unsqueeze", "Reshape", "Slice"}
)
"""Operators that shape arithmetic is made of."""


class KnownValues:
    """Knowledge about a graph, worked out as it is asked for.

    Args:
        model: prepared for lowering.
        weights: initializers that train; they are no constants.
        inferred: what shape inference found in this very graph; None: it is run here.
    """

    def __init__(
        self, model: ir.Model, weights: Collection[str], inferred: Mapping[str, ir.Value] | None = None
    ) -> None:
        self.opset = model.opset_imports.get("", 0)
        self.weights = frozenset(weights)
        self._inferred = inferred_values(model) if inferred is None else inferred
        self._evaluated: dict[ir.Value, np.ndarray | None] = {}
        self._finite: dict[ir.Value, bool] = {}
        self._signatures: dict[ir.Value, int] = {}
        self._numbers: dict[Any, int] = {}

    def shape(self, value: ir.Value) -> tuple[Size | None, ...] | None:
        """The sizes of a value; None for a size, or in all, where nothing is known."""
        shape = value.shape
        inferred = self._inferred.get(str(value.name))
        if inferred is not None and inferred.shape is not None and (shape is None or _is_vague(shape)):
            shape = inferred.shape
        if shape is None:
            return None
        return tuple(size if isinstance(size, int) else size.value for size in shape)

    def rank(self, value: ir.Value) -> int | None:
        """How many axes a value has."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The element type of a value."""
        if value.dtype is not None:
            return value.dtype
        inferred = self._inferred.get(str(value.name))
        return None if inferred is None else inferred.dtype

    def describe(self, value: ir.Value) -> None:
        """Writes what is known of a value's type and shape on the value itself."""
        inferred = self._inferred.get(str(value.name))
        if inferred is None:
            return
        if value.shape is None:
            value.shape = inferred.shape
        if value.type is None:
            value.type = inferred.type

    def number(self, value: ir.Value | None) -> float | None:
        """The one number that a value always is."""
        found = None if value is None else self.evaluate(value)
        if found is None or found.size != 1 or found.dtype == object:
            return None
        return float(found.reshape(()))

    def numbers(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """Integers that a value always holds."""
        found = None if value is None else self.evaluate(value)
        if found is None or found.dtype.kind not in "iu":
            return None
        return tuple(int(n) for n in found.reshape(-1))

    def axes(self, node: ir.Node) -> tuple[int, ...] | None:
        """The axes that a node names by its second input or, in earlier opsets, by an attribute."""
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            return self.numbers(node.inputs[1])
        return integers(node, "axes")

    def filled_with(self, value: ir.Value | None) -> float | None:
        """The one number that a value, of whatever size, holds everywhere."""
        node = None if value is None else value.producer()
        if node is not None and node.domain == "" and node.op_type in ("Expand", "Cast", "CastLike"):
            return self.filled_with(node.inputs[0])
        if node is not None and node.domain == "" and node.op_type == "ConstantOfShape":
            filled = node.attributes.get("value")
            return 0.0 if filled is None else float(np.ravel(filled.as_tensor().numpy())[0])
        found = None if value is None else self.evaluate(value)
        if found is None or not found.size or found.dtype.kind not in "iuf" or (found != found.flat[0]).any():
            return None
        return float(found.flat[0])

    def sizes(self, value: ir.Value) -> tuple[Size, ...] | None:
        """The entries of a value that is a shape, with the names of open dimensions."""
        found = self.evaluate(value)
        if found is None or found.dtype.kind not in "iuO":
            return None
        return tuple(n if isinstance(n, str) else int(n) for n in found.reshape(-1).tolist())

    def is_number(self, value: ir.Value | None, expected: float) -> bool:
        """Whether a value is this number, as exactly as its element type can hold it."""
        found = self.number(value)
        if found is None or value is None:
            return False
        tolerance = {ir.DataType.DOUBLE: 1e-14, ir.DataType.FLOAT: 2e-7}.get(self.dtype(value) or ir.DataType.FLOAT)
        return math.isclose(found, expected, rel_tol=4e-3 if tolerance is None else tolerance)

    def is_finite(self, value: ir.Value) -> bool:
        """Whether an initializer holds finite numbers alone; read once, since all layers may share a large mask."""
        if value not in self._finite:
            assert value.const_value is not None
            self._finite[value] = all_finite(value.const_value)
        return self._finite[value]

    def evaluate(self, value: ir.Value) -> np.ndarray | None:
        """The small array that a value always is; entries that are open dimensions are their names."""
        if value not in self._evaluated:
            self._evaluated[value] = None  # what is looked for inside of itself is not known
            with contextlib.suppress(ValueError, TypeError, IndexError, ArithmeticError):
                self._evaluated[value] = _as_integers(self._evaluate(value))
        return self._evaluated[value]

    def _evaluate(self, value: ir.Value) -> np.ndarray | None:
        if value.is_initializer():
            tensor = value.const_value
            if tensor is None or value.name in self.weights or tensor.size > LARGEST_EVALUATED:
                return None
            return np.asarray(tensor.numpy())
        node = value.producer()
        if node is None or node.domain != "" or self._is_large(value):
            return None
        if node.op_type == "Shape":
            return self._shape_of(node)
        if node.op_type not in _FOLLOWED:
            return None
        inputs = []
        for source in node.inputs[:1] if node.op_type == "CastLike" else node.inputs:
            found = None if source is None else self.evaluate(source)
            if found is None:
                return None
            inputs.append(found)
        return self._apply(node, inputs)

    def _is_large(self, value: ir.Value) -> bool:
        """Whether a value is an activation by its shape alone; the search ends there."""
        shape = self.shape(value)
        if shape is None:
            return False
        known = [size for size in shape if isinstance(size, int)]
        return (len(shape) > 1 and len(known) < len(shape)) or math.prod(known) > LARGEST_EVALUATED

    def _shape_of(self, node: ir.Node) -> np.ndarray | None:
        source = node.inputs[0]
        shape = None if source is None else self.shape(source)
        if shape is None or source is None:
            return None
        named = [f"{source.name}.{axis}" if size is None else size for axis, size in enumerate(shape)]
        named = named[integer(node, "start", 0) : integer(node, "end", len(named))]
        return np.array(named, dtype=np.int64 if all(isinstance(n, int) for n in named) else object)

    def _apply(self, node: ir.Node, inputs: list[np.ndarray]) -> np.ndarray | None:
        first = inputs[0]
        op_type = node.op_type
        if op_type in _ARITHMETIC:
            return self._compute(node, inputs)
        if op_type == "Identity" or (op_type in ("Cast", "CastLike") and first.dtype == object):
            return first
        if op_type == "Cast":
            return first.astype(ir.DataType(integer(node, "to", 1)).numpy())
        if op_type == "CastLike":
            dtype = None if node.inputs[1] is None else self.dtype(node.inputs[1])
            return first if dtype is None else first.astype(dtype.numpy())
        if op_type == "Concat":
            return np.concatenate(inputs, axis=integer(node, "axis", 0))
        if op_type == "Gather":
            taken = np.take(first, inputs[1].astype(np.int64), axis=integer(node, "axis", 0))
            return np.asarray(taken, dtype=first.dtype)  # the name of one dimension is no array of letters
        if op_type in ("Squeeze", "Unsqueeze", "Reshape"):
            return self._reshape(node, inputs)
        if op_type == "Slice" and len(inputs) > 2 and first.ndim == 1:
            step = int(inputs[4][0]) if len(inputs) > 4 else 1
            return first[int(inputs[1][0]) : int(inputs[2][0]) : step]
        return None

    def _compute(self, node: ir.Node, inputs: list[np.ndarray]) -> np.ndarray:
        """Arithmetic; with an open dimension in it, the result is one more open dimension."""
        if any(found.dtype == object for found in inputs):
            shape = np.broadcast_shapes(*(found.shape for found in inputs))
            names = [f"{node.outputs[0].name}.{index}" for index in range(math.prod(shape))]
            return np.array(names, dtype=object).reshape(shape)
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            if node.op_type == "Div" and inputs[0].dtype.kind in "iu":  # rounded towards zero
                left, right = inputs
                return np.asarray((left - np.fmod(left, right)) // right)
            return np.asarray(_ARITHMETIC[node.op_type](*inputs))

    def _reshape(self, node: ir.Node, inputs: list[np.ndarray]) -> np.ndarray | None:
        """Between a number and a vector of one; nothing else is shape arithmetic."""
        source = inputs[0]
        if source.size != 1:
            return source if source.ndim == 1 and node.op_type == "Reshape" and inputs[1].size == 1 else None
        rank = self.rank(node.outputs[0])
        if rank is None:
            added = {"Unsqueeze": 1, "Squeeze": -1}.get(node.op_type)
            rank = int(inputs[1].size) if added is None else source.ndim + added
        return source.reshape((1,) * rank)

    def signature(self, value: ir.Value, depth: int = 100) -> int:
        """A number that two values share only if they are computed alike from the same values."""
        if value not in self._signatures:
            self._signatures[value] = self._number_of(self._key(value, depth))
        return self._signatures[value]

    def _key(self, value: ir.Value, depth: int) -> Any:
        node = value.producer()
        if (
            node is None
            or node.domain != ""
            or has_fact(node.op_type, Fact.RANDOM)
            or len(node.outputs) != 1
            or not depth
        ):
            found = self.evaluate(value) if node is None else None
            return value if found is None else (found.dtype.str, found.shape, found.tobytes())
        attributes = []
        for name, attribute in sorted(node.attributes.items()):
            if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.TENSOR):
                return value
            given = attribute.value
            attributes.append((name, tuple(given) if isinstance(given, list | tuple) else given))
        inputs = tuple(-1 if source is None else self.signature(source, depth - 1) for source in node.inputs)
        return node.op_type, tuple(attributes), inputs

    def _number_of(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _as_integers(found: np.ndarray | None) -> np.ndarray | None:
    """What was picked from among sizes and names, as plain numbers where no name is left."""
    if found is None or found.dtype != object or any(isinstance(one, str) for one in found.flat):
        return found
    return found.astype(np.int64)


def _is_vague(shape: ir.Shape) -> bool:
    return any(not isinstance(size, int) and size.value is None for size in shape)


def integer(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute of a node."""
    attribute = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())


def integers(node: ir.Node, name: str) -> tuple[int, ...] | None:
    """A list of integers that is an attribute of a node."""
    attribute = node.attributes.get(name)
    return None if attribute is None else tuple(int(n) for n in attribute.as_ints())


def all_finite(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor holds neither infinity nor NaN."""
    array = tensor.numpy()
    return bool(np.isfinite(array if array.dtype.kind == "f" else np.asarray(array, np.float64)).all())
