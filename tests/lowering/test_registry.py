"""Which function lowers which operator and version: the newest at or below the one that a model selects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from onward.lowering.kernels.unsigned import unsigned
from onward.lowering.registry import RESERVED, all_lowerings, find_host_lowering, find_lowering, lowers
from onward.lowering.rewriting.exact_nodes import without_autocast


@pytest.mark.parametrize(
    ("op_type", "version", "since"),
    [("Softmax", 12, 1), ("Softmax", 13, 13), ("Softmax", 99, 13), ("BitShift", 11, 11), ("CumProd", 26, 26)],
)
def test_versions(op_type: str, version: int, since: int) -> None:
    found = find_lowering("", op_type, version)
    assert found is not None
    assert found.since == since


def test_what_is_not_there() -> None:
    assert find_lowering("", "BitShift", 10) is None
    assert find_lowering("", "Nonsense", 20) is None
    assert find_lowering("acme", "Softmax", 20) is None
    assert find_host_lowering("", "Conv", 20) is None


def test_parameters_are_inputs_attributes_or_filled_in() -> None:
    found = find_lowering("onward.fused", "MovingScale", 1)
    assert found is not None
    assert [one.name for one in found.inputs] == ["x", "running"]
    assert {"span", "axis"} <= set(found.attributes)
    assert found.reserved == {"training", "replica_group"} <= RESERVED
    constant = find_lowering("", "Constant", 13)
    assert constant is not None
    assert constant.inputs == ()
    assert "device" not in constant.attributes


def test_all_are_sorted_and_no_version_is_there_twice() -> None:
    keys = [(one.domain, one.op_type, one.since) for one in all_lowerings()]
    assert keys == sorted(set(keys))


def test_a_parameter_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"Nonsense: host inputs {'axes'} are not parameters"):
        lowers("Nonsense", host=("axes",))(lambda x: x)
    assert find_lowering("", "Nonsense", 20) is None


def called(function: Callable[..., Any]) -> object:
    """What generated code calls where a graph has this function: torch's own are written by their names."""
    graph = fx.Graph()
    graph.output(graph.call_function(function))
    code = fx.GraphModule({}, graph)
    name = code.code.split("= ")[1].split("(")[0]
    return eval(name, code.forward.__globals__)


def test_generated_code_calls_the_functions_themselves() -> None:
    """Also those that are made of torch's, and so have their names."""
    others = {one.op_type for one in all_lowerings() if called(one.function) is not one.function}
    assert not others
    made = [wrap(torch.add) for wrap in (without_autocast, unsigned("wraps"))]
    assert [called(one) for one in made] == made
