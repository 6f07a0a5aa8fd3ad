"""Conversations as samples: the same tokens and the same answers as transformers gives, and where each of them goes."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.data.packing import PackOptions, pack
from onward.data.packing.options import ChatOptions, ConversationOptions, InstructOptions, PreferenceOptions
from onward.data.shard_format import read_samples
from onward.errors import DataError, ParametersError
from tests.data.packing.chat.packed_chats import TURNS, details, packed, write_rows, write_tokenizer

pytest.importorskip("tokenizers")


def test_what_is_cut_is_told(tmp_path: Path) -> None:
    """12 tokens of question, 6 of answer: no label is lost while all but the last token fit."""
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 6}]}]
    (tmp_path / "t.jinja").write_text("{{ 'q' * 12 }}{% generation %}{{ messages[1].content }}{% endgeneration %}")
    template = {"chat_template": str(tmp_path / "t.jinja")}
    (sample,) = packed(tmp_path, rows, ChatOptions(sequence_length=17, **template))
    assert (sample["labels"] != -100).sum() == 6
    assert "cut_conversations" not in details(tmp_path)
    (sample,) = packed(tmp_path, rows, ChatOptions(sequence_length=15, **template))
    assert (sample["labels"] != -100).sum() == 4
    assert {"cut_conversations": 1, "tokens_cut": 2, "tokens_with_loss": 4}.items() <= details(tmp_path).items()
    rows = [*rows, {"messages": [*rows[0]["messages"][:1], {"role": "assistant", "content": "b"}]}]
    (sample,) = packed(tmp_path, rows, ChatOptions(sequence_length=15, too_long="skip", **template))
    assert sample["labels"][11] == ord("b")
    assert details(tmp_path)["skipped_conversations"] == 1
    (sample,) = packed(tmp_path, [rows[0], rows[0]], ChatOptions(sequence_length=12, **template))[:1]
    packed(tmp_path, rows, ChatOptions(sequence_length=11, **template, loss_on="all"))
    short = r"gave no samples; nothing was packed: 2 without an answer .* within sequence_length 11 tokens. Raise --seq"
    with pytest.raises(DataError, match=short):
        packed(tmp_path, rows, ChatOptions(sequence_length=11, **template))
    with pytest.raises(DataError, match=r"packed: 2 of more tokens than sequence_length 9, left out \(--too-long sk"):
        packed(tmp_path, rows, ChatOptions(sequence_length=9, too_long="skip", **template))
    unanswered = [{"messages": rows[0]["messages"][:1]}]
    with pytest.raises(DataError, match=r"packed: 1 without an answer .* within .* Add turns of the assistant\."):
        packed(tmp_path, unanswered, ChatOptions())
    with pytest.raises(DataError, match=r"packed, since there are no conversations\. Pass another file\."):
        packed(tmp_path, [], ChatOptions())
    with pytest.raises(DataError, match=r"line 1: the conversation has 18 tokens, more than sequence_length 15. Raise"):
        packed(tmp_path, rows, ChatOptions(sequence_length=15, too_long="error", **template))


def many(count: int, seed: int = 0) -> list[dict[str, Any]]:
    sizes = np.random.default_rng(seed).integers(1, 20, (count, 2))
    return [
        {"messages": [{"role": "user", "content": "q" * a}, {"role": "assistant", "content": "a" * b}]}
        for a, b in sizes.tolist()
    ]


@pytest.mark.parametrize("mask_type", ["bool", "float", "segments"])
def test_sequences_are_filled_with_conversations_that_stay_apart(mask_type: Any, tmp_path: Path) -> None:
    """Each conversation is in one sequence, with the labels it has alone, positions from 0, and its own past to see."""
    length, rows = 150, many(40)
    alone = packed(tmp_path, rows, ChatOptions(sequence_length=length))
    expected = sorted((one["input_ids"][:n].tolist(), one["labels"][:n].tolist())
                      for one in alone for n in [int(one["attention_mask"].sum())])  # fmt: skip
    share = details(tmp_path)["padding_percent"]
    options = ChatOptions(sequence_length=length, several_per_sequence=True, mask_type=mask_type)
    samples = packed(tmp_path, rows, options)
    assert len(samples) < len(alone) / 2
    assert details(tmp_path)["padding_percent"] < share / 2
    found = []
    for sample in samples:
        starts = [*np.flatnonzero(sample["position_ids"] == 0).tolist(), length]
        segments = np.zeros(length, np.int64)
        for number, (first, last) in enumerate(itertools.pairwise(starts)):
            np.testing.assert_array_equal(sample["position_ids"][first:last], np.arange(last - first))
            if (sample["labels"][first:last] != -100).any():
                segments[first:last] = number + 1
                found.append((sample["input_ids"][first:last].tolist(), sample["labels"][first:last].tolist()))
        sees = (segments[:, None] == segments) & np.tri(length, dtype=bool)
        if mask_type == "segments":
            np.testing.assert_array_equal(sample["segment_ids"], segments)
        elif mask_type == "bool":
            np.testing.assert_array_equal(sample["attention_mask"], sees[None])
        else:
            np.testing.assert_array_equal(sample["attention_mask"] == 0, sees[None])
            assert sample["attention_mask"].min() == np.finfo(np.float32).min
    assert sorted(found) == expected


def test_splits_are_by_conversation(tmp_path: Path) -> None:
    rows = many(30)
    options = ChatOptions(sequence_length=150, several_per_sequence=True)
    source = write_rows(tmp_path / "rows.jsonl", rows)
    summary = pack(source, tmp_path / "out", PackOptions(source=options, test_fraction=0.3, progress=False))
    labels = {
        folder.name: sum(int((s["labels"] != -100).sum()) for p in folder.glob("*.pb") for s in read_samples(p))
        for folder in summary.folders
    }
    assert labels["train"] > labels["test"] > 0
    assert sum(labels.values()) == sum(len(row["messages"][1]["content"]) + 1 for row in rows)


def test_a_bpe_is_trained_on_the_conversations(tmp_path: Path) -> None:
    rows = many(40)
    options = ChatOptions(tokenizer="bpe", vocabulary_size=270, sequence_length=60)
    samples = packed(tmp_path, rows, options)
    assert details(tmp_path)["vocabulary_size"] == 270
    assert details(tmp_path)["tokens"] < sum(len(str(row)) for row in rows) / 4
    assert all((sample["labels"] != -100).any() for sample in samples)


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (
            [{"talk": "x"}],
            ChatOptions(),
            r"line 1: there is no 'messages'; it has 'talk'. Name another with --messages-f",
        ),
        ([{"text": "x"}], ChatOptions(), r"it has 'text'\. Pass --kind text, which reads 'text'\."),
        (
            [{"instruction": "x", "input": "", "output": "y"}],
            ChatOptions(),
            r"it has 'instruction', 'input', 'output'\. Pass --kind instruct, which reads 'instruction' and 'output'\.",
        ),
        (
            [{"messages": []}],
            InstructOptions(),
            r"there is no 'instruction'; it has 'messages'\. Pass --kind chat, which reads 'messages'\.",
        ),
        ([{"messages": "x"}], ChatOptions(), r"'messages' is 'x'; expected a list of turns, each with 'role' and 'con"),
        (
            [{"messages": [{"content": "x"}]}],
            ChatOptions(),
            r"a turn of 'messages' is \{'content': 'x'\}; expected 'role'",
        ),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}],
            ChatOptions(),
            r"holds \[\{'type': 'image', 'url': 'x'\}\]; only text can be packed",
        ),
        (
            [{"instruction": "x"}],
            InstructOptions(),
            r"there is no 'output'; it has 'instruction'. Name another with --ans",
        ),
        ([{"instruction": 1, "output": "x"}], InstructOptions(), r"'instruction' holds 1; expected text"),
        (
            [{"prompt": "x", "chosen": "y"}],
            PreferenceOptions(),
            r"there is no 'rejected'; it has 'prompt', 'chosen'. Add",
        ),
        (
            [{"chosen": "y", "rejected": "z"}],
            PreferenceOptions(),
            r"there is no 'prompt', and 'chosen' has 1 turn. Add",
        ),
        (
            [{"messages": TURNS}],
            ChatOptions(chat_template=THINKING, sequence_length=500),
            r"answer of turn 3 cannot be told, because .* writes earlier turns differently.*\{% generation %\}.*--loss",
        ),
        (
            [{"messages": TURNS}],
            ChatOptions(chat_template="{{ raise_exception('no system') }}"),
            r"the chat template of '.*own.jinja' refuses it: no system",
        ),
        ([{"messages": TURNS}], ChatOptions(chat_template="{% if %}"), r"own.jinja' cannot be used: line 1: Expected"),
    ],
)
def test_what_is_refused(rows: Any, options: ConversationOptions, words: str, tmp_path: Path) -> None:
    if options.chat_template:
        turns = [{**one, "content": f"a</think>{one['content']}"} for one in TURNS]
        rows = [{"messages": turns}]
        (tmp_path / "own.jinja").write_text(options.chat_template)
        options = dataclasses.replace(options, chat_template=str(tmp_path / "own.jinja"))
    with pytest.raises(DataError, match=words):
        packed(tmp_path, rows, options)


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match="sequence_length is 1; expected at least 2"):
        ChatOptions(sequence_length=1)
    with pytest.raises(ParametersError, match="mask_type is 'float', which has no effect without several_per_sequence"):
        InstructOptions(mask_type="float")
    folder = write_tokenizer(tmp_path / "tokenizer", "")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"has no chat template: neither chat_template.jinja, .* Pass a file with --chat"
    ):
        packed(tmp_path, [{"messages": TURNS}], ChatOptions(tokenizer=str(folder)))
