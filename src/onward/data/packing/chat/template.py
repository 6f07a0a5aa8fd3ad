"""A model's chat template, from the files that come with it, and which characters of a conversation are answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.data.packing.chat.conversations import Conversation
from onward.data.packing.chat.sandbox import SandboxedTemplate, TemplateRefused, TemplateStopped
from onward.errors import DataError
from onward.parameters.limits import Limits
from onward.untrusted_files import parse_json, read_text

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of tokenizers that are made here: ChatML, as many models have it."""

LARGEST_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, and from which to which of its characters answers are."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        where: it is from, for messages.
        template: compiled.
        values: tokens by the names that templates know, as `bos_token`.
        ends: special tokens, after one of which white space no longer belongs to an answer.
    """

    where: str
    template: SandboxedTemplate
    values: Mapping[str, str]
    ends: tuple[str, ...]

    def write(self, conversation: Conversation) -> str:
        """The text of a conversation. Raises as `render`."""
        return self._text(conversation, len(conversation.turns))[0]

    def render(self, conversation: Conversation) -> Rendered:
        """The text of a conversation.

        Where the template does not mark answers, each is what its turn adds to the text before it, the beginning of
        the turn excepted, which the template adds to ask for an answer.

        Raises:
            DataError: the template refuses the conversation, fails, or its answers cannot be told from the rest.
        """
        text, marked = self._text(conversation, len(conversation.turns))
        if self.template.marks_answers:
            return Rendered(text, tuple(marked))
        spans = []
        for number, turn in enumerate(conversation.turns):
            if turn["role"] == "assistant":
                asked, _ = self._text(conversation, number, asks=True)
                answered, _ = self._text(conversation, number + 1)
                self._check_prefixes(conversation, number, text, asked, answered)
                spans.append((len(asked), len(asked) + len(self._without_space(answered[len(asked) :]))))
        return Rendered(text, tuple(spans))

    def _without_space(self, answer: str) -> str:
        """An answer without the white space after the token that ends it, which no model writes."""
        stripped = answer.rstrip()
        return stripped if stripped.endswith(self.ends) else answer

    def _check_prefixes(self, conversation: Conversation, number: int, text: str, asked: str, answered: str) -> None:
        if answered.startswith(asked) and text.startswith(answered):
            return
        raise DataError(
            f"{conversation.where}: which tokens are the answer of turn {number + 1} cannot be told, because the "
            f"chat template of {self.where} writes earlier turns differently when more follow. Put the answers between "
            "{% generation %} and {% endgeneration %} in a copy of the template and pass it with --chat-template, or "
            "pass --loss-on all."
        )

    def _text(self, conversation: Conversation, turns: int, asks: bool = False) -> tuple[str, list[tuple[int, int]]]:
        values: dict[str, Any] = {**self.values, "messages": list(conversation.turns[:turns])}
        if conversation.tools is not None:
            values["tools"] = conversation.tools
        values["add_generation_prompt"] = asks
        try:
            return self.template.render(values)
        except TemplateRefused as error:
            raise DataError(f"{conversation.where}: the chat template of {self.where} refuses it: {error}") from error
        except TemplateStopped as error:
            raise DataError(f"{conversation.where}: the chat template of {self.where} stopped: {error}") from error


def compile_template(
    source: str, where: str, values: Mapping[str, str], ends: Sequence[str], limits: Limits
) -> ChatTemplate:
    """A chat template, ready to render.

    Raises:
        DataError: it is malformed, or uses what templates do not have here.
    """
    try:
        template = SandboxedTemplate.compile(source, limits)
    except TemplateStopped as error:
        raise DataError(f"the chat template of {where} cannot be used: {error}") from error
    return ChatTemplate(where, template, values, tuple(end for end in ends if end))


def read_template(asked: str, folder: Path | None) -> tuple[str, str]:
    """The text of a chat template and where it is from.

    Args:
        asked: a file of it; empty: that of the tokenizer's folder.
        folder: of the tokenizer; None: the tokenizer is made here, and so is the template.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    if asked:
        return _read(Path(asked)), repr(asked)
    if folder is None:
        return CHATML, "onward"
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file), repr(str(file))
    config = folder / "tokenizer_config.json"
    found = read_settings(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise DataError(
            f"{str(folder)!r} has no chat template: neither chat_template.jinja, nor the entry chat_template of "
            f"tokenizer_config.json. Pass a file with --chat-template."
        )
    return found, repr(str(config))


def read_settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` of a folder, empty where there is none.

    Raises:
        DataError: it cannot be read.
    """
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        found = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}.") from error
    return found if isinstance(found, dict) else {}


def tokens_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like of a `tokenizer_config.json`, which templates name."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _read(file: Path) -> str:
    try:
        return read_text(file, LARGEST_TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"chat template {str(file)!r} cannot be read: {error}.") from error
