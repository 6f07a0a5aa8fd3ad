"""What was chosen, by field and by section."""

from __future__ import annotations

from onward.proposal.proposal import Choice
from tests.proposal.facts import proposal


def test_what_is_chosen() -> None:
    made = proposal(Choice("training.batch_size", 8), Choice("loss.type", "l1"), Choice("training.seed", 3))
    assert made.to_mapping() == {"training": {"batch_size": 8, "seed": 3}, "loss": {"type": "l1"}}
    assert made.value("loss.type") == "l1"
    assert made.value("loss.label") is None
