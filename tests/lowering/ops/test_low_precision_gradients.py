"""Operators that add up many numbers, in 16 bits on a CPU: results and gradients are those of float64, rounded once.

torch's kernels round 16 bits at every addition in some of them, and lose most of a long sum that way.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward.graph.nodes.structure import MICROSOFT
from tests.one_node import make_model

BOUND = 2.0
"""Units in the last place of 1.0, of the norm of all errors to that of all numbers: rounding once takes 0.2 to 0.3,
and a few roundings on the way, as of an LSTM's states, up to 1.5. An addition at a time takes from 3 to 120 here."""
ROWS = 2048


@dataclass(frozen=True)
class Case:
    """A node; its inputs are sizes of random numbers from 0 to 1, tensors as they are, or None."""

    op_type: str
    inputs: tuple[Any, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    opset: int = 23


def case(op_type: str, *inputs: Any, domain: str = "", opset: int = 23, **attributes: Any) -> Case:
    return Case(op_type, inputs, attributes, domain, opset)


def positions(count: int, *sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, count, sizes, generator=torch.Generator().manual_seed(0)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


X, C = (ROWS, 64), (64,)
IMAGES, CHANNELS = (32, 8, 16, 16), (8,)
STATISTICS = (torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64))


def normalizations() -> Iterator[Case]:
    yield case("LayerNormalization", X, C, C)
    yield case("LayerNormalization", (ROWS, 4, 16), (4, 16), (4, 16), axis=1)
    yield case("LayerNormalization", (ROWS, 4, 16), (16,), (16,), axis=1)
    yield case("LayerNormalization", X, C)
    yield case("LayerNormalization", (8, 20000), (20000,), (20000,))
    yield case("LayerNormalization", X, C, C, domain="onward.fused")
    yield case("SkipLayerNormalization", X, X, C, C, C, domain=MICROSOFT)
    tokens, kinds = positions(7, 16, 128, dtype=torch.int32), positions(2, 16, 128, dtype=torch.int32)
    yield case("EmbedLayerNormalization", tokens, kinds, (7, 64), (128, 64), (2, 64), C, C, domain=MICROSOFT)
    yield case("RMSNormalization", X, C)
    yield case("SimplifiedLayerNormalization", X, C)
    yield case("SkipSimplifiedLayerNormalization", X, X, C, domain=MICROSOFT)
    yield case("GroupNormalization", IMAGES, CHANNELS, CHANNELS, num_groups=4)
    yield case("GroupNormalization", IMAGES, (4,), (4,), num_groups=4, opset=18)
    yield case("InstanceNormalization", IMAGES, CHANNELS, CHANNELS)
    yield case("GroupNorm", IMAGES, CHANNELS, CHANNELS, groups=4, activation=0, channels_last=0, domain=MICROSOFT)
    yield case("BatchNormalization", IMAGES, CHANNELS, CHANNELS, *STATISTICS, training_mode=1)
    yield case("BatchNormalization", IMAGES, CHANNELS, CHANNELS, *STATISTICS)
    yield case("LpNormalization", (8, 4096), p=2)
    yield case("MeanVarianceNormalization", IMAGES)


def broadcasts() -> Iterator[Case]:
    for op_type in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum", "PRelu"):
        yield case(op_type, X, C)
        yield case(op_type, (16, 8, 16, 16), (8, 1, 1))
    yield case("Expand", (1, 64), ints(ROWS, 64))
    yield case("Tile", (1, 64), ints(ROWS, 2))
    yield case("BiasGelu", X, C, domain=MICROSOFT)


def reductions() -> Iterator[Case]:
    for op_type in ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare"):
        for axes in (ints(0), ints(1)):
            yield case(op_type, X, axes)
    yield case("ReduceProd", (12, ROWS), ints(0))
    yield case("CumSum", (8, ROWS), torch.tensor(1))
    yield case("Softmax", (8, 8192))
    yield case("Softmax", (8192, 8), axis=0)


def moves() -> Iterator[Case]:
    for dtype in (torch.int64, torch.int32):
        many = positions(7, ROWS, dtype=dtype)
        yield case("Gather", (7, 64), many)
        yield case("Gather", (64, 7), many, axis=1)
        yield case("Gather", (8, 7, 8), many, axis=1)
        yield case("Gather", (7, 8, 8), many)
        yield case("Gather", (7,), many)
        many = positions(7, ROWS, 64, dtype=dtype)
        yield case("GatherElements", (7, 64), many)
        yield case("ScatterElements", (7, 64), many, X, reduction="add")
    yield case("GatherND", (7, 64), positions(7, ROWS, 1))
    yield case("GatherND", (7, 5, 8), positions(5, ROWS, 2))
    yield case("ScatterND", (7, 64), positions(7, ROWS, 1), X, reduction="add")
    for mode in ("edge", "wrap", "reflect"):
        amount = 63 if mode == "reflect" else 500
        yield case("Pad", (2, 64), ints(0, amount, 0, amount), mode=mode)
        yield case("Pad", (2, 64, 4), ints(0, amount, 0, 0, amount, 0), mode=mode)
        amount = min(amount, 100)
        yield case("Pad", (1, 2, 64, 64), ints(0, 0, amount, amount, 0, 0, 0, 0), mode=mode)
    for mode in ("nearest", "linear", "cubic"):
        for sizes in ((2, 3, 64), (2, 3, 64, 64), (2, 3, 16, 16, 16)):
            few = (2, 3, *(4 for _ in sizes[2:]))
            yield case("Resize", few, None, None, ints(*sizes), mode=mode)
    yield case("Resize", (2, 3, 4, 5), None, None, ints(2, 3, 101, 203), mode="nearest", nearest_mode="ceil")
    yield case("GridSample", (1, 3, 4, 4), (1, 64, 64, 2))


def windows() -> Iterator[Case]:
    yield case("AveragePool", (2, 4, 512), kernel_shape=[129])
    yield case("AveragePool", (2, 4, 32, 32), kernel_shape=[17, 17])
    yield case("AveragePool", (1, 2, 12, 12, 12), kernel_shape=[5, 5, 5])
    yield case("AveragePool", (2, 4, 32, 32), kernel_shape=[17, 17], pads=[5, 3, 2, 1])
    yield case("AveragePool", (2, 4, 32, 32), kernel_shape=[9, 9], dilations=[2, 2])
    yield case("LpPool", (2, 4, 32, 32), kernel_shape=[17, 17])
    yield case("MaxPool", (2, 4, 512), kernel_shape=[129])
    yield case("MaxPool", (2, 4, 32, 32), kernel_shape=[17, 17])
    yield case("MaxPool", (1, 2, 12, 12, 12), kernel_shape=[5, 5, 5])
    yield case("MaxPool", (2, 4, 32, 32), kernel_shape=[17, 17], pads=[5, 3, 2, 1])
    for group, width in ((1, 8), (2, 4), (8, 1)):
        yield case("Conv", IMAGES, (8, width, 3, 3), CHANNELS, group=group)
        yield case("ConvTranspose", IMAGES, (8, 8 // group, 3, 3), (8,), group=group)
    yield case("Conv", (16, 8, 256), (8, 8, 3), CHANNELS)
    yield case("Col2Im", (1, 4 * 25, 32 * 32), ints(36, 36), ints(5, 5))


def products() -> Iterator[Case]:
    yield case("MatMul", X, (64, 32))
    yield case("MatMul", X, (64, 1))
    yield case("MatMul", (8, ROWS), (ROWS, 8))
    yield case("MatMul", (32, 64, 16), (16, 8))
    yield case("Gemm", X, (64, 8), CHANNELS)
    yield case("Einsum", (ROWS, 8), (ROWS, 8), equation="ij,ij->j")
    yield case("Einsum", (32, 64, 16), (32, 64), equation="bij,bi->j")


def recurrences() -> Iterator[Case]:
    x, lengths = (128, 4, 8), ints(128, 50, 10, 3).int()
    for op_type, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        weights = (1, gates * 8, 8), (1, gates * 8, 8), (1, 2 * gates * 8)
        yield case(op_type, x, *weights, hidden_size=8)
        yield case(op_type, x, *weights, lengths, hidden_size=8, direction="reverse")
    yield case("GRU", x, (1, 24, 8), (1, 24, 8), (1, 48), hidden_size=8, linear_before_reset=1)
    yield case("LSTM", x, (1, 32, 8), (1, 32, 8), (1, 64), None, None, None, (1, 24), hidden_size=8)


def losses() -> Iterator[Case]:
    labels = positions(8, ROWS)
    for weights in ((), ((8,),)):
        for reduction in ("sum", "none"):
            yield case("SoftmaxCrossEntropyLoss", (ROWS, 8), labels, *weights, reduction=reduction)
            yield case("NegativeLogLikelihoodLoss", (ROWS, 8), labels, *weights, reduction=reduction)


CASES = [
    one
    for family in (normalizations, broadcasts, reductions, moves, windows, products, recurrences, losses)
    for one in family()
]


def _name(one: Case) -> str:
    sizes = "-".join("x".join(map(str, given)) for given in one.inputs if isinstance(given, tuple))
    more = ".".join(f"{key}={value}" for key, value in one.attributes.items())
    return " ".join(part for part in (one.domain, one.op_type, sizes, more) if part)


def differentiate(one: Case, dtype: torch.dtype, wide: bool) -> dict[str, Tensor]:
    """The result and all gradients, of numbers that `dtype` holds; all but the first are weights."""
    held = torch.float64 if wide else dtype
    generator = torch.Generator().manual_seed(zlib.crc32(_name(one).encode()))
    inputs: dict[str, Tensor | None] = {}
    stored: dict[str, Tensor | None] = {}
    scale, least = (0.3, 0.1) if one.op_type in ("RNN", "GRU", "LSTM") else (1.0, 0.1)
    if one.op_type == "PRelu":
        least = -0.9
    for place, given in enumerate(one.inputs):
        name = f"input_{place}"
        if isinstance(given, tuple):
            drawn = torch.rand(given, generator=generator, dtype=torch.float64).mul_(scale).add_(least).to(dtype)
            inputs[name] = drawn.to(held)
        elif given is None:
            inputs[name] = None
        else:
            inputs[name] = given.to(held) if given.is_floating_point() else given
        if isinstance(given, Tensor) or (place and given is not None):
            stored[name] = inputs[name]
    model = make_model(one.op_type, inputs, one.attributes, one.opset, 1, stored, one.domain)
    net = onward.to_torch(model)
    leaves = {
        name: value.requires_grad_() for name, value in inputs.items() if value is not None and name not in stored
    }
    result = net(*leaves.values())
    leaves |= {name: weight for name, weight in net.named_parameters() if weight.requires_grad}
    direction = torch.rand(result.shape, generator=generator, dtype=torch.float64).to(dtype).to(held)
    gradients = torch.autograd.grad(result, list(leaves.values()), direction)
    return {"result": result.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one", CASES, ids=_name)
def test_sums_in_16_bits_are_rounded_once(one: Case, dtype: torch.dtype) -> None:
    found, expected = differentiate(one, dtype, wide=False), differentiate(one, dtype, wide=True)
    unit = torch.finfo(dtype).eps
    for name, numbers in expected.items():
        assert found[name].dtype == dtype
        error = (found[name].double() - numbers).norm() / numbers.norm() / unit
        assert error < BOUND, f"{name}: {error:.1f} units"
