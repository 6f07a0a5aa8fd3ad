"""Which tokens go to which experts, and with which share: masks, gates and row numbers, however they are written."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.fusion.expert_axes import Atom, Axes, Derived, Meaning, axis_of, broadcast, labels, regroup
from onward.graph.fusion.rewriting import Editor
from onward.graph.nodes.known_values import Size, integer, integers

_HOLDING_ANY_PLACE = (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE)


class RoutingReader:
    """What values mean next to one `TopK` or `ArgMax` that chooses experts.

    Attributes:
        chosen: the indices of the experts, [tokens.., K], or [tokens..] of an `ArgMax`.
        experts: how many there are.
        choices: K.
        obstacle: why a mixture that was read to its end is not fused.
    """

    def __init__(self, editor: Editor, top_k: ir.Node, experts: int, choices: int) -> None:
        self.editor, self.facts = editor, editor.facts
        self.chosen = top_k.outputs[-1]
        self.experts, self.choices = experts, choices
        self.obstacle: str | None = None
        shape = self.facts.shape(top_k.inputs[0]) or () if top_k.inputs[0] is not None else ()
        self.tokens: Axes = tuple(((Atom(f"N{i}", size)),) for i, size in enumerate(shape[:-1]))
        self.sizes = (*shape[:-1], choices)
        of_choices = (*self.tokens, (Atom("K", choices),))
        has_choices = self.facts.rank(self.chosen) == len(shape)
        self.found: dict[ir.Value, Meaning | None] = {
            self.chosen: Meaning("chosen", of_choices if has_choices else self.tokens)
        }

    def meaning(self, value: ir.Value | None) -> Meaning | None:
        """What a value is; None where it is nothing that is known."""
        if value is None:
            return None
        if value not in self.found:
            self.found[value] = None
            self.found[value] = self._read(value) or self._leaf(value)
        return self.found[value]

    def _read(self, value: ir.Value) -> Meaning | None:
        node = value.producer()
        if node is None:
            return None
        handler = getattr(self, f"_{node.op_type.lower()}", None)
        if handler is None or node.domain not in ("", "onward.fused"):
            return None
        found: Meaning | None = handler(node, value)
        return found

    def _leaf(self, value: ir.Value) -> Meaning | None:
        """Shares and tokens are known by their shapes, which are those of the choices, but for the last axis."""
        shape, wanted = self.facts.shape(value), self.sizes
        dtype = self.facts.dtype(value)
        if shape is None or dtype is None or not dtype.is_floating_point():
            return None
        if value.is_initializer():
            own = list[tuple[Atom, ...]]()
            for size in shape:  # exporters fold what unsqueezes a weight into it
                own.append(() if size == 1 else (Atom(f"W{sum(map(bool, own))}", size),))
            return Meaning("weight", tuple(own), value)
        if shape[:-1] != wanted[:-1] or None in shape or len(shape) != len(wanted):
            return None
        if shape == wanted:
            return Meaning("shares", (*self.tokens, (Atom("K", self.choices),)), value)
        return None if shape[-1] is None else self.tokens_of(value, shape[-1])

    def tokens_of(self, value: ir.Value, features: Size) -> Meaning | None:
        """The tokens themselves; what an expert computes begins with them."""
        raise NotImplementedError

    def is_zero(self, value: ir.Value | None) -> bool:
        """Whether a value holds zeros only."""
        return self.facts.filled_with(value) == 0.0

    def is_lowest(self, value: ir.Value | None) -> bool:
        """Whether a value holds nothing but minus infinity, or what is as good."""
        found = self.facts.filled_with(value)
        return found is not None and found < -1e30

    # Movement: the same, with other axes.

    def _identity(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return self.meaning(node.inputs[0])

    def _cast(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source = self.meaning(node.inputs[0])
        if source is None or source.kind == "mask":
            return source
        if source.kind in ("chosen", "places"):  # booleans and narrow types make one number of several
            return source if self.facts.dtype(value) in _HOLDING_ANY_PLACE else None
        same = node.inputs[0] is not None and self.facts.dtype(node.inputs[0]) is self.facts.dtype(value)
        return source if same else None

    def _reshape(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source, shape = self.meaning(node.inputs[0]), self.facts.shape(value)
        axes = None if source is None or shape is None else regroup(source.axes, shape)
        return None if source is None or axes is None else source.having(axes)

    def _unsqueeze(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source, places = self.meaning(node.inputs[0]), self.facts.axes(node)
        if source is None or places is None:
            return None
        axes = list(source.axes)
        rank = len(axes) + len(places)
        for place in sorted(p % rank for p in places):
            axes.insert(place, ())
        return source.having(tuple(axes))

    def _squeeze(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source, places = self.meaning(node.inputs[0]), self.facts.axes(node)
        if source is None or places is None:
            return None
        gone = {p % len(source.axes) for p in places}
        if any(source.axes[p] for p in gone):
            return None
        return source.having(tuple(group for i, group in enumerate(source.axes) if i not in gone))

    def _transpose(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source = self.meaning(node.inputs[0])
        if source is None:
            return None
        order = integers(node, "perm") or tuple(reversed(range(len(source.axes))))
        return source.having(tuple(source.axes[place] for place in order))

    def _expand(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        """Tokens are repeated for their choices or for all experts; other axes stay as they are."""
        source, shape = self.meaning(node.inputs[0]), self.facts.shape(value)
        if source is None or shape is None or len(shape) < len(source.axes):
            return None
        axes: list[tuple[Atom, ...]] = [*((),) * (len(shape) - len(source.axes)), *source.axes]
        for place, size in enumerate(shape):
            if not axes[place] and size != 1:
                if size not in (self.choices, self.experts) or self.choices == self.experts:
                    return None
                axes[place] = (Atom("K" if size == self.choices else "E", size),)
        return source.having(tuple(axes))

    def _tile(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        """Tokens are repeated for all experts, one copy after the other, along one axis."""
        source, repeats = self.meaning(node.inputs[0]), self.facts.numbers(node.inputs[1])
        if source is None or repeats is None or len(repeats) != len(source.axes):
            return None
        places = [place for place, count in enumerate(repeats) if count != 1]
        if len(places) != 1 or repeats[places[0]] != self.experts or source.expert is not None:
            return None
        axes = list(source.axes)
        axes[places[0]] = (Atom("E", self.experts), *axes[places[0]])
        return source.having(tuple(axes))

    # Masks and gates.

    def _equal(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        for one, other in ((0, 1), (1, 0)):
            source, given = self.meaning(node.inputs[one]), node.inputs[other]
            numbers = None if given is None else self.facts.numbers(given)
            if source is None or source.kind != "chosen" or given is None or numbers is None:
                continue
            if len(numbers) == 1 and (self.facts.rank(given) or 0) <= len(source.axes):
                return Meaning("mask", source.axes, expert=numbers[0])
            shape = self.facts.shape(given) or ()
            if numbers == tuple(range(self.experts)) and self.experts > 1:
                axes = tuple((Atom("E", size),) if size == self.experts else () for size in shape)
                found = broadcast(source.axes, axes)
                return None if found is None else Meaning("mask", found)
        return None

    def _onehot(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source = self.meaning(node.inputs[0])
        bounds = self.facts.numbers(node.inputs[2]) or self.facts.evaluate(node.inputs[2])  # type: ignore[arg-type]
        is_usual = bounds is not None and [float(n) for n in bounds] == [0.0, 1.0]
        if source is None or source.kind != "chosen" or not is_usual:
            return None
        if self.facts.number(node.inputs[1]) != self.experts:
            return None
        axes, place = list(source.axes), integer(node, "axis", -1)
        axes.insert(place if place >= 0 else len(axes) + 1 + place, (Atom("E", self.experts),))
        return Meaning("mask", tuple(axes))

    def _scatterelements(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        """Shares written into zeros, at the chosen experts."""
        chosen, shares = self.meaning(node.inputs[1]), self.meaning(node.inputs[2])
        if chosen is None or shares is None or chosen.kind != "chosen" or shares.kind != "shares":
            return None
        axis = integer(node, "axis", 0) % len(chosen.axes)
        reduction = node.attributes["reduction"].as_string() if "reduction" in node.attributes else "none"
        if self.is_zero(node.inputs[0]) and reduction in ("none", "add"):
            kind = "gates"
        elif self.is_lowest(node.inputs[0]) and reduction in ("none", "max"):
            kind = "scores"
        else:  # a product with zeros, the larger of a share and zero, a sum with minus infinity
            return None
        if axis != axis_of(chosen.axes, "K") or chosen.axes != shares.axes:
            return None
        shape = self.facts.shape(value)
        if shape is None or shape[axis] != self.experts:
            return None
        axes = list(chosen.axes)
        axes[axis] = (Atom("E", self.experts),)
        return Meaning(kind, tuple(axes), shares.data)

    def _sigmoid(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return self._of_scores(node, "Sigmoid")

    def _softmax(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        scores = self.meaning(node.inputs[0])
        is_last = scores is not None and integer(node, "axis", -1) in (-1, len(scores.axes) - 1)
        return self._of_scores(node, "Softmax") if is_last else None

    def _of_scores(self, node: ir.Node, op_type: str) -> Meaning | None:
        """Of scores that are minus infinity but at the choices, it is zero there."""
        scores = self.meaning(node.inputs[0])
        if scores is None or scores.kind != "scores" or axis_of(scores.axes, "E") != len(scores.axes) - 1:
            return None
        return Meaning("gates", scores.axes, Derived(op_type, scores.data))

    def masked_shares(self, left: Meaning, right: Meaning) -> Meaning | None:
        """Shares where a mask is set and zeros elsewhere; their sum over the choices is a gate."""
        for mask, shares in ((left, right), (right, left)):
            if mask.kind == "mask" and shares.kind == "shares":
                axes = broadcast(mask.axes, shares.axes)
                return None if axes is None else Meaning("masked", axes, shares.data, mask.expert)
        return None

    def _where(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        mask, shares = self.meaning(node.inputs[0]), self.meaning(node.inputs[1])
        if mask is None or shares is None or mask.kind != "mask" or not self.is_zero(node.inputs[2]):
            return None
        return self.masked_shares(mask, shares)

    def summed(self, node: ir.Node, source: Meaning) -> Meaning | None:
        """A sum over axes: which labels go, and what is left."""
        places = self.facts.axes(node)
        if places is None:
            return None
        gone = {p % len(source.axes) for p in places}
        keeps = bool(integer(node, "keepdims", 1))
        summed = labels(tuple(source.axes[p] for p in sorted(gone)))
        left = [() if i in gone else group for i, group in enumerate(source.axes) if keeps or i not in gone]
        if source.kind == "masked" and summed == ["K"]:
            return Meaning("gates", tuple(left), source.data, source.expert)
        return self.sum_of_experts(source, summed, tuple(left)) if source.kind == "weighted" else None

    def sum_of_experts(self, source: Meaning, summed: list[str], axes: Axes) -> Meaning | None:
        """What the experts give, added up."""
        raise NotImplementedError

    # One expert of several.

    def _gather(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source, index = self.meaning(node.inputs[0]), node.inputs[1]
        number = self.facts.numbers(index) if index is not None else None
        if source is None:
            return None
        axis = integer(node, "axis", 0) % max(len(source.axes), 1)
        if number is not None and len(number) == 1:
            group = () if self.facts.rank(index) == 1 else None  # type: ignore[arg-type]
            return self._pick(source, axis, number[0], group)
        given = self.meaning(index)
        return None if given is None or axis else self.rows(source, given)

    def _pick(self, source: Meaning, axis: int, number: int, group: tuple[()] | None) -> Meaning | None:
        """One element along an axis: one expert, or one coordinate."""
        atoms = source.axes[axis]
        if len(atoms) != 1 or not isinstance(atoms[0].size, int):
            return None
        axes = (*source.axes[:axis], *(() if group is None else (group,)), *source.axes[axis + 1 :])
        number %= atoms[0].size
        if atoms[0].label == "E" and source.kind in ("mask", "gates") and source.expert is None:
            return Meaning(source.kind, axes, source.data, number)
        if atoms[0].label == "C":
            return Meaning("places", axes, (source.data[number],), source.expert)
        if atoms[0].label == "W0" and source.kind == "weight" and atoms[0].size == self.experts:
            return Meaning("weight", axes, source.data, number)
        return None

    def _slice(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source = self.meaning(node.inputs[0])
        bounds = [self.facts.numbers(given) for given in node.inputs[1:]]
        if source is None or len(bounds) < 3 or any(b is None or len(b) != 1 for b in bounds):
            return None
        start, end, axis, *steps = (b[0] for b in bounds if b)
        axis %= len(source.axes)
        step = steps[0] if steps else 1
        if step not in (1, 2) or len(source.axes[axis]) != 1:
            return None
        size = source.axes[axis][0].size
        if not isinstance(size, int):
            return None
        start, end = (min(b + size if b < 0 else b, size) for b in (start, end))
        if end == start + 1:
            return self._pick(source, axis, start, ())
        return self.part(source, axis, start, end, step)

    def _split(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source = self.meaning(node.inputs[0])
        if source is None:
            return None
        axis = integer(node, "axis", 0) % len(source.axes)
        shapes = [self.facts.shape(output) for output in node.outputs]
        sizes = [size for shape in shapes if shape is not None and isinstance(size := shape[axis], int)]
        if len(sizes) < len(shapes):
            return None
        index = list(node.outputs).index(value)
        start = sum(sizes[:index])
        end = start + sizes[index]
        return self._pick(source, axis, start, ()) if end == start + 1 else self.part(source, axis, start, end)

    def part(self, source: Meaning, axis: int, start: int, end: int, step: int = 1) -> Meaning | None:
        """Some elements along an axis, more than one: each, or every other."""
        raise NotImplementedError

    def _nonzero(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        """The numbers of the rows of one expert, along every axis of its mask."""
        mask = self.meaning(node.inputs[0])
        if mask is None or mask.kind != "mask" or mask.expert is None:
            return None
        found = tuple(labels(mask.axes))
        if len(found) != len(mask.axes):
            return None
        return Meaning("places", ((Atom("C", len(found)),), (Atom("R", None),)), found, mask.expert)

    def _concat(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        parts = [self.meaning(given) for given in node.inputs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        axis = integer(node, "axis", 0) % len(known[0].axes)
        if len(known) == 1:
            return known[0]
        if any(part.kind != "places" or part.expert != known[0].expert for part in known):
            return self.stack_of(known, axis)
        if any(len(part.axes) != len(known[0].axes) or part.axes[axis] for part in known):
            return None
        joined = tuple(label for part in known for label in part.data)
        axes = list(known[0].axes)
        axes[axis] = (Atom("C", len(joined)),)
        return Meaning("places", tuple(axes), joined, known[0].expert)

    def stack_of(self, parts: list[Meaning], axis: int) -> Meaning | None:
        """What all experts give, side by side along an axis."""
        raise NotImplementedError

    def _gathernd(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source, given = self.meaning(node.inputs[0]), self.meaning(node.inputs[1])
        if source is None or given is None or integer(node, "batch_dims", 0):
            return None
        last = given.axes[-1]
        if given.kind == "chosen":
            return None if last else self.rows(source, given.having(given.axes[:-1]))
        if last and last[0].label != "C":
            return None
        return self.rows(source, given.having(given.axes[:-1]))

    def rows(self, source: Meaning, given: Meaning) -> Meaning | None:
        """The rows of a value at places, or the weights of the chosen experts."""
        if given.kind == "chosen" and source.kind == "weight":
            stack = source.axes[0]
            if source.expert is not None or [a.label for a in stack] != ["W0"] or stack[0].size != self.experts:
                return None
            return Meaning("weight", (*given.axes, *source.axes[1:]), source.data)
        if given.kind != "places" or len(given.axes) != 1:
            return None
        taken = source.axes[: len(given.data)]
        if [atom.label for group in taken for atom in group] != list(given.data) or not all(taken):
            return None
        axes = (*given.axes, *source.axes[len(given.data) :])
        if source.kind == "shares" and "K" in given.data:
            return Meaning("gates", axes, source.data, given.expert)
        whole = source.kind == "body" and len(given.data) == len(self.tokens) and source.expert is None
        return Meaning("body", axes, source.data, given.expert) if whole else None
