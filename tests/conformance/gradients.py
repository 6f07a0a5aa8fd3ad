"""Gradients of the standard's own cases by finite differences: every case of one node, made double.

The backend tests of onnx say what an operator computes, with nearly every attribute it has; here the same models give
the gradients' checks. `python -m benchmarks.coverage --gradients` counts them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.utils._pytree import tree_flatten, tree_unflatten

import onward
from onward.lowering.registry import find_lowering
from tests.conformance.cases import load_cases
from tests.conformance.checking import to_torch_value
from tests.conformance.exceptions import reason_for
from tests.conformance.gradient_supplements import MICROSOFT, SUPPLEMENTS
from tests.conformance.without_gradient import NOT_DOUBLE, NUMBERS, WITHOUT_GRADIENT
from tests.one_node import make_model

LARGEST_EXHAUSTIVE_ELEMENTS = 48
"""Up to so many input elements every entry of the Jacobian is compared, above it a random projection of it."""

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_TYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "output_datatype", "softmax_precision", "accumulation_mode")
"""Attributes that name an element type."""

_DEFINED_ABOVE = (("", "Acosh"),)
"""Operators whose examples stand on the lower end of what they are defined for."""

Combination = tuple[str, str, int, tuple[tuple[str, str], ...]]
"""Domain, operator, version, attributes as text: what the count counts."""


@dataclass(frozen=True)
class Check:
    """A case of a single node whose inputs and outputs are float64."""

    name: str
    operator: tuple[str, str]
    combination: Combination
    model: onnx.ModelProto
    inputs: tuple[Any, ...]
    older: bool = False

    @property
    def lowering(self) -> tuple[str, str, int]:
        """Domain, operator and first version of the lowering that is checked."""
        opset = next(o.version for o in self.model.opset_import if o.domain == self.operator[0])
        found = find_lowering(*self.operator, opset)
        return (*self.operator, 0 if found is None else found.since)


def combination_of(model: onnx.ModelProto, operator: tuple[str, str]) -> Combination:
    """What a model checks: the version is that of the schema in force; attributes that are left out are left out."""
    node = next(node for node in model.graph.node if (node.domain, node.op_type) == operator)
    opset = next(o.version for o in model.opset_import if o.domain == node.domain)
    schema = schema_at(operator, opset)
    attributes = sorted((a.name, str(helper.printable_attribute(a))) for a in node.attribute)
    return (*operator, 1 if schema is None else schema.since_version, tuple(attributes))


def schema_at(operator: tuple[str, str], opset: int) -> onnx.defs.OpSchema | None:
    """The standard's schema of an operator at an opset."""
    try:
        return onnx.defs.get_schema(operator[1], opset, operator[0])
    except onnx.defs.SchemaError:
        return None


def load_checks(match: str = "") -> Iterator[Check]:
    """Cases of one node with a float input, in float64, at every version of the operator that they fit; supplements."""
    for case in load_cases("node", match):
        if len(case.model.graph.node) != 1 or reason_for(case.name) is not None:
            continue
        model = in_double(case.model)
        node = model.graph.node[0]
        operator = (node.domain, node.op_type)
        if operator in WITHOUT_GRADIENT or any(fnmatchcase(case.name, pattern) for pattern in NOT_DOUBLE):
            continue
        inputs = tuple(
            _in_double(value, None if (*operator, index) in NUMBERS else 1 if operator in _DEFINED_ABOVE else -1)
            for index, value in enumerate(case.data_sets[0][0])
        )
        if any(map(_is_double, tree_flatten(inputs)[0])):
            newest = Check(case.name, operator, combination_of(model, operator), model, inputs)
            yield newest
            yield from at_older_versions(newest)
    yield from (one for one in supplements() if match in one.name)


_MOVED = {("Pad", "constant_value"): "value", ("TopK", "K"): "k"}
"""(operator, input) -> the attribute of older versions, where it has another name."""

_SAME_SINCE = {"Add": 7, "Div": 7, "Loop": 16, "Mul": 7, "Pow": 7, "PRelu": 7, "Scan": 9, "Sub": 7}
"""Operator -> before this version the inputs of today's cases mean something else; supplements check those versions."""


