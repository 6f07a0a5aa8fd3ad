"""Conversations as token ids, each with whether it is of an answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.chat.conversations import Conversation, read_conversations
from onward.data.packing.chat.template import ChatTemplate, compile_template, read_settings, read_template, tokens_of
from onward.data.packing.options import ConversationOptions
from onward.data.packing.source import require
from onward.data.packing.tokenizer_files import find_padding, find_tokenizer, load_tokenizer
from onward.data.packing.tokenizing import SPECIALS, make_byte_tokenizer, train_bpe
from onward.parameters.limits import Limits


@dataclass(frozen=True)
class Tokens:
    """A conversation as token ids, int64, and which of them are of answers."""

    ids: np.ndarray
    are_answers: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ChatTokenizer:
    """How conversations become tokens.

    Attributes:
        tokenizer: a `tokenizers.Tokenizer`.
        template: writes conversations as text.
        padding: id that fills sequences.
        all_count: every token is a label, not those of answers alone.
    """

    tokenizer: Any
    template: ChatTemplate
    padding: int
    all_count: bool

    def encode(self, conversation: Conversation) -> Tokens:
        """The tokens of a conversation; a token of which any character is of an answer is of the answer.

        Raises:
            DataError: the template cannot write the conversation.
        """
        if self.all_count:
            encoding = self.tokenizer.encode(self.template.write(conversation), add_special_tokens=False)
            return Tokens(np.array(encoding.ids, np.int64), np.ones(len(encoding.ids), bool))
        rendered = self.template.render(conversation)
        encoding = self.tokenizer.encode(rendered.text, add_special_tokens=False)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        are_answers = np.zeros(len(places), bool)
        for first, last in rendered.answers:
            are_answers |= (places[:, 0] < last) & (places[:, 1] > first)
        return Tokens(np.array(encoding.ids, np.int64), are_answers)


def open_tokenizer(paths: Sequence[Path], options: ConversationOptions, limits: Limits) -> ChatTokenizer:
    """The tokenizer and the template that the options ask for; a BPE is trained on the conversations first.

    Raises:
        DataError: one of them is missing, malformed or cannot be read.
        UserError: a package is not installed.
    """
    require("jinja2", "chat templates")
    folder = None
    if options.tokenizer in ("bytes", "bpe"):
        tokenizer = _made_here(paths, options)
        padding, values = (
            tokenizer.token_to_id("<|endoftext|>"),
            {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        )
    else:
        path = Path(options.tokenizer)
        tokenizer = load_tokenizer(path)
        tokenizer.no_padding()
        file = (find_tokenizer(path) if path.is_dir() else path) or path
        folder, padding = file.parent, find_padding(tokenizer, file)["pad_id"]
        values = tokens_of(read_settings(folder))
    source, where = read_template(options.chat_template, folder)
    ends = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    template = compile_template(source, where, values, ends, limits)
    return ChatTokenizer(tokenizer=tokenizer, template=template, padding=padding, all_count=options.loss_on == "all")


def _made_here(paths: Sequence[Path], options: ConversationOptions) -> Any:
    if options.tokenizer == "bytes":
        tokenizers = require("tokenizers", "packing conversations")
        return tokenizers.Tokenizer.from_str(make_byte_tokenizer("chat").json)
    tokenizer, _ = train_bpe(_texts(paths, options), options.vocabulary_size, SPECIALS["chat"])
    return tokenizer


def _texts(paths: Sequence[Path], options: ConversationOptions) -> Iterator[str]:
    """The contents of turns, up to the limit."""
    left = options.tokenizer_training_bytes
    conversations = itertools.chain.from_iterable(found for _, found in read_conversations(paths, options))
    for turn in (turn for conversation in conversations for turn in conversation.turns):
        if left <= 0:
            return
        yield turn["content"]
        left -= len(turn["content"].encode())
