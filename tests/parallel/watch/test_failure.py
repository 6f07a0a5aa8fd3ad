"""Failures as ranks write them into the store."""

from __future__ import annotations

import sys

import pytest

from onward.parallel.watch.heartbeats import Failure

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="several processes need Linux")


def test_a_failure_survives_the_store() -> None:
    failure = Failure(3, "the shard lies.", 2)
    assert Failure.read(failure.written().encode()) == failure
