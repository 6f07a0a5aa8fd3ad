"""From ONNX nodes to a program: which function each node calls, with what, and what stays in Python.

Values that are shapes, axes or sizes become numbers in the code, or nested tuples of them; everything else is a tensor.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from onward.errors import ModelError, NodeError, OperatorError
from onward.graph.reading.garbage_collection import without_collection
from onward.graph.weights.quantization import is_only_dequantized
from onward.lowering.building.bound_value import BoundValue
from onward.lowering.building.missing_lowerings import find_unsupported
from onward.lowering.building.node_outputs import (
    cuts_table,
    host_result_dtype,
    is_float,
    label_of,
    last_named_output,
    note_on_host,
)
from onward.lowering.context import USUAL, ExecutionContext
from onward.lowering.kernels.dtypes import TORCH_DTYPE, tensor_from_ir, torch_dtype
from onward.lowering.kernels.host import LARGEST_HOST_ELEMENTS, freeze, to_host, to_tensor
from onward.lowering.program import Nested, Program, name_placeholders, pick, prune_unused_optional_inputs
from onward.lowering.registry import MEMORY_HINT, Lowering, find_host_lowering, find_lowering

_RESERVED = frozenset({*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "torch", "device", "inf", "nan"})
"""Names that mean something else in the code that fx writes."""


@without_collection
def build_program(
    graph: ir.Graph,
    opsets: Mapping[str, int],
    constants: Mapping[str, torch.Tensor] | None = None,
    outputs: Sequence[str] | None = None,
    context: ExecutionContext = USUAL,
) -> Program:
    """Lowers a graph whose functions are inlined and whose `Constant` nodes are initializers.

    Args:
        graph: the graph; nodes in topological order.
        opsets: domain -> version.
        constants: values of initializers that may be folded into shape arithmetic; by default every small
            integer initializer and every float scalar. Trained weights must not be among them.
        outputs: names of the values to compute; by default the graph's outputs.
        context: the settings that operators compute with.

    Raises:
        OperatorError: some operators have no lowering; all are named.
        ModelError: a node reads a value that nothing computes, or has an attribute its operator does not know.
    """
    unsupported = find_unsupported(graph, opsets)
    if unsupported:
        raise OperatorError(
            f"{len(unsupported)} node(s) cannot be lowered:\n  "
            + "\n  ".join(unsupported)
            + "\nRewrite these parts of the model, or export it at another opset."
        )
    builder = _Builder(graph=graph, opsets=opsets, constants=constants or {}, context=context)
    return builder.build(outputs)


@dataclass(kw_only=True)
class _Builder:
    """Turns one graph into one fx graph; a nested graph gets its own builder with this one as parent."""

    graph: ir.Graph
    opsets: Mapping[str, int]
    constants: Mapping[str, torch.Tensor]
    context: ExecutionContext
    parent: _Builder | None = None
    fx_graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    bound: dict[ir.Value, BoundValue] = field(default_factory=dict)
    tensors: dict[str, fx.Node] = field(default_factory=dict)
    attribute_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    captured: list[BoundValue] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    asked: frozenset[ir.Value] = frozenset()

    def build(self, outputs: Sequence[str] | None) -> Program:
        """The entire program of a main graph."""
        self._open_placeholders()
        values = list(self.graph.outputs) if outputs is None else self._values_named(outputs)
        self.asked = frozenset(values)
        self._lower_nodes()
        self.fx_graph.output(tuple(self.as_tensor(self.resolve(value)) for value in values))
        self._move_placeholders_up()
        prune_unused_optional_inputs(self.fx_graph)
        self.fx_graph.eliminate_dead_code()
        unused = [name for name, node in self.tensors.items() if not node.users]
        for name in unused:
            self.fx_graph.erase_node(self.tensors.pop(name))
        name_placeholders(self.fx_graph)
        code = fx.GraphModule(self.root, self.fx_graph)
        names = tuple(str(value.name) for value in values)
        return Program(
            code=code,
            inputs=tuple(str(v.name) for v in self.graph.inputs if v.name not in self.graph.initializers),
            tensors=tuple(self.tensors),
            outputs=names,
            attribute_tensors=self.attribute_tensors,
        )

    def _open_placeholders(self) -> None:
        self.training = self.fx_graph.placeholder("training")
        self.device = self.fx_graph.placeholder("device")
        self.names.add("training")
        for value in self.graph.inputs:
            if value.name not in self.graph.initializers:
                node = self.fx_graph.placeholder(self._identifier(str(value.name)))
                self.bound[value] = BoundValue(tensor=node, dtype=TORCH_DTYPE.get(value.dtype) if value.dtype else None)

    def _move_placeholders_up(self) -> None:
        """fx wants every placeholder before the first call."""
        first = next((n for n in self.fx_graph.nodes if n.op != "placeholder"), None)
        for node in self.tensors.values():
            if first is not None:
                first.prepend(node)

    def _values_named(self, names: Sequence[str]) -> list[ir.Value]:
        made = (value for node in self.graph for value in node.outputs)
        found = {value.name: value for value in (*self.graph.inputs, *self.graph.initializers.values(), *made)}
        for name in names:
            if name not in found:
                raise ModelError(f"the graph has no value named {name!r}.")
        return [found[name] for name in names]

    def _identifier(self, name: str) -> str:
        """A Python identifier for an ONNX name, not given out before."""
        stem = re.sub(r"\W", "_", name, flags=re.ASCII) or "value"
        stem = f"v_{stem}" if stem[0].isdigit() or stem in _RESERVED or stem.startswith("__") else stem
        candidate, count = stem, 1
        while candidate in self.names:
            count += 1
            candidate = f"{stem}_{count}"
        self.names.add(candidate)
        return candidate

    def resolve(self, value: ir.Value) -> BoundValue:
        """What a value is bound to; an initializer becomes a placeholder at its first use."""
        if value in self.bound:
            return self.bound[value]
        if value.name in self.graph.initializers and self.graph.initializers[str(value.name)] is value:
            found = self._bind_initializer(value)
        elif self.parent is not None:
            found = self._capture(self.parent.resolve(value), str(value.name))
        else:
            raise ModelError(f"nothing computes the value {value.name!r} that the graph reads.")
        self.bound[value] = found
        return found

    def _bind_initializer(self, value: ir.Value) -> BoundValue:
        name = str(value.name)
        if self.parent is not None:
            raise ModelError(f"the nested graph {self.graph.name!r} holds the initializer {name!r}; lift it first.")
        found = BoundValue(owned=True, dtype=torch_dtype(value.dtype, f"initializer {name!r}") if value.dtype else None)
        constant = self.constants.get(name)
        if constant is not None and constant.numel() <= LARGEST_HOST_ELEMENTS:
            found.host, found.has_host = freeze(constant.tolist()), True
        node = self.fx_graph.placeholder(self._identifier(name))
        self.tensors[name] = node
        found.tensor = node
        return found

    def _capture(self, outer: BoundValue, name: str) -> BoundValue:
        """A value of the enclosing graph becomes a further argument of this one."""
        if outer.known:
            return outer if outer.tensor is None else self._capture_tensor(outer, name, host=outer.host)
        if outer.has_host and outer.tensor is None:
            node = self.fx_graph.placeholder(self._identifier(name))
            self.captured.append(outer)
            return BoundValue(host=node, has_host=True, dtype=outer.dtype)
        return self._capture_tensor(outer, name)

    def _capture_tensor(self, outer: BoundValue, name: str, host: Any = None) -> BoundValue:
        node = self.fx_graph.placeholder(self._identifier(name))
        self.captured.append(outer)
        return BoundValue(tensor=node, host=host, has_host=host is not None, dtype=outer.dtype, owned=outer.owned)

    def as_tensor(self, bound: BoundValue) -> fx.Node:
        """The tensor form of a value, made from its host form where need be."""
        if bound.tensor is None:
            bound.tensor = self.fx_graph.call_function(to_tensor, (bound.host, bound.dtype, self.device))
        return bound.tensor

    def as_host(self, bound: BoundValue) -> Any:
        """The host form of a value; reading it from a tensor waits for the device."""
        if not bound.has_host:
            bound.host, bound.has_host = note_on_host(self.fx_graph.call_function(to_host, (bound.tensor,))), True
        return bound.host

    def _lower_nodes(self) -> None:
        for node in self.graph:
            self._lower(node)

    def _lower(self, node: ir.Node) -> None:
        version = self.opsets[node.domain]
        inputs = [None if value is None else self.resolve(value) for value in node.inputs]
        on_host = find_host_lowering(node.domain, node.op_type, version)
        if on_host is not None and self._belongs_on_host(node, on_host, inputs):
            self._lower_on_host(node, on_host, [bound for bound in inputs if bound is not None])
            return
        lowering = find_lowering(node.domain, node.op_type, version)
        assert lowering is not None
        arguments = self._positional(node, lowering, inputs)
        keywords = self._keywords(node, lowering, inputs)
        call = self.fx_graph.call_function(lowering.function, arguments, keywords)
        call.meta["onnx"] = label_of(node)
        call.meta["spare"] = [place for place, one in enumerate(lowering.inputs) if one.name in lowering.spare]
        self._bind_outputs(node, lowering, call)

    def _belongs_on_host(self, node: ir.Node, lowering: Lowering, inputs: Sequence[BoundValue | None]) -> bool:
        """Host values in, host value out; but arithmetic of float constants alone stays with the tensors."""
        given = [bound for bound in inputs if bound is not None]
        if not given or len(given) != len(inputs) or not all(bound.has_host for bound in given):
            return False
        # A tensor that was read for its numbers keeps the element type to itself where the file does not say it.
        if any(bound.dtype is None and bound.tensor is not None for bound in given):
            return False
        derived = any(bound.tensor is None or not bound.owned for bound in given)
        is_cast = node.op_type in ("Cast", "CastLike")  # a float constant as a number of Range
        types = {host_result_dtype(node, lowering, given)} if is_cast else {bound.dtype for bound in given}
        integer = not any(dtype is None or dtype.is_floating_point for dtype in types)
        if lowering.growth is not None and not self._stays_small(node, lowering, given):
            return False
        return (derived or integer) and not cuts_table(node, given)

    def _is_shape_of_host(self, value: ir.Value) -> bool:
        node = value.producer()
        of = node.inputs[0] if node is not None and node.op_type == "Shape" else None
        return of is not None and self.resolve(of).has_host

    def _stays_small(self, node: ir.Node, lowering: Lowering, inputs: Sequence[BoundValue]) -> bool:
        """Whether the result of an operator that makes large tensors out of small ones is shape arithmetic."""
        unknown = [value for value, bound in zip(node.inputs, inputs, strict=True) if not bound.known]
        # The shape of a host value: what it asks for is as small as that.
        if not all(value is not None and self._is_shape_of_host(value) for value in unknown):
            return False
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.TENSOR and is_float(attribute.as_tensor().dtype):
                return False
        if unknown:
            return True
        assert lowering.growth is not None
        keywords = self._keywords(node, lowering, inputs)
        return lowering.growth(*(bound.host for bound in inputs), **keywords) <= LARGEST_HOST_ELEMENTS

    def _lower_on_host(self, node: ir.Node, lowering: Lowering, inputs: Sequence[BoundValue]) -> None:
        arguments = tuple(bound.host for bound in inputs)
        keywords = self._keywords(node, lowering, inputs)
        dtype = host_result_dtype(node, lowering, inputs)
        result: Any
        known = all(bound.known for bound in inputs) and not any(isinstance(v, fx.Node) for v in keywords.values())
        if known:
            try:
                result = lowering.function(*arguments, **keywords)
            except Exception as error:
                raise NodeError(f"{label_of(node)} failed on the constants {arguments}: {error}") from error
        else:
            result = note_on_host(self.fx_graph.call_function(lowering.function, arguments, keywords))
            result.meta["onnx"] = label_of(node)
        if len(node.outputs) == 1:
            self.bound[node.outputs[0]] = BoundValue(host=result, has_host=True, dtype=dtype)
            return
        for index, output in enumerate(node.outputs):
            part = result[index] if known else note_on_host(self.fx_graph.call_function(pick, (result, index)))
            self.bound[output] = BoundValue(host=part, has_host=True, dtype=dtype)

    def _positional(self, node: ir.Node, lowering: Lowering, inputs: Sequence[BoundValue | None]) -> tuple[Any, ...]:
        names = [p.name for p in lowering.inputs]
        variadic = bool(lowering.inputs) and lowering.inputs[-1].kind is inspect.Parameter.VAR_POSITIONAL
        given = list(inputs)
        while given and given[-1] is None and not variadic:
            given.pop()
        if len(given) > len(names) and not variadic:
            raise ModelError(f"{label_of(node)} has {len(given)} inputs; the operator takes at most {len(names)}.")
        required = [p for p in lowering.inputs if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
        if len(given) < len(required):
            missing = required[len(given)].name
            raise ModelError(f"{label_of(node)} lacks its input {missing!r} (input {len(given)}).")
        arguments: list[Any] = []
        for index, bound in enumerate(given):
            name = names[min(index, len(names) - 1)]
            if bound is None:
                arguments.append(None)
            else:
                as_host = name in lowering.host or (name in lowering.either and bound.is_cheap_on_host)
                arguments.append(self.as_host(bound) if as_host else self.as_tensor(bound))
        return tuple(arguments)

    def _keywords(self, node: ir.Node, lowering: Lowering, inputs: Sequence[BoundValue | None]) -> dict[str, Any]:
        known = lowering.attributes
        keywords: dict[str, Any] = {}
        for name, attribute in node.attributes.items():
            if name == MEMORY_HINT:
                continue
            if name not in known:
                listed = ", ".join(sorted(known)) or "none"
                raise ModelError(f"{label_of(node)} has the attribute {name!r}; the operator knows: {listed}.")
            if lowering.produces == "host" and attribute.type is ir.AttributeType.TENSOR:
                stored = tensor_from_ir(attribute.as_tensor(), f"{label_of(node)}: attribute {name!r}")
                keywords[known[name].name] = freeze(stored.tolist())
            else:
                keywords[known[name].name] = self._attribute(node, attribute)
        for name, parameter in known.items():
            if parameter.default is parameter.empty and parameter.name not in keywords:
                raise ModelError(f"{label_of(node)} lacks its attribute {name!r}.")
        reserved = lowering.reserved
        filled: dict[str, Callable[[], Any]] = {
            "training": lambda: self.training,
            "device": lambda: self.device,
            "output_count": lambda: last_named_output(node),
            "is_read": lambda: tuple(bool(v.uses()) or v.is_graph_output() or v in self.asked for v in node.outputs),
            "owned": lambda: tuple(bound is not None and bound.owned for bound in inputs),
            "dtypes": lambda: tuple(None if bound is None else bound.dtype for bound in inputs),
            "element_types": lambda: tuple(None if v is None or v.dtype is None else int(v.dtype) for v in node.inputs),
            "only_dequantized": lambda: is_only_dequantized(node.outputs[0]),
        }
        keywords.update((name, value) for name, value in vars(self.context).items() if name in reserved)
        keywords.update((name, value()) for name, value in filled.items() if name in reserved)
        return keywords

    def _attribute(self, node: ir.Node, attribute: ir.Attr) -> Any:
        kind = attribute.type
        if kind is ir.AttributeType.GRAPH:
            return self._nested(attribute.as_graph())
        if kind is ir.AttributeType.TENSOR:
            tensor = tensor_from_ir(attribute.as_tensor(), f"attribute {attribute.name!r}")
            return self._attribute_tensor(tensor, f"{label_of(node).name}/{attribute.name}").tensor
        if kind in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
            return tuple(attribute.value)
        if kind in (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING):
            return attribute.value
        if kind is ir.AttributeType.TYPE_PROTO:
            return None  # torch values carry their own types
        raise ModelError(
            f"{label_of(node)}: attribute {attribute.name!r} is of kind {kind.name}, which cannot be lowered."
        )

    def _attribute_tensor(self, tensor: torch.Tensor, name: str) -> BoundValue:
        """A tensor-valued attribute becomes one more tensor of the model, read through a placeholder."""
        if self.parent is not None:
            return self._capture_tensor(self.parent._attribute_tensor(tensor, name), name)
        unique, count = name, 1
        while unique in self.tensors or unique in self.graph.initializers:
            count += 1
            unique = f"{name}.{count}"
        self.attribute_tensors[unique] = tensor
        self.tensors[unique] = self.fx_graph.placeholder(self._identifier(unique))
        return BoundValue(tensor=self.tensors[unique], dtype=tensor.dtype, owned=True)

    def _nested(self, graph: ir.Graph) -> fx.Node:
        """A nested graph (a branch, a loop's body) as a callable of its own inputs."""
        inner = _Builder(graph=graph, opsets=self.opsets, constants=self.constants, context=self.context, parent=self)
        inner._open_placeholders()
        inner._lower_nodes()
        outputs = tuple(inner.as_tensor(inner.resolve(value)) for value in graph.outputs)
        inner.fx_graph.output(outputs)
        first = next((n for n in inner.fx_graph.nodes if n.op != "placeholder"), None)
        for node in [n for n in inner.fx_graph.nodes if n.op == "placeholder"]:
            if first is not None:
                first.prepend(node)
        inner.fx_graph.eliminate_dead_code()
        name_placeholders(inner.fx_graph)
        attribute = self._identifier(f"graph_{graph.name or 'nested'}")
        self.root.add_module(attribute, fx.GraphModule(inner.root, inner.fx_graph))
        captured = tuple(
            bound.host if bound.tensor is None and bound.has_host else self.as_tensor(bound) for bound in inner.captured
        )
        code = self.fx_graph.get_attr(attribute)
        return self.fx_graph.call_function(Nested, (code, self.training, self.device, captured, len(graph.inputs)))

    def _bind_outputs(self, node: ir.Node, lowering: Lowering, call: fx.Node) -> None:
        if lowering.produces == "host":
            on_host = TORCH_DTYPE[ir.DataType[lowering.result_dtype.upper()]]
            self.bound[node.outputs[0]] = BoundValue(host=note_on_host(call), has_host=True, dtype=on_host)
            return
        count = last_named_output(node)
        multiple = count > 1 or "output_count" in lowering.reserved
        for index, output in enumerate(node.outputs[:count]):
            if output is None or not output.name:
                continue
            result = self.fx_graph.call_function(pick, (call, index)) if multiple else call
            dtype = TORCH_DTYPE.get(output.dtype) if output.dtype else None
            self.bound[output] = BoundValue(tensor=result, dtype=dtype)
