"""Conversations in every form: questions and answers, preferences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.data.packing.options import ChatOptions, InstructOptions, PreferenceOptions
from tests.data.packing.chat.packed_chats import TURNS, packed


def test_instructions_are_questions_and_answers(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Count."},
        {"instruction": "Hi", "input": "", "output": "Ho"},
    ]
    first, second = packed(tmp_path, rows, InstructOptions(sequence_length=80))
    turns = [
        [{"role": "system", "content": "Count."}, {"role": "user", "content": "Add.\n\n1, 2"},
         {"role": "assistant", "content": "3"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
    ]  # fmt: skip
    for sample, messages in zip((first, second), turns, strict=True):
        (as_chat,) = packed(tmp_path, [{"messages": messages}], ChatOptions(sequence_length=80))
        for name, values in as_chat.items():
            np.testing.assert_array_equal(sample[name], values)
    renamed = InstructOptions(sequence_length=80, prompt_field="question", answer_field="answer")
    (other,) = packed(tmp_path, [{"question": "Hi", "answer": "Ho"}], renamed)
    np.testing.assert_array_equal(other["input_ids"], second["input_ids"])


@pytest.mark.parametrize("form", ["texts", "turns", "conversations"])
def test_preferences_are_two_sequences(form: str, tmp_path: Path) -> None:
    question, good, bad = (
        TURNS[1],
        {"role": "assistant", "content": "Good"},
        {"role": "assistant", "content": "Bad one"},
    )
    row = {
        "texts": {"prompt": question["content"], "chosen": "Good", "rejected": "Bad one"},
        "turns": {"prompt": [question], "chosen": [good], "rejected": [bad]},
        "conversations": {"chosen": [question, good], "rejected": [question, bad]},
    }[form]
    (sample,) = packed(tmp_path, [row], PreferenceOptions(sequence_length=48, position_ids=True))
    for index, answer in enumerate((good, bad)):
        options = ChatOptions(sequence_length=48, position_ids=True)
        (alone,) = packed(tmp_path, [{"messages": [question, answer]}], options)
        assert sample.keys() == alone.keys()
        for name, values in alone.items():
            np.testing.assert_array_equal(sample[name][index], values)
