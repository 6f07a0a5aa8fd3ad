"""A program for inputs of known shapes: shape arithmetic becomes numbers, constant tensors are computed once.

Shapes are found by running the program on torch's fake tensors, which have shapes but no memory, so whatever
depends on data stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from onward.graph.reading.garbage_collection import without_collection
from onward.lowering.building.tensor_facts import FACT, TensorFact, fact_of
from onward.lowering.kernels.operands import MARK, number_for
from onward.lowering.program import Nested, Program, name_placeholders
from onward.lowering.simplification import simpler_arguments

LARGEST_FOLDED_BYTES = 64 * 2**20
"""A constant result larger than this is recomputed at each call rather than kept."""

LEAST_SHARED_BYTES = 2**12
"""Smaller constant results are not compared with each other."""

_UNKNOWN = object()


@without_collection
def specialize(
    program: Program,
    device: torch.device,
    inputs: Sequence[Any],
    tensors: Mapping[str, torch.Tensor],
    constants: frozenset[str],
) -> Program:
    """The same program for inputs of these shapes and types.

    Args:
        program: any program; it is left as it is.
        device: where the program runs.
        inputs: example inputs; only their shapes, types and device matter. What is no tensor is unknown.
        tensors: what the program will be called with.
        constants: names among `tensors` that never change: neither weights nor running statistics.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    every = {name: program.tensor(name, tensors) for name in program.tensors}
    placeholders = [node for node in program.code.graph.nodes if node.op == "placeholder"]
    known: dict[fx.Node, Any] = {placeholders[1]: device}
    for node, (name, tensor) in zip(placeholders[2 + len(inputs) :], every.items(), strict=True):
        if name in constants or name in program.attribute_tensors:
            known[node] = tensor
    interpreter = _ShapeInterpreter(program.code, known, mode)
    with mode, torch.no_grad():
        interpreter.run(False, device, *(_faked(value, mode) for value in (*inputs, *every.values())))
    return _Rewriter(program, interpreter.known, interpreter.facts).rewrite()


def fold_constants(
    program: Program, device: torch.device, tensors: Mapping[str, torch.Tensor], constants: frozenset[str]
) -> Program:
    """A program for inputs of any shapes, in which what follows from constants alone is computed once.

    The arguments are those of `specialize`.
    """
    return specialize(program, device, [None] * len(program.inputs), tensors, constants)


def _faked(value: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else _UNKNOWN


class _ShapeInterpreter(fx.Interpreter):
    """Runs on fake tensors, and computes what follows from constants; what cannot be known becomes unknown, and with it
    all that depends on it.

    Attributes:
        known: node -> its value: a constant tensor, or what lives in Python; at first those of placeholders.
        facts: node -> the shape and type of its result.
    """

    def __init__(self, module: fx.GraphModule, known: dict[fx.Node, Any], mode: FakeTensorMode) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.known = known
        self.facts: dict[fx.Node, Any] = {}
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return None
        result = self._run_on_fakes(n)
        if n.op == "call_function" and _is_host(result):
            self.known[n] = result
        elif n.op == "call_function" and self._is_foldable(n) and not _is_large(result):
            value = self._evaluate(n)
            if value is not _UNKNOWN:
                self.known[n] = value
                result = _faked(value, self.mode) if isinstance(value, torch.Tensor) else value
        fact = fact_of(result)
        if fact is not None:
            self.facts[n] = fact
        return result

    def _run_on_fakes(self, n: fx.Node) -> Any:
        if any(self.env[source] is _UNKNOWN for source in n.all_input_nodes):
            return _UNKNOWN
        try:
            return super().run_node(n)
        except Exception:
            return _UNKNOWN

    def _is_foldable(self, node: fx.Node) -> bool:
        """A pure function of constants; what draws random numbers is not."""
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if target is Nested or getattr(target, "__module__", "").endswith((".random", ".control_flow")):
            return False
        return all(source in self.known for source in node.all_input_nodes)

    def _evaluate(self, node: fx.Node) -> Any:
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), lambda source: self.known[source])
        with unset_fake_temporarily():
            try:
                result = node.target(*arguments, **keywords)  # type: ignore[operator]
            except Exception:
                return _UNKNOWN
            if _is_host(result):
                return result
            return _compact(result) if isinstance(result, torch.Tensor) and not _is_large(result) else _UNKNOWN


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() * value.element_size() > LARGEST_FOLDED_BYTES


