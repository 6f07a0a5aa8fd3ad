"""Slices of one position each come from one call: the same values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onward.graph.training_graph import make_training_graph
from onward.lowering.building.specialization import specialize
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.lowering.rewriting.unbound_slices import with_unbound_slices
from tests.graph.fusion.pairs import parse
from tests.lowering.rewriting.test_direct_calls import called, results

SHAPE = (2, 4, 3)


def pair(body: str) -> tuple[OnnxModule, Program, Program]:
    positions = {f"i{k % 9}": np.asarray(k, np.int64) for k in range(-1, 4)}
    stored = {"w": np.float32([0.5, -1.0, 2.0]), **positions, "some": np.asarray([0, 2], np.int64)}
    net = OnnxModule(make_training_graph(parse("float[2,4,3] x", "float[a,b] z", body, stored, 18)))
    tensors = net.tensors_by_name()
    constants = frozenset(tensors.keys() - net.weights.keys())
    before = specialize(net.program, torch.device("cpu"), (torch.zeros(SHAPE),), tensors, constants)
    return net, before, with_unbound_slices(before)


def recurrence(*positions: int, axis: int = 1, of: str = "y") -> str:
    """A sum that is squashed after each slice, so that the gradients of slices come one after the other."""
    lines, last = ["y = Mul(x, w)"], "h0"
    lines.append(f"h0 = Gather<axis={axis}>({of}, i{positions[0] % 9})")
    for number, position in enumerate(positions[1:], 1):
        lines.append(f"s{number} = Gather<axis={axis}>({of}, i{position % 9})")
        lines.append(f"t{number} = Add({last}, s{number})")
        last = f"h{number}"
        lines.append(f"{last} = Tanh(t{number})")
    return "\n".join([*lines, f"z = Mul({last}, {last})"])


@pytest.mark.parametrize(
    ("body", "picked"),
    [
        pytest.param(recurrence(0, 1, 2, 3), 4, id="all of them"),
        pytest.param(recurrence(3, 1), 2, id="half of them"),
        pytest.param(recurrence(0, -1, 3, 0), 4, id="from the end, and twice"),
        pytest.param(recurrence(0, 1, 2, axis=-1), 3, id="the last axis"),
        pytest.param(recurrence(0, 1, 2, 3, of="x"), 4, id="of an input"),
    ],
)
def test_slices_come_from_one_call(body: str, picked: int) -> None:
    net, before, program = pair(body)
    assert called(before).count("gather") == picked
    assert [called(program).count(name) for name in ("gather", "unbind", "pick")] == [0, 1, picked]
    for one, other in zip(results(net, program, SHAPE), results(net, before, SHAPE), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = Mul(x, w)\ns = Gather<axis=1>(y, i3)\nz = Mul(s, s)", id="one"),
        pytest.param(recurrence(0, 0, 0), id="one position, several times"),
        pytest.param(
            "y = Mul(x, w)\ns = Gather<axis=1>(y, some)\nz = ReduceSum<keepdims=0>(s, i1)", id="a list of them"
        ),
    ],
)
def test_what_stays(body: str) -> None:
    _, before, program = pair(body)
    assert program is before
