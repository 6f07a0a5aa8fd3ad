"""Every `torch.autograd.Function` of onward: derivatives of any inputs, in any layout, size and type, or words.

A function without an example fails `test_each_function_has_an_example`. Those of ranks are asked by
`tests/parallel/test_autograd_functions.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import onward
from tests.invariants.random_training import of_any_size
from tests.lowering.autograd_functions import EXAMPLES, IN_OTHER_TESTS, Call, Example
from tests.parallel.test_autograd_functions import ON_RANKS

LOW = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
ONLY = pytest.mark.parametrize("name", EXAMPLES)
REFUSED = r"has no second derivative\. Compute gradients without create_graph=True; if you need their gradients, call"


@pytest.fixture(autouse=True)
def _any_size() -> Iterator[None]:
    with of_any_size():
        yield


def drawn(example: Example, dtype: torch.dtype = torch.float64, rows: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in example.shapes]
    return [t[:rows] if rows is not None and place in example.rows else t for place, t in enumerate(tensors)]


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, of which every second element of memory is one, axes in reverse order."""
    spread = torch.full((*tensor.shape[::-1], 2), torch.nan, dtype=tensor.dtype)
    spread[..., 0] = tensor.permute(*range(tensor.dim())[::-1])
    return spread[..., 0].permute(*range(tensor.dim())[::-1])


def derived(call: Call, tensors: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    """The result, and the gradients of a projection of it by some of the tensors."""
    given = [t.detach().requires_grad_(place in wanted) for place, t in enumerate(tensors)]
    result = call(*given)
    direction = torch.linspace(-1, 2, 2 * result.numel(), dtype=result.dtype).reshape(*result.shape, 2)[..., 0]
    asked = [given[place] for place in wanted]
    return [result.detach(), *(g.to_dense() for g in torch.autograd.grad(result, asked, direction))]


def assert_alike(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)


def functions() -> set[str]:
    """Classes whose base is called `Function`, of torch, in whatever way it was imported."""
    root = Path(onward.__file__).parent
    found = {
        f"{path.relative_to(root).with_suffix('').as_posix().replace('/', '.')}.{name}"
        for path in root.rglob("*.py")
        for name in re.findall(r"^ *class (\w+)\([^)]*\b(?:Inplace)?Function\b[^)]*\)", path.read_text(), re.MULTILINE)
    }
    return {name.removeprefix("lowering.") for name in found}


def test_each_function_has_an_example() -> None:
    """Give a new one an example in `autograd_functions.py` or in `tests/parallel/test_autograd_functions.py`."""
    assert functions() == {function for function, _ in EXAMPLES.values()} | set(IN_OTHER_TESTS) | set(ON_RANKS)


@pytest.mark.parametrize("function", IN_OTHER_TESTS)
def test_other_tests_are_there(function: str) -> None:
    path, names = IN_OTHER_TESTS[function]
    text = Path(path).read_text()
    assert [name for name in names if f"def {name}(" not in text] == []


@ONLY
def test_it_is_the_function_that_is_called(name: str) -> None:
    function, example = EXAMPLES[name]
    result = example.call(*(t.requires_grad_() for t in drawn(example)))
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    assert f"{function.rpartition('.')[2]}Backward" in {type(node).__name__ for node in seen}


@ONLY
def test_first_derivatives_are_those_of_finite_differences(name: str) -> None:
    example = EXAMPLES[name][1]
    assert torch.autograd.gradcheck(example.call, tuple(t.requires_grad_() for t in drawn(example)))


@ONLY
def test_any_inputs_may_have_gradients(name: str) -> None:
    """Every choice of them, against torch's operators."""
    example = EXAMPLES[name][1]
    places = range(len(example.shapes))
    for count in range(1, len(places) + 1):
        for wanted in itertools.combinations(places, count):
            tensors = drawn(example)
            assert_alike(derived(example.call, tensors, wanted), derived(example.plain, tensors, wanted))


@ONLY
def test_memory_in_any_order(name: str) -> None:
    example = EXAMPLES[name][1]
    tensors, wanted = drawn(example), range(len(example.shapes))
    before = [strided(t) for t in tensors]
    assert not any(t.is_contiguous() for t in before)
    assert_alike(derived(example.call, before, wanted), derived(example.plain, tensors, wanted))
    assert_alike(before, tensors, 0.0)  # nothing was written over


@pytest.mark.parametrize("name", [name for name, (_, example) in EXAMPLES.items() if example.rows])
@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one(name: str, rows: int) -> None:
    example = EXAMPLES[name][1]
    tensors, wanted = drawn(example, rows=rows), range(len(example.shapes))
    assert_alike(derived(example.call, tensors, wanted), derived(example.plain, tensors, wanted))


@ONLY
def test_second_derivatives_are_right_or_refused(name: str) -> None:
    example = EXAMPLES[name][1]
    tensors = [t.requires_grad_() for t in drawn(example)]
    if example.second:
        assert torch.autograd.gradgradcheck(example.call, tuple(tensors))
        return
    result = example.call(*tensors)
    for objective in (result.sin().sum(), result.sum()):  # of the second, torch's own guard says nothing
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.autograd.grad(objective, tensors, create_graph=True, retain_graph=True)


@ONLY
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("casts", [True, False], ids=["autocast", "stored"])
def test_16_bits_are_as_near_as_torchs(name: str, dtype: torch.dtype, casts: bool) -> None:
    """The types of results and gradients are torch's, and their distance from float64 at most twice torch's."""
    example, wanted = EXAMPLES[name][1], range(len(EXAMPLES[name][1].shapes))
    tensors = drawn(example, torch.float32 if casts else dtype)
    exact = derived(example.plain, [t.double() for t in tensors], wanted)
    with torch.autocast("cpu", dtype, enabled=casts):
        found, expected = (derived(call, tensors, wanted) for call in (example.call, example.plain))
    for one, other, truth in zip(found[1:], expected[1:], exact[1:], strict=True):
        assert one.dtype is other.dtype
        errors = [float((t.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-3)) for t in (one, other)]
        assert errors[0] <= 2 * errors[1] + LOW[dtype]


@ONLY
def test_transforms_of_torch_func_go_through(name: str) -> None:
    """As the operator `Gradient` needs them: these take no functions of this kind."""
    example = EXAMPLES[name][1]
    tensors = drawn(example)
    places = tuple(range(len(tensors)))
    if name in NOT_IN_TRANSFORMS:
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda *given: example.call(*given).sin().sum(), places)(*tensors)
        return
    found, expected = (
        torch.func.grad(lambda *given, call=call: call(*given).sin().sum(), places)(*tensors)
        for call in (example.call, example.plain)
    )
    assert_alike(found, expected)


NOT_IN_TRANSFORMS = ("a value from another stage", "a value for another stage")
"""A pipeline has no transforms."""
