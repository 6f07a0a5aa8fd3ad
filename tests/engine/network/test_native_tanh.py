"""Tangents of many numbers are torch's in compiled code; what is computed is the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from onward.engine.network.compilation import options_for
from onward.engine.network.native_tanh import LEAST_ELEMENTS, NativeTanh

CPU = torch.device("cpu")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda x: (x * 2).tanh() * x,
    "gelu": lambda x: F.gelu(x * 2, approximate="tanh") * x,
}


def replaced(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How many tangents of the graphs of both passes are torch's own afterwards."""
    found = list[int]()

    def keep(code: fx.GraphModule, _: object) -> Callable[..., object]:
        NativeTanh()(code.graph)
        found.append(sum(node.target is torch.ops.onward.tanh.default for node in code.graph.nodes))
        return make_boxed_func(code.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
    torch.compile(function, backend=backend, dynamic=False)(x).sum().backward()
    return sum(found)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch was built without MKL")
def test_only_many_numbers_in_full_precision_are_left_to_torch() -> None:
    tanh, gelu = FUNCTIONS.values()
    assert replaced(tanh, torch.randn(LEAST_ELEMENTS, requires_grad=True)) == 1
    assert replaced(gelu, torch.randn(LEAST_ELEMENTS, requires_grad=True)) >= 1
    assert replaced(tanh, torch.randn(LEAST_ELEMENTS - 1, requires_grad=True)) == 0
    assert replaced(tanh, torch.randn(LEAST_ELEMENTS, dtype=torch.bfloat16, requires_grad=True)) == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_are_as_near_to_float64_as_uncompiled_ones(name: str) -> None:
    function = FUNCTIONS[name]
    x = torch.linspace(-9, 9, LEAST_ELEMENTS).view(-1, 64)
    given = [one.requires_grad_() for one in (x.clone(), x.clone(), x.double())]
    compiled = torch.compile(function, dynamic=False, options=options_for(CPU))
    results = [run(one) for run, one in zip((compiled, function, function), given, strict=True)]
    for result in results:
        result.sum().backward()
    for found, expected, exact in (results, [one.grad for one in given]):
        assert found is not None
        assert expected is not None
        assert exact is not None
        error, usual = ((one.double() - exact).abs().max().item() for one in (found, expected))
        assert error <= 2 * usual
        assert usual < 1e-5
