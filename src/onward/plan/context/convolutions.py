"""Convolutions along a sequence: how many neighbours a token needs, with padding and trimming written as their pads.

Exporters write a causal convolution as padding before it, or as one of more padding whose last results are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.nodes.node_writer import make_attribute
from onward.plan.horizontal.cuts import CannotShardError, NodeContext, Sizes
from onward.plan.horizontal.regions import PartitioningContext


@dataclass(frozen=True)
class Halo:
    """What a convolution of a rank's own tokens reads next to them.

    Attributes:
        before, after: how many elements of the axis.
        pads: of the convolution along all axes, once these elements are there.
    """

    before: int
    after: int
    pads: Sizes


def halo_of(context: NodeContext, axis: int) -> Halo:
    """What a `Conv` reads next to an element of the axis.

    Raises:
        CannotShardError: the result does not have one element for each of the axis.
    """
    dims = len(context.shape(0)) - 2
    own = axis - 2
    pads = _pads(context)
    window = (context.shape(1)[axis] - 1) * _along(context, "dilations", own)
    if _along(context, "strides", own) != 1 or pads[own] + pads[own + dims] != window:
        raise CannotShardError(f"{context.name} gives another number of tokens than it reads")
    if min(pads) < 0:
        raise CannotShardError(f"{context.name} has negative padding")
    rest = tuple(0 if place in (own, own + dims) else pad for place, pad in enumerate(pads))
    return Halo(pads[own], pads[own + dims], rest)


def fold_padding(partitioning: PartitioningContext, shapes: dict[str, Sizes]) -> bool:
    """Whether a graph was changed: pads with zeros before a convolution, and ends cut off after it, become its pads.

    Args:
        partitioning: of the graph, which is changed in place.
        shapes: of its values, corrected with it.
    """
    found = False
    for node in partitioning.nodes:
        if node.domain or node.op_type != "Conv":
            continue
        try:
            found |= _fold_before(partitioning, node) | _fold_after(partitioning, node, shapes)
        except CannotShardError:  # of unknown sizes
            continue
    return found


def _fold_before(partitioning: PartitioningContext, node: ir.Node) -> bool:
    padded = node.inputs[0]
    pad = None if padded is None else padded.producer()
    if pad is None or pad.domain or pad.op_type != "Pad" or padded is None or padded.is_graph_output():
        return False
    context, conv = partitioning.context(pad), partitioning.context(node)
    added = _added(context)
    if added is None or conv.attribute("auto_pad", "NOTSET") != "NOTSET":
        return False
    rank = len(added) // 2
    if any(added[i] or added[i + rank] for i in (0, 1)) or min(added) < 0:
        return False
    spatial = (*added[2:rank], *added[rank + 2 :])
    set_pads(node, tuple(a + b for a, b in zip(_pads(conv), spatial, strict=True)))
    node.replace_input_with(0, pad.inputs[0])
    if not padded.uses():
        partitioning.main.remove(pad, safe=True)
    return True


def _added(context: NodeContext) -> tuple[int, ...] | None:
    """Zeros that a `Pad` adds before and after every axis; None: it adds something else, or that is not known."""
    if context.version < 11 or context.attribute("mode", "constant") != "constant" or not _is_zero(context.node, 2):
        return None
    pads, rank = context.numbers(1), len(context.shape(0))
    axes = context.numbers(3) if context.has_input(3) else tuple(range(rank))
    if pads is None or axes is None:
        return None
    found = [0] * 2 * rank
    for place, axis in enumerate(axes):
        found[axis % rank], found[axis % rank + rank] = pads[place], pads[place + len(axes)]
    return tuple(found)


def _is_zero(node: ir.Node, index: int) -> bool:
    value = node.inputs[index] if index < len(node.inputs) else None
    stored = None if value is None else ir.convenience.get_const_tensor(value)
    return value is None or (stored is not None and not stored.numpy().any())


def _fold_after(partitioning: PartitioningContext, node: ir.Node, shapes: dict[str, Sizes]) -> bool:
    value = node.outputs[0]
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return False
    cut = uses[0][0]
    if cut.domain or cut.op_type != "Slice" or cut.outputs[0].is_graph_output() or uses[0][1]:
        return False
    context, conv = partitioning.context(cut), partitioning.context(node)
    before, after = context.shape(0), context.result()
    changed = [axis for axis, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    kept = _kept(context, changed[0]) if len(changed) == 1 and changed[0] >= 2 else None
    if kept is None or conv.attribute("auto_pad", "NOTSET") != "NOTSET" or _along(conv, "strides", changed[0] - 2) != 1:
        return False
    pads, place, dims = list(_pads(conv)), changed[0] - 2, len(before) - 2
    pads[place] -= kept[0]
    pads[place + dims] -= before[changed[0]] - kept[1]
    if min(pads) < 0:
        return False
    set_pads(node, tuple(pads))
    shapes[str(value.name)], value.shape = after, cut.outputs[0].shape
    cut.outputs[0].replace_all_uses_with(value)
    partitioning.main.remove(cut, safe=True)
    return True


def _kept(context: NodeContext, axis: int) -> tuple[int, int] | None:
    """The start and end of the run that a `Slice` takes of an axis; None: it takes no run, or that is not known."""
    if context.version < 10:
        return None
    first, last = context.numbers(1), context.numbers(2)
    axes = context.numbers(3) if context.has_input(3) else tuple(range(len(first or ())))
    steps = context.numbers(4) if context.has_input(4) else (1,) * len(first or ())
    if None in (first, last, axes, steps):
        return None
    rank = len(context.shape(0))
    for start, end, own, step in zip(first, last, axes, steps, strict=True):  # type: ignore[arg-type]
        if own % rank == axis:
            found = slice(start, end, step).indices(context.shape(0)[axis])
            return found[:2] if step == 1 else None
    return None


def _pads(context: NodeContext) -> Sizes:
    """Of a convolution, at the beginnings of its axes and then at their ends."""
    dims = len(context.shape(0)) - 2
    auto = str(context.attribute("auto_pad", "NOTSET"))
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        given = context.attribute("pads") if auto == "NOTSET" else None
        return (0,) * 2 * dims if given is None else tuple(int(pad) for pad in given)
    totals = []
    for i, (given, kernel, size) in enumerate(
        zip(context.shape(0)[2:], context.shape(1)[2:], context.result()[2:], strict=True)
    ):
        reached = (size - 1) * _along(context, "strides", i) + (kernel - 1) * _along(context, "dilations", i) + 1
        totals.append(max(0, reached - given))
    small, large = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return (*small, *large) if auto == "SAME_UPPER" else (*large, *small)


def _along(context: NodeContext, name: str, place: int) -> int:
    given = context.attribute(name)
    return 1 if given is None else int(given[place])


def set_pads(node: ir.Node, pads: Sizes) -> None:
    """Gives a convolution these pads instead of its own."""
    node.attributes["pads"] = make_attribute("pads", pads)
    node.attributes.pop("auto_pad", None)
