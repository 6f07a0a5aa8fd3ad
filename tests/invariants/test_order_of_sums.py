"""On a CPU sums have one order, whatever the threads: torch's accumulating index_put has another one each time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conformance.checking import net_of, to_torch_value
from tests.conformance.kinds import cases_by_kind
from tests.invariants.random_training import of_any_size
from tests.lowering.autograd_functions import EXAMPLES
from tests.lowering.test_autograd_functions import derived, drawn

ATEN = torch.ops.aten
BY_POSITION = (ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_, ATEN._unsafe_index_put)
CASES_OF_A_KIND = 2


class Additions(TorchDispatchMode):
    """Notes the operators that add elements in an order that depends on timing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        is_sum = packet in BY_POSITION and (args[3:] or [(kwargs or {}).get("accumulate", False)])[0]
        if is_sum or packet in (ATEN.put, ATEN.put_):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:The model has no trainable weights")
def test_no_operator_and_no_gradient_depends_on_timing() -> None:
    done, found = Counter[str](), dict[str, list[str]]()
    for kind, case in cases_by_kind():
        if done[kind] == CASES_OF_A_KIND:
            continue
        given = [to_torch_value(value) for value in case.data_sets[0][0]]
        floats = [x.requires_grad_() for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        done[kind] += 1
        net = net_of(case)
        with Additions() as additions:
            results = [
                x for x in net.run(tuple(given), net.tensors_by_name()) if isinstance(x, Tensor) and x.requires_grad
            ]
            if results:
                torch.autograd.grad(results, floats, [torch.ones_like(x) for x in results], allow_unused=True)
        if additions.found:
            found[case.name] = additions.found
    assert len(done) > 200
    assert not found


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_function_of_onward_depends_on_timing(name: str) -> None:
    example = EXAMPLES[name][1]
    tensors = drawn(example, torch.float32)
    with of_any_size(), Additions() as additions:
        derived(example.call, tensors, range(len(tensors)))
    assert not additions.found
