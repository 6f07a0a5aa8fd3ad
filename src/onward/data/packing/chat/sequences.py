"""Tokens of conversations -> samples of one length: a conversation each, or filled with several that stay apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.chat.conversations import Conversation, read_conversations
from onward.data.packing.chat.tokens import ChatTokenizer, Tokens, open_tokenizer
from onward.data.packing.options import ChatOptions, ConversationOptions, InstructOptions, PreferenceOptions
from onward.data.packing.source import Advance, ChooseSplit, Read, Sample, Source
from onward.data.packing.splits import one_after_the_other
from onward.data.packing.transforms import IGNORED_LABEL
from onward.errors import DataError
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.spelling import shortened

_OPEN_SEQUENCES = 64
"""Sequences that wait for conversations which fill them."""


def open_conversations(
    paths: list[Path],
    options: ConversationOptions,
    test_paths: Sequence[Path] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Source:
    """Opens files of conversations, and others for testing alone.

    Raises:
        DataError: a file, the tokenizer or the chat template cannot be read.
        UserError: a package is not installed.
    """
    tokenizer = open_tokenizer(paths, options, limits)
    details: dict[str, Any] = {
        "vocabulary_size": tokenizer.tokenizer.get_vocab_size(),
        "padding": tokenizer.padding,
        "split_by": "conversation",
    }
    read: Read = partial(_read, paths, options, tokenizer, details, Counter())
    if test_paths:
        read = one_after_the_other(read, partial(_read, list(test_paths), options, tokenizer, details, Counter()))
    return Source(
        unit="bytes",
        total=sum(path.stat().st_size for path in (*paths, *test_paths)),
        read=read,
        details=details,
        files={
            "tokenizer.json": tokenizer.tokenizer.to_str(pretty=True) + "\n",
            "chat_template.jinja": tokenizer.template.template.source,
        },
    )


def _read(
    paths: list[Path],
    options: ConversationOptions,
    tokenizer: ChatTokenizer,
    details: dict[str, Any],
    counts: Counter[str],
    choose_split: ChooseSplit,
    advance: Advance,
) -> Iterator[tuple[str, Sample]]:
    length, kept = options.sequence_length, 0
    shares = isinstance(options, ChatOptions | InstructOptions) and options.several_per_sequence
    filling = {split: _Filling(length, options, tokenizer.padding) for split in ("train", "test")}
    for read_bytes, conversations in read_conversations(paths, options):
        advance(read_bytes)
        pieces = [_piece(tokenizer, conversation, options, counts) for conversation in conversations]
        if not all(piece is not None and (piece.labels != IGNORED_LABEL).any() for piece in pieces):
            counts["without_answer"] += all(piece is not None for piece in pieces)
            continue
        found, split = [piece for piece in pieces if piece is not None], choose_split(kept)
        kept += 1
        counts["tokens"] += sum(len(piece.ids) for piece in found)
        counts["labels"] += sum(int((piece.labels != IGNORED_LABEL).sum()) for piece in found)
        if shares:
            samples = filling[split].add(found[0])
        else:
            alone = [_alone(piece, options, tokenizer.padding) for piece in found]
            is_pair = isinstance(options, PreferenceOptions)
            samples = iter(
                [{name: np.stack([one[name] for one in alone]) for name in alone[0]} if is_pair else alone[0]]
            )
        for sample in samples:
            counts["samples"] += 1
            yield split, sample
    for split, rest in filling.items():
        for sample in rest.end():
            counts["samples"] += 1
            yield split, sample
    if not kept:
        raise DataError(_why_nothing(paths, options, counts))
    _describe(details, counts, options, kept)


def _why_nothing(paths: Sequence[Path], options: ConversationOptions, counts: Counter[str]) -> str:
    """Why no conversation became a sample."""
    names = shortened([repr(str(path)) for path in paths], 3)
    length = f"sequence_length {options.sequence_length:,}"
    reasons = []
    if counts["without_answer"]:
        reasons.append(f"{counts['without_answer']:,} without an answer of the assistant within {length} tokens")
    if counts["skipped"]:
        reasons.append(f"{counts['skipped']:,} of more tokens than {length}, left out (--too-long skip)")
    if not reasons:
        return f"{names} gave no samples; nothing was packed, since there are no conversations. Pass another file."
    remedy = "Raise --sequence-length" if counts["cut"] or counts["skipped"] else "Add turns of the assistant"
    return f"{names} gave no samples; nothing was packed: {' and '.join(reasons)}. {remedy}."


def _describe(details: dict[str, Any], counts: Counter[str], options: ConversationOptions, kept: int) -> None:
    """What became of the conversations, for the manifest and the user."""
    places = counts["samples"] * options.sequence_length * (2 if isinstance(options, PreferenceOptions) else 1)
    told = {"conversations": kept, "tokens": counts["tokens"], "tokens_with_loss": counts["labels"]}
    told["padding_percent"] = round(100 * (1 - counts["tokens"] / places)) if places else 0
    told |= {f"{name}_conversations": counts[name] for name in ("cut", "skipped") if counts[name]}
    told |= {"tokens_cut": counts["tokens_cut"]} if counts["tokens_cut"] else {}
    told |= {"conversations_without_answer": counts["without_answer"]} if counts["without_answer"] else {}
    for name, value in told.items():
        details[name] = value if name == "padding_percent" else details.get(name, 0) + value


class _Piece:
    """Token ids of a conversation and the label of each, no more than fit into a sequence."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        following = np.where(tokens.are_answers, tokens.ids, IGNORED_LABEL)[1 : length + 1]
        self.ids = tokens.ids[:length]
        self.labels = np.full(len(self.ids), IGNORED_LABEL, np.int64)
        self.labels[: len(following)] = following


