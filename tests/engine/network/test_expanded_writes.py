"""Writes into tensors whose elements share memory: compiled, they are what they are uncompiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from onward.engine.network.compilation import options_for
from onward.engine.network.expanded_writes import CopiedExpansions, shares_memory_with_itself

CPU = torch.device("cpu")
ROW = torch.tensor([1])
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, new: x.index_add(0, ROW, new),
    "index_copy": lambda x, new: x.index_copy(0, ROW, new),
    "index_fill": lambda x, new: x.index_fill(0, ROW, 0.5) * new,
    "index_put": lambda x, new: x.index_put((ROW,), new),
    "scatter": lambda x, new: x.scatter(0, ROW[:, None].expand(1, 6), new),
    "scatter_add": lambda x, new: x.scatter_add(0, ROW[:, None].expand(1, 6), new),
    "scatter_reduce": lambda x, new: x.scatter_reduce(0, ROW[:, None].expand(1, 6), new, "amax"),
    "select_scatter": lambda x, new: x.select_scatter(new[0], 0, 1),
    "slice_scatter": lambda x, new: x.slice_scatter(new, 0, 1, 2),
}
TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: (x[0, 0] * 2).expand(3, 6),
    "a row": lambda x: (x[:1] * 2).expand(3, 6),
}


def every_write(x: Tensor) -> list[Tensor]:
    """All of them into all targets; and one whose gradient is expanded, as that of a sum is."""
    results = [write(target(x), x[:1].exp()).sin() for write in WRITES.values() for target in TARGETS.values()]
    return [*results, (x * 3).index_copy(0, ROW, x[:1].exp()).sum()]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
def test_results_and_gradients_are_those_of_uncompiled_code() -> None:
    torch.manual_seed(0)
    given = torch.randn(3, 6)

    def run(function: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        x = given.clone().requires_grad_()
        results = function(x)
        gradients = [torch.autograd.grad(result.sum(), x, retain_graph=True)[0] for result in results]
        return [*results, *gradients]

    found = run(torch.compile(every_write, dynamic=False, options=options_for(CPU)))
    torch.testing.assert_close(found, run(every_write), rtol=1e-6, atol=1e-6)


def copies_in(function: Callable[[Tensor], Tensor]) -> int:
    """How many the pass adds to the graphs of both passes."""
    counted = list[int]()

    def keep(code: fx.GraphModule, _: object) -> Callable[..., object]:
        before = len(code.graph.nodes)
        CopiedExpansions()(code.graph)
        code.graph.lint()
        code.recompile()
        counted.append(len(code.graph.nodes) - before)
        return make_boxed_func(code.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
    x = torch.randn(3, 6, requires_grad=True)
    result = torch.compile(function, backend=backend, dynamic=False)(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    y = x.detach().requires_grad_()
    expected = function(y)
    assert torch.equal(result, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected.sum(), y)[0])
    return sum(counted)


def test_only_what_is_expanded_is_copied() -> None:
    assert copies_in(lambda x: (x * 2).index_copy(0, ROW, x[:1].exp()).sin()) == 0
    assert copies_in(lambda x: (x[:1] * 2).expand(3, 6).index_copy(0, ROW, x[:1].exp()).sin()) == 1
    assert copies_in(lambda x: (x * 2).index_copy(0, ROW, x[:1].exp()).sum()) == 1, "the gradient of a sum"


def test_what_shares_memory() -> None:
    assert shares_memory_with_itself(torch.zeros(1).expand(3))
    assert not shares_memory_with_itself(torch.zeros(3, 1).expand(3, 1))
    assert not shares_memory_with_itself(torch.zeros(3, 1).as_strided((1, 3), (0, 1)))
    assert not shares_memory_with_itself(2)


def test_the_pass_is_known_to_the_cache_by_its_code() -> None:
    assert CopiedExpansions().uuid() == CopiedExpansions().uuid()
    assert len(CopiedExpansions().uuid()) == 32
