"""Additions at positions, compiled for several threads: right wherever they read from, and the same each time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code

from onward.engine.network.compilation import options_for
from onward.engine.network.ordered_sums import OrderedSums

CPU = torch.device("cpu")
TERMS = 3000
MANY = torch.randint(-20, 20, (TERMS,))
COLUMN, ROW = torch.tensor([[-1], [3], [0], [3]]), torch.tensor([[2, 2, -6]])


def added(x: Tensor, positions: Sequence[Tensor | None], values: Tensor) -> Tensor:
    return torch.ops.aten.index_put(x, list(positions), values, True)  # type: ignore[no-any-return]


ADDITIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "rows": (lambda x, v: added(x, (MANY,), v), (20, 6), (3000, 6)),
    "rows, one for all": (lambda x, v: added(x, (MANY,), v), (20, 6), (6,)),
    "elements": (lambda x, v: added(x, (MANY,), v), (20,), (3000,)),
    "a number": (lambda x, v: added(x, (torch.tensor(-2),), v), (20,), ()),
    "columns": (lambda x, v: added(x, (None, MANY), v), (5, 20), (5, 3000)),
    "two axes": (lambda x, v: added(x, (None, COLUMN, ROW), v), (2, 6, 7, 3), (2, 4, 3, 3)),
    "two axes, in the middle": (lambda x, v: added(x, (None, COLUMN, ROW), v), (2, 6, 7, 3), (4, 1, 3)),
    "two axes that are apart": (lambda x, v: added(x, (COLUMN, None, ROW), v), (6, 5, 7), (4, 3, 5)),
    "int32": (lambda x, v: added(x, (MANY.int(),), v), (20, 6), (3000, 6)),
    "rows that are selected": (lambda x, v: x[MANY].sin() * v, (20, 6), (3000, 6)),
    "an embedding": (lambda x, v: F.embedding(MANY % 20, x) * v, (20, 6), (3000, 6)),
    "transposed rows": (lambda x, v: added(x, (torch.arange(32),), v.t() * 2), (32, 48), (48, 32)),
    "patches": (lambda x, v: F.fold(x * 2, (5, 5), (1, 5)) + v, (1, 5, 5), ()),
}
"""Of x and v, and their shapes."""


def begin(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in ADDITIONS[name][1:]]


def results_of(function: Callable[[Tensor, Tensor], Tensor], name: str) -> list[Tensor]:
    x, v = begin(name)
    result = function(x, v)
    return [result, *torch.autograd.grad(result.sin().sum(), [x, v])]


@pytest.mark.parametrize("name", ADDITIONS)
def test_none_is_left_and_results_are_the_same(name: str) -> None:
    left = list[str]()

    def replace(code: fx.GraphModule, _: object) -> Callable[..., object]:
        OrderedSums()(code.graph)
        code.graph.lint()
        code.recompile()
        left.extend(node.name for node in code.graph.nodes if "index_put" in str(node.target))
        return make_boxed_func(code.forward)

    function = ADDITIONS[name][0]
    backend = aot_autograd(fw_compiler=replace, bw_compiler=replace, decompositions=select_decomp_table())
    found = results_of(torch.compile(function, backend=backend, dynamic=False), name)
    torch.testing.assert_close(found, results_of(function, name), rtol=1e-5, atol=1e-5)
    assert not left


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
@pytest.mark.usefixtures("two_threads")
def test_compiled_for_two_threads_they_are_right_and_the_same_each_time() -> None:
    given = [begin(name) for name in ADDITIONS]

    def every(given: list[list[Tensor]]) -> list[Tensor]:
        results = [function(x, v) for (function, *_), (x, v) in zip(ADDITIONS.values(), given, strict=True)]
        return [*results, torch.stack([result.sin().sum() for result in results]).sum()]

    def run(function: Callable[[list[list[Tensor]]], list[Tensor]]) -> list[Tensor]:
        *results, total = function(given)
        return [*results, *torch.autograd.grad(total, [x for pair in given for x in pair])]

    compiled = torch.compile(every, dynamic=False, options=options_for(CPU))
    found, codes = run_and_get_code(run, compiled)
    # The gradient of the value that all rows read is one long sum, whose rounding depends on the processor's vectors.
    long_sum = len(ADDITIONS) + 2 * list(ADDITIONS).index("rows, one for all") + 1
    for place, (one, expected) in enumerate(zip(found, run(every), strict=True)):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=TERMS * 2**-24 if place == long_sum else 1e-5)
    assert "scatter_reduce" in "".join(codes), "not what one thread computes"
    assert "atomic_add" not in "".join(codes)
    for _ in range(10):
        assert all(torch.equal(one, two) for one, two in zip(found, run(compiled), strict=True))


def test_what_is_not_a_sum_of_floats_is_left_as_it_is() -> None:
    def kept(code: fx.GraphModule, _: object) -> Callable[..., object]:
        before = str(code.graph)
        OrderedSums()(code.graph)
        assert str(code.graph) == before
        return make_boxed_func(code.forward)

    backend = aot_autograd(fw_compiler=kept, decompositions=select_decomp_table())
    x, mask = torch.zeros(20), torch.arange(20) % 2 == 0
    for function in (
        lambda x: x.index_put((MANY,), torch.ones(())),
        lambda x: added(x.long(), (MANY,), torch.ones((), dtype=torch.int64)),
        lambda x: added(x, (mask,), torch.ones(())),
    ):
        torch.testing.assert_close(torch.compile(function, backend=backend, dynamic=False)(x), function(x))


def test_the_pass_is_known_to_the_cache_by_its_code() -> None:
    assert OrderedSums().uuid() == OrderedSums().uuid()
    assert len(OrderedSums().uuid()) == 32
