"""Frozen weights computed for one matmul at a time: dequantized, cast or transposed from what is stored, and dropped.

The backward pass recomputes them; what stays in memory is the stored tensor alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from onward.graph.adapters.adapted import LORA_A
from onward.lowering.kernels.frozen_weights import with_adapted_weight, with_computed_weight
from onward.lowering.ops import fused
from onward.lowering.ops.convolution import conv, conv_transpose
from onward.lowering.ops.elementwise import add, mul
from onward.lowering.ops.linear import einsum, gemm, matmul
from onward.lowering.program import Nested, Program

PRODUCTS = frozenset({matmul, gemm, einsum, fused.linear, conv, conv_transpose})
"""Functions that multiply by weights; autocast computes all of them in 16 bits."""


def with_frozen_weights(program: Program, weights: Collection[str], changing: Collection[str]) -> Program:
    """A program that computes what follows from frozen weights where it is read, and not before.

    Args:
        program: any; it is left as it is.
        weights: stored tensors that frozen weights are made of.
        changing: tensors that training changes, from which nothing constant follows.
    """
    if not any(name in weights or name.endswith(f".{LORA_A}") for name in program.tensors):
        return program
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(program.code.graph, copies))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    tensors = dict(zip(placeholders[2 + len(program.inputs) :], program.tensors, strict=True))
    constant = {node: name in weights for node, name in tensors.items() if name not in changing}
    constant[placeholders[1]] = False  # the device
    for node in graph.nodes:
        sources = node.all_input_nodes
        is_pure = node.op == "call_function" and node.target is not Nested
        if is_pure and sources and all(source in constant for source in sources):
            constant[node] = any(constant[source] for source in sources)
    computed = {node for node, is_weight in constant.items() if is_weight and node.op == "call_function"}
    root: dict[str, Any] = {
        str(node.target): getattr(program.code, str(node.target)) for node in graph.nodes if node.op == "get_attr"
    }
    for node in [node for node in graph.nodes if node not in constant and node.target in PRODUCTS]:
        if (place := _place_of(node, computed)) is not None:
            _replace(graph, root, node, place, computed, multiply_by_frozen_weight)
    stored, sums = _adapted_sums(graph, constant, tensors)
    for node in [node for node in graph.nodes if node.op == "call_function" and node not in stored]:
        while node.target is not Nested and (place := _place_of(node, sums)) is not None:
            node = _replace(graph, root, node, place, stored, multiply_by_adapted_weight)
    graph.eliminate_dead_code()
    return replace(program, code=fx.GraphModule(root, graph))


def _adapted_sums(
    graph: fx.Graph, constant: Collection[fx.Node], tensors: Mapping[fx.Node, str]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Calls that follow from stored tensors alone, and those among them that add an adapter to a frozen weight."""
    if not any(name.endswith(f".{LORA_A}") for name in tensors.values()):
        return set(), set()
    known, sums = {*constant, *tensors}, set[fx.Node]()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op != "call_function" or node.target is Nested or not sources or not known.issuperset(sources):
            continue
        known.add(node)
        is_sum = node.target is add and node not in constant and any(source in constant for source in sources)
        if is_sum or (node.target is mul and any(source in sums for source in sources)):
            sums.add(node)
    return {node for node in known if node.op == "call_function"}, sums


def _replace(
    graph: fx.Graph,
    root: dict[str, Any],
    node: fx.Node,
    place: int,
    computed: Collection[fx.Node],
    multiply: Callable[..., Any],
) -> fx.Node:
    """Replaces a product by a call that computes one of its operands itself, which is returned."""
    name = f"frozen_weight_{len(root)}"
    operand, function = node.args[place], node.target
    assert isinstance(operand, fx.Node)
    assert callable(function)
    recipe, sources = _recipe(operand, computed)
    root[name] = FrozenWeight(recipe, function, place)
    others = (*node.args[:place], *node.args[place + 1 :])
    with graph.inserting_before(node):
        arguments = (graph.get_attr(name), tuple(sources), *others)
        call = graph.call_function(multiply, arguments, node.kwargs)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)
    return call


def _place_of(node: fx.Node, values: Collection[fx.Node]) -> int | None:
    """The first argument of a call that is one of some values."""
    return next((place for place, one in enumerate(node.args) if isinstance(one, fx.Node) and one in values), None)


def _recipe(result: fx.Node, computed: Collection[fx.Node]) -> tuple[nn.Module, list[fx.Node]]:
    """The code that computes a weight, and the nodes that it is called with."""
    steps, stack = set[fx.Node](), [result]
    while stack:
        step = stack.pop()
        if step not in steps:
            steps.add(step)
            stack.extend(source for source in step.all_input_nodes if source in computed)
    return extracted([node for node in result.graph.nodes if node in steps])


def extracted(steps: Sequence[fx.Node]) -> tuple[nn.Module, list[fx.Node]]:
    """The code of some nodes, in order, which gives the result of the last, and the nodes that it is called with."""
    own = set(steps)
    sources = list(dict.fromkeys(source for step in steps for source in step.all_input_nodes if source not in own))
    graph = fx.Graph()
    copies = {source: graph.placeholder(source.name) for source in sources}
    for step in steps:
        copies[step] = graph.node_copy(step, lambda source: copies[source])
    graph.output(copies[steps[-1]])
    return fx.GraphModule(nn.Module(), graph), sources


class FrozenWeight(nn.Module):
    """A weight that is computed for a product.

    Args:
        recipe: computes it from what is stored.
        product: the function that multiplies by it.
        place: which argument of the function it is.
    """

    def __init__(self, recipe: nn.Module, product: Callable[..., Any], place: int) -> None:
        super().__init__()
        self.recipe, self.product, self.place = recipe, product, place


def multiply_by_frozen_weight(weight: FrozenWeight, sources: Sequence[Any], *arguments: Any, **keywords: Any) -> Any:
    """A product whose weight is computed for it alone."""

    def multiply(computed: Tensor) -> Any:
        return weight.product(*arguments[: weight.place], computed, *arguments[weight.place :], **keywords)

    return with_computed_weight(lambda: weight.recipe.forward(*sources), sources, multiply)


def multiply_by_adapted_weight(weight: FrozenWeight, sources: Sequence[Any], *arguments: Any, **keywords: Any) -> Any:
    """An operator that reads the sum of a frozen weight and its adapter, computed for it alone."""

    def multiply(computed: Tensor) -> Any:
        return weight.product(*arguments[: weight.place], computed, *arguments[weight.place :], **keywords)

    return with_adapted_weight(lambda known: weight.recipe.forward(*known), sources, multiply)
