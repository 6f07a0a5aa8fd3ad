"""Marks of processes: their text returns, other texts are none, and a number that was given away is not alive."""

from __future__ import annotations

import dataclasses

import pytest

from onward.exclusive.process_mark import ProcessMark


def test_this_process_is_alive() -> None:
    own = ProcessMark.own()
    assert ProcessMark.parse(str(own)) == own
    assert own.is_alive is True
    assert dataclasses.replace(own, started=own.started + 1).is_alive is False
    assert dataclasses.replace(own, machine="elsewhere").is_alive is None


@pytest.mark.parametrize(
    "text",
    ["", "a-1", "a-1-2-3", "a--2", "a-1-", "a b-1-2", "a-\u00b2-2", "a-1-\u0663", f"a-{10**12}-1", "../a-1-2"],
)
def test_other_texts(text: str) -> None:
    assert ProcessMark.parse(text) is None
