"""Data of a run: opened once, shared out between ranks where they are trained on, and closed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onward.engine.inputs import run_data
from onward.engine.inputs.run_data import RunData, feature_names
from onward.errors import DataError
from tests.data.test_numbering import packed

DATA = {"x": np.zeros((4, 3), np.float32)}


def parameters(test_data: str = "partitioned") -> Any:
    data = SimpleNamespace(shuffle_data=True, test_data=test_data, last_batch="keep", input_name_map={"x": "image"})
    return SimpleNamespace(data=data, training=SimpleNamespace(seed=5), limits=None)


def graph(*labels: str) -> Any:
    inputs = [SimpleNamespace(name="x", shape=(1, 2)), SimpleNamespace(name="y", shape=None)]
    names = SimpleNamespace(labels=labels) if labels else None
    return SimpleNamespace(loss_names=names, model=SimpleNamespace(graph=SimpleNamespace(inputs=inputs)))


MESH: Any = SimpleNamespace(reader=1, topology=SimpleNamespace(reader_count=2))


class Source:
    messages = ("a column is left out",)

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def opened(data: Any, names: Any, reading: Any) -> Any:
        found.append(reading)
        return data if isinstance(data, Source) else Source()

    monkeypatch.setattr(run_data, "open_data", opened)
    return found


def test_the_same_data_are_opened_once(asked: list[Any]) -> None:
    told: list[str] = []
    data = RunData(told.append)
    first = data.open(DATA, False, parameters(), MESH, graph())
    assert data.open(DATA, True, parameters(), MESH, graph()) is first
    assert data.open(dict(DATA), False, parameters(), MESH, graph()) is not first
    assert told == ["a column is left out"] * 2
    data.close()
    assert first.is_closed
    assert data.open(DATA, False, parameters(), MESH, graph()) is not first


def test_sources_of_the_caller_stay_open(asked: list[Any]) -> None:
    told: list[str] = []
    data, own = RunData(told.append), Source()
    assert data.open(own, False, parameters(), MESH, graph()) is own
    data.close()
    assert not own.is_closed
    assert not told


def test_test_data_are_in_order_and_whole_where_asked(asked: list[Any]) -> None:
    for is_test, settings in ((False, "complete"), (True, "partitioned"), (True, "complete")):
        RunData(print).open(DATA, is_test, parameters(settings), MESH, graph())
    found = [(one.shuffle, one.rank, one.size) for one in asked]
    assert found == [(True, 1, 2), (False, 1, 2), (False, 0, 1)]
    assert len({replace(one, shuffle=False, rank=0, size=1) for one in asked}) == 1


def test_labels_are_no_features() -> None:
    names = feature_names(parameters(), graph("y"))
    assert (names.inputs, names.labels) == ({"x": 2}, ("y",))
    names = feature_names(parameters(), graph())
    assert (names.inputs, names.labels) == ({"x": 2, "y": None}, ("label",))


def test_data_that_number_classes_otherwise_are_refused(asked: list[Any]) -> None:
    def source(folder: str, *classes: str) -> Source:
        found = Source()
        found.numbering = packed(folder, classes=list(classes))
        return found

    told: list[str] = []
    data = RunData(told.append)
    data.open(source("train", "a", "b"), False, parameters(), MESH, graph())
    data.open(source("test", "a"), True, parameters(), MESH, graph())
    data.open(Source(), True, parameters(), MESH, graph())
    assert not told
    more = source("more", "a", "b", "c")
    for _ in range(2):
        data.open(more, True, parameters(), MESH, graph())
    assert [text.partition(" have")[0] for text in told] == ["the test data ('more')"]
    with pytest.raises(DataError, match="classes have other numbers in 'other' than in 'train'"):
        data.open(source("other", "b"), True, parameters(), MESH, graph())
