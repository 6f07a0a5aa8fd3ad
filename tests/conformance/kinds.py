"""The standard's cases by kind, for tests that take a few of each."""

from __future__ import annotations

from collections.abc import Iterator

from tests.conformance.cases import Case, load_cases
from tests.conformance.exceptions import reason_for


def cases_by_kind() -> Iterator[tuple[str, Case]]:
    """Those of operators that are to pass, but expanded ones; a kind is an operator and the names of its attributes."""
    for case in load_cases("node"):
        if reason_for(case.name) is None and "_expanded" not in case.name:
            yield (
                str([(node.op_type, [one.name for one in node.attribute]) for node in case.model.graph.node[:1]]),
                case,
            )
