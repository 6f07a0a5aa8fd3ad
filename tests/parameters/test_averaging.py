"""Notes on rounds that are too short for the average of their weights."""

from __future__ import annotations

from typing import Any

import pytest

from onward.parameters import Averaging
from onward.parameters.averaging import notes_on_averaging


@pytest.mark.parametrize(
    ("asked", "count", "updates", "words"),
    [
        (
            {"kind": "ema", "decay": 0.99},
            0,
            (0, 46),
            "averaging: an average with averaging.decay 0.99 reaches back about 100 updates, and 46 are averaged by "
            "the end of the round: 64% of it is still the first weights that were averaged. Set averaging.decay to "
            "0.9 or less, or train longer.",
        ),
        ({"kind": "ema", "decay": 0.9}, 0, (0, 46), None),
        ({"kind": "ema", "decay": 0.99, "every_updates": 5}, 0, (0, 400), "about 500 updates, and 400 are averaged"),
        ({"kind": "ema", "decay": 0.99, "start_update": 250}, 0, (0, 300), "and 50 are averaged"),
        ({"kind": "ema"}, 0, (0, 1000), "Set averaging.decay to 0.995 or less"),
        ({"kind": "ema", "decay": 0.99}, 300, (300, 310), None),
        ({"kind": "ema", "decay": 0.99}, 0, (300, 310), "and 10 are averaged"),
        ({"kind": "ema", "decay": 0.0}, 0, (0, 2), None),
        ({"kind": "ema"}, 0, (46, 46), None),
        ({"kind": "swa"}, 0, (0, 2), None),
        (
            {"kind": "swa", "start_update": 1500, "every_updates": 50},
            0,
            (0, 1000),
            "averaging: the first average is due at update 1,550, and the round ends with update 1,000: evaluations "
            "and the trained model are of the last weights. Set averaging.start_update and averaging.every_updates so "
            "that their sum is 1,000 or less.",
        ),
        ({}, 0, (0, 5), None),
    ],
)
def test_a_round_shorter_than_its_average_is_reported_with_numbers(
    asked: dict[str, Any], count: int, updates: tuple[int, int], words: str | None
) -> None:
    notes = notes_on_averaging(Averaging(**asked), count, *updates)
    assert (words in notes[0]) if words else notes == []
