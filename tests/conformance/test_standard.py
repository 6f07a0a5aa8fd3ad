"""Every backend test of the onnx package: outputs as the standard expects them, in shape, type and value."""

from __future__ import annotations

import pytest

from tests.conformance.cases import KINDS, Case, load_cases
from tests.conformance.checking import check
from tests.conformance.exceptions import EXCEPTIONS, reason_for

# One test per group of cases: two thousand single tests would cost more in bookkeeping than in computing.
GROUPS = 16


def cases_of(kind: str, group: int) -> list[Case]:
    cases = [case for case in load_cases(kind) if reason_for(case.name) is None]
    return cases[group::GROUPS] if kind == "node" else cases


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "group"), [("node", group) for group in range(GROUPS)] + [(k, 0) for k in KINDS if k != "node"]
)
def test_outputs_are_the_standards(kind: str, group: int) -> None:
    failed = []
    for case in cases_of(kind, group):
        try:
            check(case)
        except Exception as error:
            failed.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, f"{len(failed)} cases failed:\n" + "\n".join(failed)


@pytest.mark.filterwarnings("ignore")
def test_every_exception_is_one() -> None:
    """A case that has come to pass must leave the list; a pattern that matches nothing must too."""
    seen: dict[str, int] = dict.fromkeys(EXCEPTIONS, 0)
    passing = []
    for kind in KINDS:
        for case in load_cases(kind):
            reason = reason_for(case.name)
            if reason is None:
                continue
            for pattern in EXCEPTIONS:
                seen[pattern] += reason_for(case.name) is not None and EXCEPTIONS[pattern] == reason
            if "random generator" in reason or "neighboring" in reason:
                continue  # passes now and then: by chance, or with another vector width
            try:
                check(case)
            except Exception:
                continue
            passing.append(case.name)
    assert not passing, f"exceptions that pass: {passing}"
    assert all(seen.values()), f"patterns without a case: {[p for p, count in seen.items() if not count]}"