def _piece(
    tokenizer: ChatTokenizer, conversation: Conversation, options: ConversationOptions, counts: Counter[str]
) -> _Piece | None:
    """A conversation as far as it fits; None: it is left out."""
    tokens = tokenizer.encode(conversation)
    # The last token is a label only.
    lost = len(tokens.ids) - 1 - options.sequence_length
    if lost > 0 and options.too_long == "error":
        raise DataError(
            f"{conversation.where}: the conversation has {len(tokens.ids):,} tokens, more than sequence_length "
            f"{options.sequence_length:,}. Raise it, or pass --too-long cut or skip."
        )
    if lost > 0 and options.too_long == "skip":
        counts["skipped"] += 1
        return None
    if lost > 0:
        counts["cut"] += 1
        counts["tokens_cut"] += lost
    return _Piece(tokens, options.sequence_length)


def _padded(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    return np.concatenate([values, np.full(length - len(values), filler, np.int64)])


def _alone(piece: _Piece, options: ConversationOptions, padding: int) -> Sample:
    length, count = options.sequence_length, len(piece.ids)
    sample = {
        "input_ids": _padded(piece.ids, length, padding),
        "attention_mask": _padded(np.ones(count, np.int64), length, 0),
        "labels": _padded(piece.labels, length, IGNORED_LABEL),
    }
    return {**sample, "position_ids": np.arange(length, dtype=np.int64)} if options.position_ids else sample


class _Filling:
    """Sequences that are filled with conversations, each in the first one that has room for it."""

    def __init__(self, length: int, options: ConversationOptions, padding: int) -> None:
        self._length, self._padding = length, padding
        self._mask = getattr(options, "mask_type", "segments")
        self._open: list[list[_Piece]] = []

    def add(self, piece: _Piece) -> Iterator[Sample]:
        """Takes a conversation, and gives the sequence that is full, if any is."""
        target = next((one for one in self._open if self._room(one) >= len(piece.ids)), None)
        if target is None:
            if len(self._open) == _OPEN_SEQUENCES:
                yield self._close(min(self._open, key=self._room))
            target = []
            self._open.append(target)
        target.append(piece)
        if not self._room(target):
            yield self._close(target)

    def end(self) -> Iterator[Sample]:
        """The sequences that are left."""
        while self._open:
            yield self._close(self._open[0])

    def _room(self, pieces: list[_Piece]) -> int:
        return self._length - sum(len(piece.ids) for piece in pieces)

    def _close(self, pieces: list[_Piece]) -> Sample:
        self._open.remove(pieces)
        length = self._length
        counts = [len(piece.ids) for piece in pieces]
        segments = _padded(np.repeat(np.arange(1, len(pieces) + 1), counts), length, 0)
        positions = np.concatenate([np.arange(count) for count in [*counts, length - sum(counts)]])
        sample = {
            "input_ids": _padded(np.concatenate([piece.ids for piece in pieces]), length, self._padding),
            "labels": _padded(np.concatenate([piece.labels for piece in pieces]), length, IGNORED_LABEL),
            "position_ids": positions.astype(np.int64),
        }
        return {**sample, **_keeping_apart(segments, self._mask)}


def _keeping_apart(segments: np.ndarray, kind: str) -> Sample:
    """The feature by which a model keeps conversations apart: tokens see earlier ones of their own conversation.

    Padding sees padding, since a token that sees nothing would become NaN.
    """
    if kind == "segments":
        return {"segment_ids": segments.astype(np.int64)}
    order = np.arange(len(segments))
    seen = (segments[:, None] == segments) & (order[:, None] >= order)
    if kind == "float":
        return {"attention_mask": np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)[None]}
    return {"attention_mask": seen[None]}
