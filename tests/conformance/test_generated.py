"""torch's compiler generates CPU code, forward and backward, for every kind of the standard's cases.

Nothing is built or run, which is what takes its time. A case that it refuses would run uncompiled, with a note that is
easily overlooked.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from tests.conformance.test_compiled import REFUSED, Compilable, compute, load

GRAPH, PARTS = 20, 3


class Generated(Exception):
    """All code of a graph has been generated, and is called."""


def _generate(graph: GraphLowering) -> Any:
    if graph.cpp_wrapper:
        graph.codegen_with_cpp_wrapper()
    else:
        graph.codegen()
    return SimpleNamespace(call=_called, __file__="", key="", runner=None)


def _called(*arguments: Any) -> Any:
    raise Generated


def refused(group: Sequence[Compilable]) -> dict[str, str]:
    """Names and torch's reasons of the cases of a graph that cannot be compiled."""
    try:
        compute(group, is_compiled=True)
    except Generated:
        return {}
    except Exception as error:
        if len(group) == 1:
            return {group[0].name: str(error).strip()}
        half = len(group) // 2
        return refused(group[:half]) | refused(group[half:])
    raise AssertionError(f"{[one.name for one in group]} were not compiled")


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_is_compiled_or_refused_for_a_reason(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphLowering, "_compile_to_module", _generate)
    cases = load()[part::PARTS]
    found = dict[str, str]()
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        for at in range(0, len(cases), GRAPH):
            found |= refused(cases[at : at + GRAPH])
    assert found.keys() == {one.name for one in cases} & REFUSED.keys(), found
