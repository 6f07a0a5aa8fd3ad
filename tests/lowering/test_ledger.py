"""Every operator of the standard has a fate, and every lowering's Python signature says what the schema says."""

from __future__ import annotations

import inspect
import keyword
from functools import cache
from typing import Any

import onnx
import pytest
from onnx.defs import OpSchema
from onnx.helper import get_attribute_value

import onward
from onward.errors import OperatorError
from onward.lowering.ledger import REFUSED, fate_of, why_refused
from onward.lowering.registry import Lowering, all_lowerings
from tests.one_node import make_model

STANDARD = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")
VERSIONS = {"": range(7, 29), "ai.onnx.ml": range(1, 6)}
OLDEST, NEWEST = 7, 28

REFUSED_ATTRIBUTES = {"Constant": {"value_string", "value_strings", "sparse_value"}}
"""Attributes that hold what torch cannot; strings are refused by name, sparse tensors are read as dense ones."""

ADDED_ATTRIBUTES = {"Gradient": {"body"}}
"""Attributes that are none of the standard's: written on the node when it is read (graph/reading/differentiated.py)."""

OF_ONNXRUNTIME = {("LayerNormalization", 1)}
"""Versions that onnxruntime's optimizer writes into the standard's domain, and the standard does not know."""

MEMORY_HINT = "consumed_inputs"
"""An attribute of opsets 1 to 5 that says which inputs may be overwritten; it changes no result."""


@cache
def schemas() -> dict[tuple[str, str], list[OpSchema]]:
    """All schemas of the standard's domains by operator, oldest first."""
    found: dict[tuple[str, str], list[OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain in STANDARD:
            found.setdefault((schema.domain, schema.name), []).append(schema)
    return {key: sorted(versions, key=lambda s: s.since_version) for key, versions in found.items()}


def schema_at(domain: str, op_type: str, version: int) -> OpSchema | None:
    """The schema in force at an opset, or None where there is none (any more)."""
    fitting = [s for s in schemas()[(domain, op_type)] if s.since_version <= version]
    return fitting[-1] if fitting and not fitting[-1].deprecated else None


@pytest.mark.parametrize("domain", STANDARD)
def test_every_operator_at_every_opset_is_lowered_expanded_or_refused(domain: str) -> None:
    missing = []
    for name in sorted(name for d, name in schemas() if d == domain):
        for version in VERSIONS.get(domain, (1,)):
            if schema_at(domain, name, version) is not None and fate_of(domain, name, version) == "missing":
                missing.append(f"{name}-{version}")
    assert not missing, f"no lowering, no body, no reason: {', '.join(missing)}"


def test_nothing_refused_has_a_lowering() -> None:
    lowered = {(one.domain, one.op_type) for one in all_lowerings()}
    assert not lowered & set(REFUSED)


def test_refusal_names_the_node_and_the_reason() -> None:
    model = make_model("StringConcat", {"a": ["x"], "b": ["y"]}, opset=20)
    with pytest.raises(OperatorError, match=r"node 'node' \(StringConcat\).*opset 20: it computes with strings"):
        onward.to_torch(model)


def test_other_domains_have_a_reason() -> None:
    assert "blocked layout" in str(why_refused("com.microsoft.nchwc", "Conv"))
    assert why_refused("", "NoSuchOperator") is None


def covered(lowering: Lowering) -> tuple[list[OpSchema], list[OpSchema]]:
    """The schemas a lowering stands for, from its own version up to the next lowering's: all, and those still in use.

    Of versions that no opset from 7 on selects, only the newest counts as in use.
    """
    later = [
        other.since
        for other in all_lowerings()
        if (other.domain, other.op_type) == (lowering.domain, lowering.op_type) and other.since > lowering.since
    ]
    end = min(later, default=NEWEST + 1)
    versions = schemas()[(lowering.domain, lowering.op_type)]
    first = [s for s in versions if s.since_version <= lowering.since][-1:]
    all_covered = first + [s for s in versions if lowering.since < s.since_version < end]
    old = [s for s in versions if s.since_version <= OLDEST][:-1]
    return all_covered, [s for s in all_covered if s not in old] or all_covered[-1:]


def standard_lowerings() -> list[Lowering]:
    standard = [one for one in all_lowerings() if (one.domain, one.op_type) in schemas()]
    return [one for one in standard if (one.op_type, one.since) not in OF_ONNXRUNTIME]


def plain(name: str) -> str:
    return name.rstrip("_") if keyword.iskeyword(name.rstrip("_")) or name.endswith("_") else name


@pytest.mark.parametrize("lowering", standard_lowerings(), ids=lambda one: f"{one.op_type}-{one.since}")
def test_signature_matches_the_schema(lowering: Lowering) -> None:
    """Inputs in the schema's order and under a name it ever had; attributes with the schema's names and defaults."""
    ever, versions = covered(lowering)
    assert versions, "registered for a version that the standard does not know"
    parameters = lowering.inputs
    assert len(parameters) == max(len(s.inputs) for s in versions)
    for index, parameter in enumerate(parameters):
        here = [s.inputs[index] for s in versions if index < len(s.inputs)]
        assert plain(parameter.name) in {plain(formal.name) for formal in here}
        variadic = here[-1].option is OpSchema.FormalParameterOption.Variadic
        assert (parameter.kind is inspect.Parameter.VAR_POSITIONAL) == variadic
        optional = any(f.option is OpSchema.FormalParameterOption.Optional for f in here) or len(here) < len(versions)
        assert variadic or (parameter.default is not parameter.empty) == optional, parameter.name
    known = set().union(*(s.attributes for s in versions)) - REFUSED_ATTRIBUTES.get(lowering.op_type, set())
    beside = {MEMORY_HINT} | ADDED_ATTRIBUTES.get(lowering.op_type, set())
    given = {name: parameter for name, parameter in lowering.attributes.items() if name not in beside}
    assert known - {MEMORY_HINT} <= set(given) <= set().union(*(s.attributes for s in ever))
    for name, parameter in given.items():
        assert_default(parameter, [s.attributes[name] for s in versions if name in s.attributes], name)


def assert_default(parameter: inspect.Parameter, attributes: list[Any], name: str) -> None:
    if attributes and all(attribute.required for attribute in attributes):
        assert parameter.default is parameter.empty, f"{name} is required"
        return
    assert not attributes or parameter.default is not parameter.empty, f"{name} may be left out"
    stated = [get_attribute_value(a.default_value) for a in attributes if a.default_value.type]
    if not stated or (isinstance(stated[-1], list) and parameter.default is None):
        return
    expected = stated[-1].decode() if isinstance(stated[-1], bytes) else stated[-1]
    expected = tuple(expected) if isinstance(expected, list) else expected
    if isinstance(expected, float):
        assert parameter.default == pytest.approx(expected, rel=1e-6), name
    else:
        assert parameter.default == expected, name