def at_older_versions(newest: Check) -> Iterator[Check]:
    """The same case at every older version that can say it: inputs that were attributes become attributes."""
    (node,) = newest.model.graph.node
    versions = [
        schema
        for schema in _history().get(newest.operator, ())
        if _SAME_SINCE.get(node.op_type, 1) <= schema.since_version < newest.combination[2]
    ]
    names = [formal.name for formal in _schema(newest).inputs]
    for schema in sorted(versions, key=lambda one: -one.since_version):
        moved = {i: a for i, name in enumerate(names) if (a := _attribute_for(schema, node.op_type, name))}
        model, inputs = onnx.ModelProto(), list(newest.inputs)
        model.CopyFrom(newest.model)
        old = model.graph.node[0]
        given = {value.name: index for index, value in enumerate(model.graph.input)}
        for index, attribute in moved.items():
            if index < len(old.input) and old.input[index] in given:
                value = torch.as_tensor(inputs[given[old.input[index]]]).tolist()
                as_list = _type_of(schema, attribute).name.endswith("S")
                value = value if as_list or not isinstance(value, list) else value[0]
                if value != []:  # axes given and empty cannot be said there
                    old.attribute.append(helper.make_attribute(attribute, value))
        kept = [name for index, name in enumerate(old.input) if index not in moved]
        dropped = {given[name] for i, name in enumerate(old.input) if i in moved and name in given}
        del old.input[:]
        old.input.extend(kept)
        for index in sorted(dropped, reverse=True):
            del model.graph.input[index]
            del inputs[index]
        if _fits(old, schema):
            next(o for o in model.opset_import if o.domain == old.domain).version = schema.since_version
            name = f"{newest.name}-{schema.since_version}"
            yield Check(name, newest.operator, combination_of(model, newest.operator), model, tuple(inputs), True)


