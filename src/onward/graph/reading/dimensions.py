"""Symbolic dimensions fixed by the user: `mapped_dimensions={"batch": 8}`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.shape_inference import contradiction
from onward.spelling import did_you_mean

_ARITHMETIC: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"Max": max, "Min": min, "max": max, "min": min}


def symbolic_dimensions(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """The names of the dimensions of the graph's inputs that are open, with where each stands: `input_ids[0]`."""
    found: dict[str, list[str]] = {}
    for value in model.graph.inputs:
        if value.shape is None or value.is_initializer():
            continue
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int) and size.value is not None:
                found.setdefault(str(size.value), []).append(f"{value.name}[{axis}]")
    return {name: tuple(places) for name, places in found.items()}


def name_open_dimensions(model: ir.Model) -> None:
    """Gives the open dimensions of the graph's inputs that lack a name one each, in place.

    A first axis is the batch's; another one is named after its input: `audio_axis1`. Without, a run could not tell the
    batch from the length of a sample.
    """
    for value in model.graph.inputs:
        if value.shape is None:
            continue
        named = [
            size if isinstance(size, int) or size.value is not None else f"{value.name}_axis{axis}" if axis else "batch"
            for axis, size in enumerate(value.shape)
        ]
        if named != list(value.shape):
            value.shape = ir.Shape(named)


def bind_dimensions(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Replaces symbolic dimensions by numbers, in place: inputs, outputs and every value whose shape is noted.

    A dimension that is an expression of bound names (`2*batch`, as torch's exporter writes) becomes its value.

    Args:
        model: the model, nested graphs included.
        sizes: symbolic dimension of the graph's inputs -> its size, at least 1.

    Raises:
        ModelError: no input has such a dimension, or a size contradicts a size that the model fixes.
    """
    known = symbolic_dimensions(model)
    for name, size in sizes.items():
        _check(name, size, known, model)
    before = model.clone()
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in _values(graph):
            if value.shape is not None:
                _bind_shape(value, sizes)
    error = contradiction(model)
    if error is not None and contradiction(before) is None:
        raise ModelError(f"mapped_dimensions {dict(sizes)} contradict a size that the model fixes: {error}")


def _check(name: str, size: int, known: Mapping[str, tuple[str, ...]], model: ir.Model) -> None:
    if name not in known:
        fixed = [f"{v.name} {v.shape}" for v in model.graph.inputs if not v.is_initializer()]
        if not known:
            raise ModelError(
                f"mapped_dimensions names {name!r}, but no input of the model has a symbolic dimension: "
                f"{', '.join(fixed)}. Export the model with that dimension dynamic, or remove the entry."
            )
        hint = did_you_mean(name, known)
        listed = "; ".join(f"{symbol!r} ({', '.join(places)})" for symbol, places in known.items())
        raise ModelError(f"mapped_dimensions names {name!r}; the model's symbolic dimensions are {listed}.{hint}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ModelError(f"mapped_dimensions gives {name!r} the size {size!r}; expected a whole number of at least 1.")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs
    yield from graph.outputs


def _bind_shape(value: ir.Value, sizes: Mapping[str, int]) -> None:
    assert value.shape is not None
    bound = [_bound(size, sizes, value) for size in value.shape]
    if bound != list(value.shape):
        value.shape = ir.Shape(bound)


def _bound(size: int | ir.SymbolicDim, sizes: Mapping[str, int], value: ir.Value) -> int | ir.SymbolicDim:
    if isinstance(size, int) or size.value is None:
        return size
    number = evaluate_dimension(str(size.value), sizes)
    if number is None:
        return size
    if number < 0:
        raise ModelError(
            f"mapped_dimensions {dict(sizes)} makes the dimension {size.value!r} of {value.name!r} negative ({number})."
        )
    return number


def evaluate_dimension(text: str, sizes: Mapping[str, int]) -> int | None:
    """The number that a dimension's name or expression stands for, or None where something in it is open."""
    if text in sizes:
        return sizes[text]
    try:
        return _evaluate(ast.parse(text, mode="eval").body, sizes)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _evaluate(node: ast.AST, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in sizes:
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left, sizes), _evaluate(node.right, sizes))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_evaluate(argument, sizes) for argument in node.args))
    raise ValueError(ast.dump(node))
