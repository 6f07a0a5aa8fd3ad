"""The standard's cases compiled: outputs and gradients are those of uncompiled code, twenty cases in one graph.

Results are added up, so that gradients arrive expanded, as those of a mean do. Code is generated for two threads, which
differs from that for one.
"""

from __future__ import annotations

import copy
import functools
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, fx

from onward.engine.network.compilation import options_for
from onward.lowering.building.specialization import specialize
from onward.lowering.kernels.host import to_host
from tests.conformance.cases import Case
from tests.conformance.checking import net_of, to_torch_value
from tests.conformance.kinds import cases_by_kind

PARTS, CASES_OF_A_KIND, CASES_OF_A_GRAPH = 12, 3, 20
REFUSED = {
    "test_cast_e8m0_FLOAT_to_FLOAT8E8M0": "torch's compiler has no name in C++ for the type",
    "test_cast_e8m0_FLOAT16_to_FLOAT8E8M0": "the same",
    "test_loop11": "the rows that a loop adds are chosen by its own counter",
}
"""Case -> why torch cannot compile it."""
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch._prims_common.check. is deprecated:FutureWarning"),  # of Det, in torch
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++"),
]


@dataclass(frozen=True)
class Compilable:
    """A case as the code of a run has it: specialized, with all that is not a float tensor folded.

    Attributes:
        name: of the case.
        code: takes inputs and tensors.
        inputs: floats; of those in fp32 there are gradients.
        tensors: constants.
    """

    name: str
    code: fx.GraphModule
    inputs: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]

    def __call__(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        results = [x for x in self.code(False, CPU, *arguments) if isinstance(x, Tensor)]
        return [x.float() if x.is_floating_point() and x.itemsize == 1 else x for x in results]

    def begin(self) -> list[Tensor]:
        """Arguments without a past."""
        inputs = (x.clone().requires_grad_(x.dtype == torch.float32) for x in self.inputs)
        return [*inputs, *(x.clone() for x in self.tensors)]


def is_same(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), two.nan_to_num()) if one.is_floating_point() else torch.equal(one, two)


def with_constants(case: Case, arrays: Sequence[Any], are_inputs: Sequence[bool]) -> Case:
    """The same case; what is no input holds these numbers."""
    case = replace(case, model=copy.deepcopy(case.model))
    graph, values = case.model.graph, list(case.model.graph.input)
    del graph.input[:]
    for value, array, is_input in zip(values, arrays, are_inputs, strict=True):
        if is_input:
            graph.input.append(value)
        else:
            graph.initializer.append(numpy_helper.from_array(np.asarray(array), value.name))
    return case


def compilable(case: Case) -> Compilable | None:
    """None: it has no floats, or draws random numbers."""
    arrays = case.data_sets[0][0]
    given = [to_torch_value(value) for value in arrays]
    if not all(isinstance(x, Tensor) for x in given):
        return None
    are_tensors = [x.is_floating_point() for x in given]
    net = net_of(with_constants(case, arrays, are_tensors))
    read_as_numbers = {
        node.name
        for node in net.program.code.graph.nodes
        if node.op == "placeholder" and any(user.target is to_host for user in node.users)
    }
    names = [value.name for value in case.model.graph.input]
    are_tensors = [is_one and name not in read_as_numbers for is_one, name in zip(are_tensors, names, strict=True)]
    if not any(are_tensors):
        return None
    floats = tuple(x for x, is_one in zip(given, are_tensors, strict=True) if is_one)
    net = net_of(with_constants(case, arrays, are_tensors))
    tensors = net.tensors_by_name()
    program = specialize(net.program, CPU, floats, tensors, frozenset(tensors))
    found = Compilable(
        case.name, program.code, floats, tuple(program.tensor(name, tensors) for name in program.tensors)
    )
    first, again = found(found.begin()), found(found.begin())
    is_repeatable = all(is_same(one, two) for one, two in zip(first, again, strict=True))
    return found if is_repeatable and any(x.is_floating_point() for x in first) else None


@functools.cache
def load() -> list[Compilable]:
    """A few of each kind: an operator and the attributes that it is given."""
    done, found = Counter[str](), []
    for kind, case in cases_by_kind():
        if done[kind] == CASES_OF_A_KIND:
            continue
        one = compilable(case)
        if one is not None:
            done[kind] += 1
            found.append(one)
    return found


def compute(group: Sequence[Compilable], is_compiled: bool) -> list[list[Tensor]]:
    """Outputs and gradients of each case, all cases in one graph."""
    every = [one.begin() for one in group]

    def run(arguments: list[list[Tensor]]) -> list[list[Tensor]]:
        # What is computed may be written into, unlike the arguments of a graph.
        return [
            one([x * 1.0 if x.requires_grad else x for x in mine]) for one, mine in zip(group, arguments, strict=True)
        ]

    if is_compiled:
        torch.compiler.reset()
        run = torch.compile(run, dynamic=False, fullgraph=True, options=options_for(CPU))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")  # as in a run
        results = run(every)
    sums = [x.float().sum() for outputs in results for x in outputs if x.requires_grad]
    leaves = [[x for x in mine if x.requires_grad] for mine in every]
    if sums:
        found = iter(
            torch.autograd.grad(torch.stack(sums).sum(), [x for mine in leaves for x in mine], materialize_grads=True)
        )
    return [
        [*(x.detach() for x in outputs), *(next(found) for _ in mine if sums)]
        for outputs, mine in zip(results, leaves, strict=True)
    ]


def differing(group: Sequence[Compilable], refused: list[str]) -> list[str]:
    """Names of cases that compiled code computes otherwise; those that torch cannot compile are added to `refused`."""
    expected = compute(group, is_compiled=False)
    try:
        found = compute(group, is_compiled=True)
    except Exception:  # in a run, such a segment is left uncompiled
        if len(group) == 1:
            refused.append(group[0].name)
            return []
        half = len(group) // 2
        return differing(group[:half], refused) + differing(group[half:], refused)
    names = []
    for one, wanted, values in zip(group, expected, found, strict=True):
        try:
            torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            names.append(f"{one.name}: {str(error).splitlines()[0]}")
    return names


@pytest.mark.parametrize("part", range(PARTS))
def test_compiled_cases_are_as_uncompiled_ones(part: int) -> None:
    cases, refused = load()[part::PARTS], list[str]()
    assert len(cases) > 40
    groups = [cases[at : at + CASES_OF_A_GRAPH] for at in range(0, len(cases), CASES_OF_A_GRAPH)]
    assert not [name for group in groups for name in differing(group, refused)]
    assert set(refused) == {one.name for one in cases} & REFUSED.keys()
