"""Direct convolutions and pooling give the bits of the lowering, values and gradients, or stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import onward.lowering.kernels.max_pooling as max_pooling
import onward.lowering.kernels.rematerialize as rematerialize
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.graph.fusion.pairs import parse
from tests.lowering.rewriting.test_direct_calls import called, direct_twin, same_bits

# (shape of x, shape of w, node): every name in the program that is to come of it.
DIRECT = {
    "3x3": ((2, 3, 9, 10), (4, 3, 3, 3), "Conv<pads=[1,1,1,1]>(x, w, b)", "_convolve_small"),
    "one channel": ((2, 1, 9, 10), (4, 1, 3, 3), "Conv(x, w)", "_convolve_small"),
    "one channel that becomes a column": ((2, 1, 8, 3), (8, 1, 3, 3), "Conv<strides=[1,2]>(x, w)", "convolve_images"),
    "groups, padded alike": (
        (2, 4, 9, 9), (4, 2, 3, 3), 'Conv<group=2, auto_pad="SAME_UPPER">(x, w, b)', "_convolve_small"
    ),
    "a pixel": ((2, 3, 8, 8), (4, 3, 1, 1), "Conv<strides=[2,2]>(x, w, b)", "convolve_images"),
    "a large weight": ((2, 8, 3, 3), (40, 8, 3, 3), "Conv<pads=[1,1,1,1]>(x, w, b)", "convolve_images"),
    "a sequence": ((2, 3, 9), (4, 3, 3), "Conv<dilations=[2], pads=[2,2]>(x, w, b)", "conv1d"),
    "a volume": ((2, 3, 4, 5, 5), (4, 3, 2, 3, 3), "Conv<strides=[1,2,2]>(x, w)", "conv3d"),
}  # fmt: skip
STAYS = {
    "padded on one side": ((2, 3, 8, 8), (4, 3, 3, 3), "Conv<pads=[0,0,1,1]>(x, w, b)", "conv"),
    "padded to an even size": ((2, 3, 8, 8), (4, 3, 4, 4), 'Conv<auto_pad="SAME_UPPER">(x, w, b)', "conv"),
}
SMALL = "_maxima_of_small"
POOLS = {
    "maxima": ("MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", SMALL),
    "maxima, padded": ("MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1>(x)", SMALL),
    "maxima of dilated windows": ("MaxPool<kernel_shape=[2,2], dilations=[2,2]>(x)", SMALL),
    "padded on one side": ("MaxPool<kernel_shape=[2,2], pads=[0,0,1,1]>(x)", "max_pool"),
}  # fmt: skip


def network(shape: tuple[int, ...], body: str, **stored: tuple[int, ...]) -> OnnxModule:
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=size).astype(np.float32) for name, size in stored.items()}
    given, made = ",".join(map(str, shape)), ",".join("abcde"[: len(shape)])
    return OnnxModule(make_training_graph(parse(f"float[{given}] x", f"float[{made}] z", body, tensors, 18)))


@pytest.mark.parametrize("case", [*DIRECT, *STAYS])
def test_convolutions(case: str) -> None:
    shape, kernel, node, name = {**DIRECT, **STAYS}[case]
    bias = {"b": (kernel[0],)} if "b)" in node else {}
    net = network(shape, f"y = {node}\nz = Relu(y)", w=kernel, **bias)
    before, program = direct_twin(net, shape)
    assert name in called(program)
    same_bits(net, before, program, shape)


@pytest.mark.parametrize("case", POOLS)
def test_pools(case: str) -> None:
    node, name = POOLS[case]
    shape = (2, 3, 9, 9)
    net = network(shape, f"s = Mul(x, g)\nz = {node.replace('(x)', '(s)')}", g=(3, 1, 1))
    before, program = direct_twin(net, shape)
    assert name in called(program)
    same_bits(net, before, program, shape)


def test_places_of_many_maxima_take_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pooling, "LEAST_BYTES", 0)
    net = network((2, 3, 9, 9), "z = MaxPool<kernel_shape=[2,2]>(x)")
    before, program = direct_twin(net, (2, 3, 9, 9))
    assert "_maxima" in called(program)
    same_bits(net, before, program, (2, 3, 9, 9))


def test_indices_of_maxima_stay() -> None:
    net = network((2, 3, 4, 4), "y, i = MaxPool<kernel_shape=[2,2]>(x)\nf = Cast<to=1>(i)\nz = Add(y, f)")
    assert "max_pool" in called(direct_twin(net, (2, 3, 4, 4))[1])


def test_images_that_may_be_recomputed_are_convolved_as_the_lowering_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rematerialize, "LEAST_BYTES", 0)
    shape = (2, 3, 8, 8)
    net = network(shape, "y = Conv(x, w)\nz = Relu(y)", w=(4, 3, 3, 3))
    assert {"convolve_images", "relu"} <= {*called(direct_twin(net, shape)[1])}


def test_types_whose_layout_stays_are_left_to_the_lowering() -> None:
    x, w = torch.randn(2, 3, 6, 6).double(), np.random.default_rng(0).normal(size=(4, 3, 3, 3))
    model = parse("double[2,3,6,6] x", "double[a,b,c,d] z", "z = Conv(x, w)", {"w": w}, 18)
    net = OnnxModule(make_training_graph(model))
    assert called(direct_twin(net, tuple(x.shape), torch.float64)[1]) == ["conv"]
