"""Memory that ran out: one message with what to do, and smaller micro-batches where the run asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onward.engine.faults.out_of_memory import (
    explaining_out_of_memory,
    largest_batch,
    smaller_batches,
    with_smaller_batch,
)
from onward.errors import OutOfMemoryError
from onward.parallel.launch.restarting import LARGEST_BATCH
from onward.parameters import Parameters


def asked(**training: Any) -> Parameters:
    return Parameters.from_mapping(
        {
            "paths": {"model_path": "m.onnx"}, "loss": {"type": "output", "prediction": "y"},
            "training": {"batch_size": 12, "num_train_steps": 4, **training}, "learning_rate": {"initial_lr": 1.0},
        }
    )  # fmt: skip


STATE: Any = SimpleNamespace(counters=SimpleNamespace(step=6))


def steps(error: BaseException) -> Iterator[Any]:
    yield 1
    raise error


def test_the_step_and_the_batch_are_named() -> None:
    found = []
    with pytest.raises(OutOfMemoryError) as caught:
        found.extend(explaining_out_of_memory(steps(MemoryError("too much\nmore")), asked(), STATE))
    assert str(caught.value).startswith(
        "memory ran out in step 7, with micro-batches of 12 samples: too much\nSet training.batch_size to a smaller"
    )
    assert caught.value.batch_size == 12
    assert isinstance(caught.value.__cause__, MemoryError)


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError):
        list(explaining_out_of_memory(steps(KeyError("x")), asked(), STATE))


def test_the_largest_that_is_known_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LARGEST_BATCH, raising=False)
    assert largest_batch({}) is None
    assert largest_batch({"largest_batch": 4}) == 4
    monkeypatch.setenv(LARGEST_BATCH, "3")
    assert [largest_batch({}), largest_batch({"largest_batch": 4}), largest_batch({"largest_batch": 2})] == [3, 3, 2]


@pytest.mark.parametrize(
    ("halves", "largest", "size"), [(True, 5, 4), (True, 12, 12), (True, None, 12), (True, 0, 1), (False, 5, 12)]
)
def test_the_same_samples_in_smaller_micro_batches(halves: bool, largest: int | None, size: int) -> None:
    found = with_smaller_batch(asked(halve_batch_on_out_of_memory=halves), largest).training
    assert found.batch_size == size
    assert found.batch_size * found.gradient_accumulation_steps == 12


def test_what_is_tried_next() -> None:
    assert list(smaller_batches(asked(), None)) == [1, 2, 3, 4, 6]
    assert list(smaller_batches(asked(), 4)) == [1, 2]
    assert list(smaller_batches(asked(), 1)) == []
