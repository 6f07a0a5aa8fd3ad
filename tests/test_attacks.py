"""The table of attacks: every row is held, two seconds of mutations each; `python -m benchmarks.attack` runs longer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from benchmarks.attack import rows
from benchmarks.attack_mutation import explore
from benchmarks.attack_row import Row

SECONDS = 2.0


@pytest.fixture(autouse=True)
def _quiet():
    """onnx-ir warns about each broken model; the errors are what counts here."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


ALSO_AMONG_INVARIANTS = ("SIGKILL to launcher, rank or all", "a rank crashes, hangs or is stopped for good")
"""tests/invariants kill in every layout; these rows take a minute."""


def _tried() -> list[Any]:
    marks = dict.fromkeys(ALSO_AMONG_INVARIANTS, pytest.mark.slow)
    assert marks.keys() <= {row.name for row in rows()}
    return [pytest.param(row, marks=marks.get(row.name, ()), id=f"{row.area} {row.name}") for row in rows()]


@pytest.mark.parametrize("row", _tried())
def test_every_row_is_held(row: Row):
    result = row.run(SECONDS, 0)
    assert result.tried > 0
    assert result.lost == ()


def test_an_exception_that_is_no_error_of_the_user_is_reported():
    """A reader with a bug, which mutations find."""
    from onward.untrusted_files import parse_json

    def target(data: bytes) -> None:
        try:
            value = parse_json(data)
        except ValueError:
            return
        if isinstance(value, list) and len(value) > 1:
            raise KeyError("found")

    tries = (explore(target, [b"[1]", b"1,2"], 2, seed) for seed in range(30))  # a busy machine mutates little in 2 s
    result = next((one for one in tries if one.lost), None)
    assert result is not None
    assert result.tried > result.held
    assert "KeyError" in result.lost[0]
