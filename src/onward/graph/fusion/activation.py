"""GELU (by the error function or by tanh), Swish and SwiGLU, however their arithmetic is bracketed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from onward.graph.fusion.polynomial import Polynomial, is_close, polynomial, reached
from onward.graph.fusion.rewriting import DOMAIN, Editor, other_input, producer, readers
from onward.graph.nodes.known_values import KnownValues

GELU, SWISH, SWIGLU = "gelu", "swish", "swiglu"

_ERF: Polynomial = {(1,): math.sqrt(0.5)}
_TANH: Polynomial = {(1,): math.sqrt(2 / math.pi), (3,): 0.044715 * math.sqrt(2 / math.pi)}
_HALF_OF_BOTH: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_PRODUCT: Polynomial = {(1, 1): 1.0}
_MOST_READERS = 5


def fuse_gelu(editor: Editor) -> None:
    """`x/2 (1 + erf(x/√2))` and its approximation by tanh become `Gelu`."""
    for node in editor.nodes("Erf", "Tanh"):
        argument, inner = node.inputs[0], node.outputs[0]
        wanted, approximate = (_ERF, "none") if node.op_type == "Erf" else (_TANH, "tanh")
        for x in _variables(editor.facts, argument):
            tolerance = _tolerance(editor.facts, x)
            if argument is None or not is_close(polynomial(editor.facts, argument, [x]), wanted, tolerance):
                continue
            result = _result(editor.facts, x, inner, _HALF_OF_BOTH, tolerance)
            if result is not None:
                nodes = [*reached(editor.facts, argument, [x]), node, *reached(editor.facts, result, [x, inner])]
                about = f"by {'the error function' if approximate == 'none' else 'tanh'}"
                _put(editor, GELU, "Gelu", x, result, list(dict.fromkeys(nodes)), about, approximate=approximate)
                break


def fuse_swish(editor: Editor) -> None:
    """`x sigmoid(a x)` becomes `Swish` (SiLU for a = 1)."""
    for node in editor.nodes("Sigmoid"):
        argument, inner = node.inputs[0], node.outputs[0]
        for x in _variables(editor.facts, argument):
            found = None if argument is None else polynomial(editor.facts, argument, [x])
            if argument is None or found is None or found.keys() != {(1,)} or found[(1,)] <= 0:
                continue
            result = _result(editor.facts, x, inner, _PRODUCT, 0.0)
            if result is not None:
                nodes = [*reached(editor.facts, argument, [x]), node, *reached(editor.facts, result, [x, inner])]
                alpha = found[(1,)]
                about = "SiLU" if alpha == 1.0 else f"alpha {alpha:g}"
                _put(editor, SWISH, "Swish", x, result, list(dict.fromkeys(nodes)), about, alpha=alpha)
                break


def fuse_swiglu(editor: Editor) -> None:
    """`Swish(a) b` with both of one shape becomes `SwiGLU`; runs after `fuse_swish`."""
    for node in [n for n in editor.graph if n.op_type == "Swish" and n.domain in ("", DOMAIN)]:
        gate, swish = node.inputs[0], node.outputs[0]
        nodes = readers(swish)
        if gate is None or len(nodes) != 1 or nodes[0].op_type != "Mul" or nodes[0].domain != "":
            continue
        product = nodes[0]
        value = other_input(product, swish)
        shape = editor.facts.shape(gate)
        if value is None or shape is None or None in shape or editor.facts.shape(value) != shape:
            continue
        if not editor.is_free(swish, within=nodes):
            continue
        alpha = node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0
        output = editor.write("SwiGLU", [gate, value], product, fused=True, name="swiglu", alpha=alpha)
        editor.replace(product.outputs[0], output, SWIGLU, 2)
        editor.remove_unread([node])


def _put(
    editor: Editor,
    kind: str,
    op_type: str,
    x: ir.Value,
    result: ir.Value,
    nodes: list[ir.Node],
    about: str,
    **attributes: str | float,
) -> None:
    """Writes the activation, if nothing inside of it is read elsewhere."""
    last = result.producer()
    assert last is not None
    if editor.are_interior(set(nodes), result):
        output = editor.write(op_type, [x], last, fused=True, name=kind, **attributes)
        editor.replace(result, output, kind, len(nodes), about)


def _variables(facts: KnownValues, value: ir.Value | None, depth: int = 6) -> Iterator[ir.Value]:
    """Values that an expression could be a polynomial of, the outermost first."""
    level = [] if value is None else [value]
    seen: set[ir.Value] = set()
    for _ in range(depth):
        below: list[ir.Value] = []
        for one in level:
            if one in seen or facts.number(one) is not None:
                continue
            seen.add(one)
            yield one
            node = producer(one, "Add", "Sub", "Mul", "Div", "Pow")
            below += [] if node is None else [source for source in node.inputs if source is not None]
        level = below


def _result(facts: KnownValues, x: ir.Value, inner: ir.Value, wanted: Polynomial, tolerance: float) -> ir.Value | None:
    """The value after `inner` that is the wanted polynomial of both."""
    level = [inner]
    for _ in range(_MOST_READERS):
        after = [
            node.outputs[0]
            for value in level
            for node in readers(value)
            if node.domain == "" and node.op_type in ("Add", "Mul", "Div")
        ]
        for value in after:
            if is_close(polynomial(facts, value, [x, inner]), wanted, tolerance):
                return value
        level = after
    return None


def _tolerance(facts: KnownValues, x: ir.Value) -> float:
    """How exactly the numbers of an activation are given in a type: to a few roundings of it."""
    dtype = facts.dtype(x)
    if dtype is ir.DataType.DOUBLE:
        return 1e-13
    return 1e-2 if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else 1e-5
