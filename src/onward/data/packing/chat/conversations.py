"""Rows of chat, instruction and preference data -> conversations: turns of a role and a text each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.data.packing.options import (
    ChatOptions,
    ConversationOptions,
    InstructOptions,
    PreferenceOptions,
    TableOptions,
)
from onward.data.packing.rows import read_blocks
from onward.errors import DataError

Turn = Mapping[str, Any]

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles as some data sets call them -> as templates do."""


_FIELDS = {
    "chat": ("messages",),
    "instruct": ("instruction", "output"),
    "preference": ("chosen", "rejected"),
    "text": ("text",),
}
"""Kind -> the fields by whose names its rows are recognized."""


@dataclass(frozen=True)
class Conversation:
    """Turns, of a role and a content each.

    Attributes:
        where: the row it is from, for messages.
        turns: in order.
        tools: that the template describes; None: there are none.
    """

    where: str
    turns: tuple[Turn, ...]
    tools: Any = None


def read_conversations(
    paths: Sequence[Path], options: ConversationOptions
) -> Iterator[tuple[int, tuple[Conversation, ...]]]:
    """For each row how many bytes were read since the last one, and its conversations: one; of preferences two.

    Raises:
        DataError: a file is broken, or a row lacks what the kind needs.
    """
    make = _KINDS[type(options)]
    for path in paths:
        for block in read_blocks(path, TableOptions()):
            read_bytes = block.read_bytes
            for row in range(block.count):
                values = {name: column[row] for name, column in block.columns.items() if column[row] is not None}
                where = f"{str(block.path)!r}, {block.where(row)}"
                yield (
                    read_bytes,
                    tuple(Conversation(where, turns, values.get("tools")) for turns in make(values, where, options)),
                )
                read_bytes = 0


def _chat(row: Mapping[str, Any], where: str, options: Any) -> tuple[tuple[Turn, ...], ...]:
    name = options.messages_field
    if name not in row and options.messages_field == "messages" and "conversations" in row:
        name = "conversations"
    return (_turns(_need(row, name, where, "--messages-field"), where, name),)


def _instruct(row: Mapping[str, Any], where: str, options: Any) -> tuple[tuple[Turn, ...], ...]:
    task = _text(_need(row, options.prompt_field, where, "--prompt-field"), where, options.prompt_field)
    more = _text(row.get(options.input_field, ""), where, options.input_field)
    answer = _text(_need(row, options.answer_field, where, "--answer-field"), where, options.answer_field)
    system = _text(row.get("system", ""), where, "system")
    asked = f"{task}\n\n{more}" if more.strip() else task
    first = ({"role": "system", "content": system},) if system else ()
    return ((*first, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}),)


def _preference(row: Mapping[str, Any], where: str, options: Any) -> tuple[tuple[Turn, ...], ...]:
    prompt = row.get("prompt", ())
    before = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else _turns(prompt, where, "prompt")
    answers = []
    for name in ("chosen", "rejected"):
        given = _need(row, name, where, "")
        turns = ({"role": "assistant", "content": given},) if isinstance(given, str) else _turns(given, where, name)
        answers.append((*before, *turns))
        if not before and len(turns) < 2:
            raise DataError(
                f"{where}: there is no 'prompt', and {name!r} has {len(turns)} turn. Add the prompt, or write the "
                "entire conversation in 'chosen' and in 'rejected'."
            )
    return tuple(answers)


def _need(row: Mapping[str, Any], name: str, where: str, option: str) -> Any:
    if name in row:
        return row[name]
    others = [kind for kind, fields in _FIELDS.items() if name not in fields and row.keys() >= set(fields)]
    if others:
        name_it = f" Pass --kind {others[0]}, which reads {' and '.join(map(repr, _FIELDS[others[0]]))}."
    elif option:
        name_it = f" Name another with {option}."
    else:
        name_it = " Add it, or pack other data as --kind chat or instruct."
    raise DataError(f"{where}: there is no {name!r}; it has {', '.join(map(repr, row)) or 'nothing'}.{name_it}")


def _turns(value: Any, where: str, name: str) -> tuple[Turn, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(turn, Mapping) for turn in value):
        raise DataError(
            f"{where}: {name!r} is {_shortly(value)}; expected a list of turns, each with 'role' and 'content'."
        )
    return tuple(_turn(turn, where, name) for turn in value)


def _turn(turn: Turn, where: str, name: str) -> Turn:
    if "from" in turn and "value" in turn:  # as ShareGPT has it
        turn = {"role": turn["from"], "content": turn["value"]}
    role, content = turn.get("role"), turn.get("content", "")
    if not isinstance(role, str):
        raise DataError(f"{where}: a turn of {name!r} is {_shortly(turn)}; expected 'role' and 'content'.")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise DataError(f"{where}: a turn of {name!r} holds {_shortly(content)}; only text can be packed.")
        content = "".join(map(str, parts))
    return {**turn, "role": _ROLES.get(role, role), "content": _text(content, where, name)}


def _text(value: Any, where: str, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: {name!r} holds {_shortly(value)}; expected text.")
    return value


def _shortly(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_KINDS: Mapping[type, Callable[[Mapping[str, Any], str, Any], tuple[tuple[Turn, ...], ...]]] = {
    ChatOptions: _chat,
    InstructOptions: _instruct,
    PreferenceOptions: _preference,
}