@functools.cache
def _history() -> dict[tuple[str, str], list[onnx.defs.OpSchema]]:
    found: dict[tuple[str, str], list[onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        found.setdefault((schema.domain, schema.name), []).append(schema)
    return found


def _schema(one: Check) -> onnx.defs.OpSchema:
    schema = schema_at(one.operator, one.combination[2])
    assert schema is not None
    return schema


def _attribute_for(schema: onnx.defs.OpSchema, op_type: str, name: str) -> str | None:
    attribute = _MOVED.get((op_type, name), name)
    return attribute if attribute in schema.attributes and name not in {f.name for f in schema.inputs} else None


def _fits(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> bool:
    """Whether a node is one of this version: its attributes, and the numbers of its inputs and outputs."""
    given = {attribute.name: attribute.type for attribute in node.attribute}
    required = {name for name, attribute in schema.attributes.items() if attribute.required}
    return (
        not schema.deprecated
        and required <= given.keys() <= schema.attributes.keys()
        and all(_type_of(schema, name).value == kind for name, kind in given.items())
        and schema.min_input <= len(node.input) <= schema.max_input
        and len(node.output) <= schema.max_output
    )


def _type_of(schema: onnx.defs.OpSchema, attribute: str) -> Any:
    """An enumeration of Python's, which onnx's stubs do not know."""
    return schema.attributes[attribute].type


def supplements() -> Iterator[Check]:
    """Operators of which the standard has no case in floats, or none of a single node; those of com.microsoft."""
    for operator, text, shapes in SUPPLEMENTS:
        yield _supplement(operator, onnx.parser.parse_model(text), _drawn(shapes))
    for op_type, named, attributes in MICROSOFT:
        by_name = dict(zip(named, _drawn(named.values()), strict=True))
        model = make_model(op_type, by_name, attributes, 17, domain=_MICROSOFT)
        given = tuple(value for value in by_name.values() if value is not None)
        yield _supplement((_MICROSOFT, op_type), model, given)


_MICROSOFT = "com.microsoft"


def _drawn(shapes: Iterable[Any]) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.rand(shape, generator=generator, dtype=torch.float64) if isinstance(shape, tuple) else shape
        for shape in shapes
    )


def _supplement(operator: tuple[str, str], model: onnx.ModelProto, inputs: tuple[Any, ...]) -> Check:
    combination = combination_of(model, operator)
    attributes = ", ".join(text for _, text in combination[3])
    return Check(f"{operator[1]}-{combination[2]} ({attributes})", operator, combination, model, inputs)


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float64 instead of every smaller float type."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    del double.graph.value_info[:]
    _widen_graph(double.graph)
    return double


def _widen_graph(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output):
        _widen_type(value.type)
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _widen_graph(attribute.g)
            elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in _FLOATS:
                attribute.i = TensorProto.DOUBLE
        if node.op_type in ("LayerNormalization", "RMSNormalization") and not _has(node, "stash_type"):
            node.attribute.append(helper.make_attribute("stash_type", TensorProto.DOUBLE))


def _has(node: onnx.NodeProto, name: str) -> bool:
    return any(attribute.name == name for attribute in node.attribute)


def _widen_type(kind: onnx.TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which == "tensor_type" and kind.tensor_type.elem_type in _FLOATS:
        kind.tensor_type.elem_type = TensorProto.DOUBLE
    elif which in ("sequence_type", "optional_type"):
        _widen_type(getattr(kind, which).elem_type)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def _in_double(value: Any, sign: int | None) -> Any:
    """A float input in double, away from kinks: examples like to stand on 0, on ties and on whole numbers.

    With `sign` -1 numbers go up to 2 % towards 0, with 1 away from it, with None they stay; where they go, 0 becomes a
    little more and what is not finite 0.3.
    """
    value = to_torch_value(value)
    if isinstance(value, list):
        return [_in_double(item, sign) for item in value]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if sign is None:
        return value.double()
    shift = torch.rand(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide = torch.nan_to_num(value.double(), nan=0.3, posinf=0.3, neginf=0.3)
    return torch.where(wide == 0, 0.01 * (0.1 + shift), wide * (1 + sign * 0.02 * (0.05 + shift)))


def _is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def check(one: Check) -> bool:
    """Compares with finite differences; False where no float output depends on a float input by a gradient."""
    net = onward.to_torch(one.model)
    tensors = net.tensors_by_name()
    numbers = {index for index in range(len(one.inputs)) if (*one.operator, index) in NUMBERS}
    values, structure = tree_flatten([None if i in numbers else value for i, value in enumerate(one.inputs)])
    places = [index for index, value in enumerate(values) if _is_double(value)]

    def compute(*varied: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(values)
        for place, tensor in zip(places, varied, strict=True):
            given[place] = tensor
        arguments = tree_unflatten(given, structure)
        for index in numbers:
            arguments[index] = one.inputs[index]
        results = tree_flatten(net.run(tuple(arguments), tensors))[0]
        return tuple(torch.where(t.isfinite(), t, 0.0) for t in results if _is_double(t) and t.requires_grad)

    leaves = [values[place].clone().requires_grad_() for place in places]
    if not leaves or not compute(*leaves):
        return False
    exhaustive = sum(leaf.numel() for leaf in leaves) <= LARGEST_EXHAUSTIVE_ELEMENTS
    assert torch.autograd.gradcheck(compute, leaves, fast_mode=not exhaustive)
    return True


@dataclass(frozen=True)
class Result:
    """What became of all checks.

    `checked`: combinations whose gradients equal finite differences; `lowerings` those that were checked so;
    `failed`: what is wrong, by the name of the check.
    """

    checked: frozenset[Combination]
    lowerings: frozenset[tuple[str, str, int]]
    failed: dict[str, str]


def check_all(match: str = "") -> Result:
    """Runs every check; at older versions each combination once."""
    checked, without = set[Combination](), set[Combination]()
    lowerings, failed = set[tuple[str, str, int]](), dict[str, str]()
    for one in load_checks(match):
        if one.older and one.combination in checked | without:
            continue
        try:
            differentiable = check(one)
        except Exception as error:
            failed[one.name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        (checked if differentiable else without).add(one.combination)
        if differentiable:
            lowerings.add(one.lowering)
    return Result(frozenset(checked), frozenset(lowerings), failed)
