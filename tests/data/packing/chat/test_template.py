"""Chat templates: how they are named, and what reaches them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onward.data.packing.options import ChatOptions
from tests.data.packing.chat.packed_chats import MARKED, TURNS, packed, write_tokenizer


def test_the_ways_to_name_a_template(tmp_path: Path) -> None:
    """A file that is named, before chat_template.jinja, before tokenizer_config.json, also where it has several."""
    folder = write_tokenizer(tmp_path / "tokenizer", MARKED["questions in brackets"])
    row, length = [{"messages": TURNS[1:3]}], 64

    def text(**options: Any) -> str:
        sample = packed(tmp_path, row, ChatOptions(tokenizer=str(folder), sequence_length=length, **options))[0]
        return bytes(int(one) for one in sample["input_ids"] if one < 256).decode()

    assert text().startswith("[INST] Hello")
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "A{{ messages[1].content }}"}]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": several}))
    assert text(loss_on="all") == "A  I am é😀. "
    (folder / "chat_template.jinja").write_text(MARKED["ChatML"])
    assert text().startswith("user\nHello")
    (tmp_path / "own.jinja").write_text("B{{ messages[1].content }}")
    assert text(loss_on="all", chat_template=str(tmp_path / "own.jinja")) == "B  I am é😀. "


def test_tools_and_other_roles_reach_the_template(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}|{{ m.role }}:{{ m.content }}{% endfor %}"
    )
    rows = [
        {"messages": [{"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
         "tools": [{"name": "f"}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    ]  # fmt: skip
    options = ChatOptions(chat_template=str(tmp_path / "t.jinja"), loss_on="all", sequence_length=40)
    texts = []
    for row in rows:
        (sample,) = packed(tmp_path, [{"tools": [], **row}], options)
        texts.append(bytes(int(one) for one in sample["input_ids"] if one < 256).decode())
    assert texts == ['[{"name": "f"}]|tool:ab', "[]|user:x|assistant:y"]
