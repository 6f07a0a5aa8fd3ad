"""Products with experts' weights, activations between them, and the sum of what the experts give."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from onward.graph.fusion.expert_axes import Atom, Axes, Meaning, Shares, broadcast, labels
from onward.graph.fusion.expert_body import INFINITY, Formula, WeightOf
from onward.graph.fusion.expert_routing import RoutingReader
from onward.graph.nodes.known_values import Size, integer

Terms = dict[int, tuple[Formula, Shares]]
"""Expert -> what it computes, and the shares it is weighed by; the key -1: all experts, whose weights are stacks."""


class ExpertReader(RoutingReader):
    """Reads what experts compute. `data` of a body is its formula, of a weighted one and of a sum `Terms`."""

    def tokens_of(self, value: ir.Value, features: Size) -> Meaning:
        """The tokens themselves."""
        return Meaning("body", (*self.tokens, (Atom("F", features),)), Formula(kind="tokens", value=value))

    def _read(self, value: ir.Value) -> Meaning | None:
        found = super()._read(value)
        if found is None or found.kind != "body" or found.data.value is not None or found.axes[:-1] != self.tokens:
            return found
        return Meaning("body", found.axes, replace(found.data, value=value), found.expert)

    # Products with weights.

    def _gemm(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        numbers = [node.attributes[n].as_float() if n in node.attributes else 1.0 for n in ("alpha", "beta")]
        if integer(node, "transA", 0) or numbers != [1.0, 1.0]:
            return None
        return self._linear_layer(node, bool(integer(node, "transB", 0)))

    def _linear(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return self._linear_layer(node, bool(integer(node, "rows_are_outputs", 0)))

    def _linear_layer(self, node: ir.Node, rows_are_outputs: bool) -> Meaning | None:
        x, weight = self.meaning(node.inputs[0]), self.meaning(node.inputs[1])
        if x is None or weight is None or weight.kind != "weight":
            return None
        axes = weight.axes[::-1] if rows_are_outputs else weight.axes
        found = self._product(x, weight.having(axes))
        if found is None or len(node.inputs) < 3 or node.inputs[2] is None:
            return found
        bias = self.meaning(node.inputs[2])
        return None if bias is None else self._biased(found, bias)

    def _matmul(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        left, right = self.meaning(node.inputs[0]), self.meaning(node.inputs[1])
        if left is None or right is None:
            return None
        if right.kind == "weight":
            return self._product(left, right)
        if left.kind == "weight":  # the same, both transposed
            found = self._product(right.having(_turned(right.axes)), left.having(_turned(left.axes)))
            return None if found is None else found.having(_turned(found.axes))
        return None

    def _product(self, x: Meaning, weight: Meaning) -> Meaning | None:
        """`x @ weight`; batch axes of the weight are experts, or tokens with their choices."""
        if x.kind != "body" or len(weight.axes) < 2 or len(x.axes) < 2:
            return None
        *batch, inputs, outputs = weight.axes
        if [a.label for a in x.axes[-1]] != ["F"] or not inputs or inputs[0].size != x.axes[-1][0].size:
            return None
        found = self._with_weight(x, weight, inputs, outputs)
        kept = broadcast(x.axes[:-2], self._experts_first(tuple(batch)))
        if found is None or kept is None or len(outputs) != 1:
            return None
        return Meaning("body", (*kept, x.axes[-2], (Atom("F", outputs[0].size),)), found, x.expert)

    def _experts_first(self, batch: Axes) -> Axes:
        return tuple((Atom("E", g[0].size),) if [a.label for a in g] == ["W0"] else g for g in batch)

    def _with_weight(
        self, x: Meaning, weight: Meaning, inputs: tuple[Atom, ...], outputs: tuple[Atom, ...]
    ) -> Formula | None:
        """The formula of a product that sums over `inputs`."""
        names = [atom.label for atom in (*inputs, *outputs)]
        shape = self.facts.shape(weight.data) or ()
        is_stack = len(shape) > 2
        if sorted(names) != (["W1", "W2"] if is_stack else ["W0", "W1"]):
            return None
        if 1 in (shape[0], *shape[-2:]) or any(size != 1 for size in shape[1:-2]):
            return None
        reads = WeightOf(weight.data, weight.expert, is_stack, rows_are_outputs=names[0] > names[1])
        return Formula(kind="linear", operands=(x.data,), weight=reads)

    def _einsum(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        equation = node.attributes["equation"].as_string().replace(" ", "")
        terms, arrow, result = equation.partition("->")
        letters = terms.split(",")
        given = [self.meaning(operand) for operand in node.inputs]
        known = [one for one in given if one is not None]
        if not arrow or "." in equation or len(known) < len(letters):
            return None
        if any(
            len(term) != len(one.axes) or len(set(term)) < len(term) for term, one in zip(letters, known, strict=True)
        ):
            return None
        operands = dict(zip(letters, known, strict=True))
        bodies = [(term, one) for term, one in operands.items() if one.kind == "body"]
        weights = [(term, one) for term, one in operands.items() if one.kind == "weight"]
        gates = [(term, one) for term, one in operands.items() if one.kind in ("gates", "shares")]
        if len(operands) != len(letters) or len(bodies) != 1 or len(weights) > 1 or len(gates) > 1:
            return None
        return self._einsum_of(bodies[0], weights[0] if weights else None, gates[0] if gates else None, result)

    def _einsum_of(
        self,
        body: tuple[str, Meaning],
        weight: tuple[str, Meaning] | None,
        gate: tuple[str, Meaning] | None,
        result: str,
    ) -> Meaning | None:
        x = body[1]
        groups = dict(zip(body[0], x.axes, strict=True))
        if weight is not None:
            own = dict(zip(weight[0], self._experts_first(weight[1].axes), strict=True))
            inputs = [c for c in own if [a.label for a in groups.get(c, ())] == ["F"] and c not in result]
            outputs = [c for c in own if own[c] and own[c][0].label[0] == "W" and c not in groups]
            if len(inputs) != 1 or len(outputs) != 1:
                return None
            raw = dict(zip(weight[0], weight[1].axes, strict=True))
            found = self._with_weight(x, weight[1], raw[inputs[0]], raw[outputs[0]])
            shared = [c for c in own if c in groups and c not in inputs]
            if (
                found is None
                or any(own[c] != groups[c] for c in shared)
                or raw[inputs[0]][0].size != groups[inputs[0]][0].size
            ):
                return None
            del groups[inputs[0]]
            groups |= {c: own[c] for c in own if c not in inputs and c not in outputs}
            groups[outputs[0]] = (Atom("F", raw[outputs[0]][0].size),)
            x = Meaning("body", tuple(groups.values()), found, x.expert)
        if gate is not None:
            own = dict(zip(gate[0], gate[1].axes, strict=True))
            if any(groups.get(c) != own[c] for c in own):
                return None
        gone = [c for c in groups if c not in result]
        axes = tuple(groups.get(c, ()) for c in result)
        if gate is None:
            return None if gone else x.having(axes)
        weighted = self._weighed(x, gate[1].having(tuple(groups[c] if c in own else () for c in groups)))
        return (
            None
            if weighted is None
            else self.sum_of_experts(weighted, [a.label for c in gone for a in groups[c]], axes)
        )

    def _add(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        left, right = (self.meaning(given) for given in node.inputs)
        for one, other, place in ((left, right, 1), (right, left, 0)):
            term = None if one is None else self._weighted(one)
            if term is not None and term.kind in ("weighted", "sum") and self.is_zero(node.inputs[place]):
                return Meaning("sum", term.axes, term.data) if term.expert is None or not _has_rows(term) else None
            number = self.facts.number(node.inputs[place])
            if one is not None and number is not None and one.kind == "body":
                return self._step(one, ("half", "clip", "linear", "bias"), Formula(kind="shift", alpha=number))
            if one is not None and other is not None and one.kind == "body" and other.kind == "weight":
                return self._biased(one, other)
        if left is None or right is None:
            return None
        return self._sum_of_two(self._weighted(left), self._weighted(right))

    def _sum_of_two(self, left: Meaning | None, right: Meaning | None) -> Meaning | None:
        if left is None or right is None or {left.kind, right.kind} - {"weighted", "sum"}:
            return None
        if left.axes != right.axes or _has_rows(left):
            return None
        if {-1} & {*left.data, *right.data} or {*left.data} & {*right.data}:
            return None
        return Meaning("sum", left.axes, {**left.data, **right.data})

    def _scatternd(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        """The rows of one expert, added to what the experts before it gave."""
        before, places, rows = (self.meaning(given) for given in node.inputs)
        rows = None if rows is None else self._weighted(rows)
        reduction = node.attributes["reduction"].as_string() if "reduction" in node.attributes else "none"
        if places is None or rows is None or places.kind != "places" or rows.kind != "weighted" or reduction != "add":
            return None
        is_first = self.is_zero(node.inputs[0])
        if not is_first and (before is None or before.kind != "sum"):
            return None
        if (
            places.expert != rows.expert
            or list(places.data) != [g[0].label for g in self.tokens]
            or not _has_rows(rows)
        ):
            return None
        terms: Terms = {} if is_first or before is None else before.data
        if {*terms} & {*rows.data}:
            return None
        return Meaning("sum", (*self.tokens, rows.axes[-1]), {**terms, **rows.data})

    def _biased(self, x: Meaning, bias: Meaning) -> Meaning | None:
        """A bias for every feature of one expert, or of all of them."""
        if not bias.axes or len(bias.axes[-1]) != 1:
            return None
        features = (Atom("F", bias.axes[-1][0].size),)
        axes = broadcast(x.axes, (*self._experts_first(bias.axes[:-1]), features))
        if axes != x.axes or x.kind != "body" or x.data.kind != "linear":
            return None
        shape = self.facts.shape(bias.data) or ()
        is_stack = sum(size != 1 for size in shape) == 2
        if is_stack and shape[0] == 1:
            return None
        if bias.axes[-1][0].label != ("W1" if is_stack else "W0"):
            return None
        return Meaning(
            "body",
            x.axes,
            Formula(kind="bias", operands=(x.data,), weight=WeightOf(bias.data, bias.expert, is_stack)),
            x.expert,
        )

    # Activations.

    def _gelu(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        approximate = node.attributes["approximate"].as_string() if "approximate" in node.attributes else "none"
        return self._activated(node, "gelu" if approximate == "none" else "gelu_tanh")

    def _swish(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return self._activated(
            node, "swish", node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0
        )

    def _relu(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return self._activated(node, "relu")

    def _sigmoid(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return super()._sigmoid(node, value) or self._activated(node, "sigmoid")

    def _tanh(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return self._activated(node, "tanh")

    def _pow(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return self._squared(self.meaning(node.inputs[0])) if self.facts.number(node.inputs[1]) == 2.0 else None

    def _squared(self, x: Meaning | None) -> Meaning | None:
        """The square of ReLU is an activation, too."""
        if x is None or x.kind != "body" or (x.data.kind, x.data.name) != ("activation", "relu"):
            return None
        return Meaning("body", x.axes, replace(x.data, name="relu_squared"), x.expert)

    def _activated(self, node: ir.Node, name: str, alpha: float = 1.0) -> Meaning | None:
        steps = ("linear", "bias", "half", "clip")
        return self._step(self.meaning(node.inputs[0]), steps, Formula(kind="activation", name=name, alpha=alpha))

    def _clip(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        x, low, high = [*node.inputs, None, None][:3]
        return self._clipped(x, low, high)

    def _min(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        return self._clipped(node.inputs[0], None, node.inputs[1]) if len(node.inputs) == 2 else None

    def _max(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        if len(node.inputs) == 1:  # what torch's exporter broadcasts indices with
            return self.meaning(node.inputs[0])
        return self._clipped(node.inputs[0], node.inputs[1], None) if len(node.inputs) == 2 else None

    def _clipped(self, x: ir.Value | None, low: ir.Value | None, high: ir.Value | None) -> Meaning | None:
        bounds = [
            usual if given is None else self.facts.number(given)
            for given, usual in ((low, -INFINITY), (high, INFINITY))
        ]
        if bounds[0] is None or bounds[1] is None:
            return None
        clip = Formula(kind="clip", bounds=(bounds[0], bounds[1]))
        return self._step(self.meaning(x), ("linear", "bias", "half"), clip)

    def _step(self, x: Meaning | None, after: tuple[str, ...], step: Formula) -> Meaning | None:
        """An elementwise step of what experts compute, if it comes after one of these."""
        if x is None or x.kind != "body" or x.data.kind not in after:
            return None
        return Meaning("body", x.axes, replace(step, operands=(x.data,)), x.expert)

    def _swiglu(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        alpha = node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0
        gate, other = self._activated(node, "swish", alpha), self.meaning(node.inputs[1])
        return None if gate is None or other is None else self._gated(gate, other)

    def _gated(self, gate: Meaning, other: Meaning) -> Meaning | None:
        if gate.axes != other.axes or gate.expert != other.expert:
            return None
        return Meaning("body", gate.axes, Formula(kind="product", operands=(gate.data, other.data)), gate.expert)

    def part(self, source: Meaning, axis: int, start: int, end: int, step: int = 1) -> Meaning | None:
        """A half of the features: the first or the last ones, or every other."""
        atom = source.axes[axis][0] if len(source.axes[axis]) == 1 else None
        if atom is None or atom.label != "F" or source.kind != "body" or not isinstance(atom.size, int):
            return None
        size = atom.size // 2
        starts = (0, size) if step == 1 else (0, 1)
        if atom.size % 2 or start not in starts or len(range(start, end, step)) != size:
            return None
        axes = (*source.axes[:axis], (Atom("F", size),), *source.axes[axis + 1 :])
        half = Formula(kind="half", operands=(source.data,), half=starts.index(start), step=step)
        return Meaning("body", axes, half, source.expert)

    # Weighing and adding up.

    def _mul(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        left, right = (self.meaning(given) for given in node.inputs)
        if left is None or right is None:
            return None
        kinds = {left.kind, right.kind}
        if kinds == {"body"}:
            return self._squared(left) if left is right else self._gated(left, right)
        if "mask" in kinds:
            return self.masked_shares(left, right)
        body, gate = (left, right) if left.kind in ("body", "stack") else (right, left)
        return self._weighed(body, gate)

    def _weighed(self, body: Meaning, gate: Meaning) -> Meaning | None:
        """What an expert gives, or what it is given, times its share of each token."""
        if body.kind not in ("body", "stack") or gate.kind not in ("gates", "shares"):
            return None
        formulas = [body.data] if body.kind == "body" else body.data
        is_scaled = any(step.kind == "scaled" for formula in formulas for step in formula.steps())
        if is_scaled or "F" in labels(gate.axes):  # weighed a second time, the node would leave one of them out
            return None
        axes = broadcast(body.axes, gate.axes)
        if axes is None or (body.expert is not None and body.expert != gate.expert):
            return None
        if body.kind == "body" and body.data.kind == "tokens":
            scaled = Formula(kind="scaled", operands=(body.data,), shares=gate.data)
            return Meaning("body", axes, scaled, gate.expert)
        kind = "E" if gate.kind == "gates" else "K"
        if body.kind == "stack":
            terms = {e: (formula, gate.data) for e, formula in enumerate(body.data)}
            return Meaning("weighted", axes, terms) if gate.expert is None and kind == "E" else None
        if gate.expert is None:
            return Meaning("weighted", axes, {-1: (body.data, gate.data)}) if kind in labels(body.axes) else None
        return Meaning("weighted", axes, {gate.expert: (body.data, gate.data)}, gate.expert)

    def _weighted(self, x: Meaning) -> Meaning | None:
        """The same; of experts whose input was scaled, the result counts as weighed, as nothing comes out of zero."""
        if x.kind != "body":
            return x
        steps = list(x.data.steps())
        scaled = [step for step in steps if step.kind == "scaled"]
        if not scaled or len({step.shares for step in scaled}) > 1:
            return x
        named = {step.name for step in steps}
        is_chosen = "K" in labels(x.axes) or _has_rows(x)
        if not is_chosen and ({"bias", "clip", "shift"} & {step.kind for step in steps} or "sigmoid" in named):
            return x
        key = -1 if x.expert is None else x.expert
        return Meaning("weighted", x.axes, {key: (x.data, scaled[0].shares)}, x.expert)

    def stack_of(self, parts: list[Meaning], axis: int) -> Meaning | None:
        """What all experts give, side by side."""
        if len(parts) != self.experts or any(p.kind != "body" or p.axes != parts[0].axes for p in parts):
            return None
        if parts[0].axes[axis] or any(part.expert is not None for part in parts):
            return None
        axes = (*parts[0].axes[:axis], (Atom("E", self.experts),), *parts[0].axes[axis + 1 :])
        return Meaning("stack", axes, [part.data for part in parts])

    def _reducesum(self, node: ir.Node, value: ir.Value) -> Meaning | None:
        source = self.meaning(node.inputs[0])
        weighted = None if source is None else self._weighted(source)
        return None if weighted is None else self.summed(node, weighted)

    def sum_of_experts(self, source: Meaning, summed: list[str], axes: Axes) -> Meaning | None:
        """The sum over all experts, or over the choices of a token, is complete."""
        return Meaning("sum", axes, source.data) if summed in (["E"], ["K"]) and source.expert is None else None


def _turned(axes: Axes) -> Axes:
    return (*axes[:-2], *axes[-2:][::-1])


def _has_rows(meaning: Meaning) -> bool:
    return "R" in labels(meaning.axes)
