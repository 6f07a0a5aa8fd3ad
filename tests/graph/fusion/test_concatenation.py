"""ReLU and concatenation change places: same values, same gradients, one tensor kept instead of two."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.graph.fusion.pairs import assert_fused, kinds, parse

INPUTS = {"a": torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 3, 2)}
INPUTS["b"] = INPUTS["a"].flip(0) - 0.25
TYPES = "double[2,3,2] a, double[2,3,2] b"


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_parts_of_relu_are_joined_first(axis: int) -> None:
    body = f"p = Relu(a)\nq = Relu(b)\nc = Concat<axis={axis}>(p, q, p)\nz = Mul(c, c)"
    assert_fused(parse(TYPES, "double[s,t,u] z", body), INPUTS, {"joined_relu": 1})


def test_the_whole_alone_is_kept() -> None:
    model = parse(TYPES, "double[2,6,2] z", "p = Relu(a)\nq = Relu(b)\nc = Concat<axis=1>(p, q)\nz = Mul(c, c)")
    kept = {}
    for fuse in (False, True):
        net = OnnxModule(make_training_graph(model, fuse=fuse))
        sizes: dict[int, int] = {}
        alive = []

        def pack(
            tensor: torch.Tensor, sizes: dict[int, int] = sizes, alive: list[torch.Tensor] = alive
        ) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            net(*(value.clone().requires_grad_() for value in INPUTS.values()))
        kept[fuse] = sum(sizes.values())
    part = 2 * 3 * 2 * 8
    assert (kept[False], kept[True]) == (4 * part, 2 * part)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("p = Relu(a)\nc = Concat<axis=1>(p, b)\nz = Mul(c, c)", id="a part of something else"),
        pytest.param("p = Relu(a)\nq = Relu(b)\nc = Concat<axis=0>(p, q)\nr = Concat<axis=0>(q, b)\nz = Mul(c, r)",
                     id="a part that is read elsewhere"),
        pytest.param("p = Relu(a)\nz = Concat<axis=1>(p)", id="one part"),
    ],
)  # fmt: skip
def test_what_stays(body: str) -> None:
    graph = make_training_graph(parse(TYPES, "double[s,t,u] z", body), fuse=True)
    assert kinds(graph) == {}


def test_a_result_that_is_asked_for_keeps_its_name() -> None:
    body = "p = Relu(a)\nq = Relu(b)\nc = Concat<axis=1>(p, q)\nz = Mul(c, c)"
    model = parse(TYPES, "double[2,6,2] z", body)
    assert kinds(make_training_graph(model, fuse=True, keep=("p",))) == {}
    assert kinds(make_training_graph(model, fuse=True, fusions_off=("joined_relu",))) == {}
