"""Softplus and `nan_to_num`, which exporters write out as choices (`Where`) among an input, numbers and functions."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.fusion.rewriting import Editor, other_input, producer

SOFTPLUS, NAN_TO_NUM = "softplus", "nan_to_num"


def fuse_softplus(editor: Editor) -> None:
    """`Where(b x > t, x, Softplus(b x) / b)`, which is `torch.nn.functional.softplus(x, b, t)`, becomes `Softplus`."""
    for node in editor.nodes("Where"):
        condition, x, curved = node.inputs
        above = producer(condition, "Greater")
        threshold = None if above is None else editor.facts.number(above.inputs[1])
        if above is None or x is None or threshold is None:
            continue
        nodes = [node, above]
        scaled, beta = above.inputs[0], 1.0
        division = producer(curved, "Div")
        if division is not None:
            factor = editor.facts.number(division.inputs[1])
            if factor is None or factor <= 0:
                continue
            beta, curved = factor, division.inputs[0]
            nodes.append(division)
        product = producer(scaled, "Mul") if scaled is not x else None
        if product is not None:
            if editor.facts.number(other_input(product, x)) != beta:
                continue
            nodes.append(product)
        softplus = producer(curved, "Softplus")
        if softplus is None or softplus.inputs[0] is not scaled or (product is None and (scaled is not x or beta != 1)):
            continue
        nodes.append(softplus)
        _put(editor, SOFTPLUS, "Softplus", x, node, nodes, beta=beta, threshold=threshold)


def fuse_nan_to_num(editor: Editor) -> None:
    """Choices by `IsNaN(x)` and by `IsInf(x)` with either sign of x, in any order, become one `NanToNum`."""
    for node in editor.nodes("Where"):
        numbers: dict[str, float] = {}
        nodes: list[ir.Node] = []
        tested: set[ir.Value] = set()
        choice: ir.Node | None = node
        rest: ir.Value | None = None
        while choice is not None and len(numbers) < 3:
            what = _tested(editor, choice.inputs[0], nodes, tested)
            number = editor.facts.number(choice.inputs[1])
            if what is None or number is None or what in numbers:
                break
            numbers[what] = number
            nodes.append(choice)
            rest = choice.inputs[2]
            choice = producer(rest, "Where")
        if len(numbers) == 3 and rest is not None and tested == {rest}:
            _put(editor, NAN_TO_NUM, "NanToNum", rest, node, nodes, **numbers)


def _tested(editor: Editor, condition: ir.Value | None, nodes: list[ir.Node], tested: set[ir.Value]) -> str | None:
    """Which elements a condition is true of, `nan`, `posinf` or `neginf`; adds its nodes and the value it tests."""
    nan = producer(condition, "IsNaN")
    if nan is not None and nan.inputs[0] is not None:
        nodes.append(nan)
        tested.add(nan.inputs[0])
        return "nan"
    both = producer(condition, "And")
    for one, two in () if both is None else (both.inputs, both.inputs[::-1]):
        sign, infinite = producer(one, "Less", "Greater"), producer(two, "IsInf")
        if both is None or sign is None or infinite is None or infinite.attributes:
            continue
        x = infinite.inputs[0]
        if x is None or sign.inputs[0] is not x or editor.facts.number(sign.inputs[1]) != 0:
            continue
        nodes += [both, sign, infinite]
        tested.add(x)
        return "neginf" if sign.op_type == "Less" else "posinf"
    return None


def _put(
    editor: Editor, kind: str, op_type: str, x: ir.Value, last: ir.Node, nodes: list[ir.Node], **attributes: float
) -> None:
    """Writes the function instead of the last choice, if nothing inside of it is read elsewhere."""
    dtype = editor.facts.dtype(x)
    if dtype is not None and dtype.is_floating_point() and editor.are_interior(set(nodes), last.outputs[0]):
        output = editor.write(op_type, [x], last, fused=True, name=kind, **attributes)
        editor.replace(last.outputs[0], output, kind, len(nodes))