def _is_host(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_host(item) for item in value)
    return type(value) in (int, float, bool)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, or one that stores what is repeated along an axis once, in memory of its own."""
    repeats = [size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if not any(repeats):
        return tensor.contiguous()
    once = tensor[tuple(slice(0, 1) if repeated else slice(None) for repeated in repeats)]
    return once.clone(memory_format=torch.contiguous_format).expand(tensor.shape)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits and are laid out alike."""
    if one.nbytes < LEAST_SHARED_BYTES or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.stride() != other.stride() or one.device != other.device:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class _Rewriter:
    """Copies a program, with known values instead of the nodes that computed them."""

    def __init__(self, program: Program, known: Mapping[fx.Node, Any], facts: Mapping[fx.Node, Any]) -> None:
        self.program = program
        self.known = known
        self.facts = facts
        self.new = fx.Graph()
        self.map: dict[fx.Node, Any] = {}
        self.simplified: dict[Any, dict[str, Any]] = {}
        self.folded: dict[str, torch.Tensor] = {}
        self.folded_names: dict[fx.Node, str] = {}

    def rewrite(self) -> Program:
        placeholders = [n for n in self.program.code.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            self.map[node] = self._noted(node, self.new.node_copy(node))
        last = self.map[placeholders[-1]]
        for node in self.program.code.graph.nodes:
            if node.op != "placeholder":
                self._copy(node)
        used = self._insert_folded(last)
        self.new.eliminate_dead_code()
        tensors = list(self.program.tensors)
        for name, node in zip(self.program.tensors, placeholders[2 + len(self.program.inputs) :], strict=True):
            if not self.map[node].users:
                self.new.erase_node(self.map[node])
                tensors.remove(name)
        name_placeholders(self.new)
        code = fx.GraphModule(self.program.code, self.new)
        return Program(
            code=code,
            inputs=self.program.inputs,
            tensors=(*tensors, *used),
            outputs=self.program.outputs,
            attribute_tensors={**self.program.attribute_tensors, **{name: self.folded[name] for name in used}},
        )

    def _copy(self, node: fx.Node) -> None:
        value = self.known.get(node)
        if isinstance(value, torch.Tensor):
            self.map[node] = self._find_equal(value) or self._placeholder_of(node, value)
            return
        if value is not None:
            self.map[node] = value
            return
        copy = self.new.node_copy(node, lambda source: self.map[source])
        self.map[node] = self._noted(node, copy)
        self._use_number(node, copy)
        simpler = simpler_arguments(node.target, node.args, node.kwargs, self._lookup, self.simplified)
        if simpler is not None:
            copy.args, copy.kwargs = fx.node.map_arg(simpler, lambda source: self.map[source])

    def _use_number(self, node: fx.Node, copy: fx.Node) -> None:
        """Lets a copy have the number of a known tensor as its operand, where it takes numbers."""
        if not hasattr(node.target, MARK) or len(node.args) != 2:
            return
        for place, (operand, other) in enumerate((node.args, reversed(node.args))):
            fact = self.facts.get(other) if isinstance(other, fx.Node) and other not in self.known else None
            value = self._lookup(operand)
            if isinstance(fact, TensorFact) and isinstance(value, torch.Tensor):
                number = number_for(value, fact.shape, fact.dtype)
                if number is not None:
                    copy.update_arg(place, number)

    def _noted(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """The copy of a node, with what is known of its result."""
        if node in self.facts:
            copy.meta[FACT] = self.facts[node]
        return copy

    def _lookup(self, argument: Any) -> Any:
        return self.known.get(argument) if isinstance(argument, fx.Node) else argument

    def _placeholder_of(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        placeholder = self._noted(node, self.new.placeholder(f"folded_{node.name}"))
        name = self.folded_names[placeholder] = f"folded/{node.name}"
        self.folded[name] = value
        return placeholder

    def _find_equal(self, tensor: torch.Tensor) -> fx.Node | None:
        """What stands for an earlier constant of the same bits: layers that each compute a table share it."""
        return next((node for node, name in self.folded_names.items() if _are_equal(self.folded[name], tensor)), None)

    def _insert_folded(self, last: fx.Node) -> list[str]:
        """Moves the placeholders of folded tensors up to the others; returns the names that are still read."""
        used = []
        for node, name in self.folded_names.items():
            if not node.users:
                self.new.erase_node(node)
                continue
            last.append(node)
            last = node
            used.append(name)
        return used
