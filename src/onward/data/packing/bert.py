"""Sentences -> BERT's training samples: two segments, whether the second follows the first, and masked tokens.

After Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018), section 3.1 and appendix A.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from onward.data.packing.options import TextOptions
from onward.data.packing.source import Sample

_REMEMBERED_SEGMENTS = 1024
_RECENT_SEGMENTS = 8


class BertSampler:
    """Collects a document's sentences into samples; remembers segments of earlier text as random second segments.

    Masks are static: drawn once, here. Of the masked tokens 80% become [MASK], 10% a random token, 10% stay.

    Args:
        options: sequence length, masking.
        specials: [CLS], [SEP] and [MASK] -> id; [PAD] is 0.
        vocabulary_size: random tokens are drawn from it, special ones excepted.
        key: of the random stream.
    """

    def __init__(
        self, options: TextOptions, specials: Mapping[str, int], vocabulary_size: int, key: Sequence[int]
    ) -> None:
        self._options = options
        self._specials = specials
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(list(key))))
        ordinary = np.setdiff1d(np.arange(vocabulary_size), list(specials.values()))
        self._ordinary_tokens = ordinary
        self._sentences: list[np.ndarray] = []
        self._size = 0
        self._remembered: list[np.ndarray] = []
        self._recent: deque[np.ndarray] = deque()
        self._target = self._draw_target()

    def add(self, sentences: Sequence[np.ndarray], end_of_document: bool) -> Iterator[Sample]:
        """Takes the next sentences of the current document (int64 token ids each) and gives the samples they fill."""
        room = self._options.sequence_length - 3
        for sentence in sentences:
            for start in range(0, len(sentence), room):
                self._sentences.append(sentence[start : start + room])
                self._size += len(self._sentences[-1])
                if self._size >= self._target:
                    yield self._make_sample()
        if end_of_document:
            while self._sentences:
                yield self._make_sample()

    def _draw_target(self) -> int:
        room = self._options.sequence_length - 3
        if self._random.random() < self._options.short_sequence_probability:
            return int(self._random.integers(2, room + 1))
        return room

    def _make_sample(self) -> Sample:
        sentences, random = self._sentences, self._random
        split = int(random.integers(1, len(sentences))) if len(sentences) > 1 else 1
        first = np.concatenate(sentences[:split])
        follows = len(sentences) > 1 and (random.random() < 0.5 or not self._remembered)
        if follows:
            second = np.concatenate(sentences[split:])
            used = len(sentences)
        elif self._remembered:
            second = self._remembered[int(random.integers(len(self._remembered)))]
            # What stood after the first segment was not used and comes again.
            used = split
        else:
            # A single sentence with nothing remembered: its second half follows its first.
            half = (len(first) + 1) // 2
            first, second, used, follows = first[:half], first[half:], len(sentences), True
        self._remember(first)
        self._sentences = sentences[used:]
        self._size = sum(map(len, self._sentences))
        sample = self._encode(*self._shorten(first, second), follows)
        self._target = self._draw_target()
        return sample

    def _remember(self, segment: np.ndarray) -> None:
        """Keeps a sample of all earlier segments but the latest, which would be of the same passage."""
        self._recent.append(segment)
        if len(self._recent) <= _RECENT_SEGMENTS:
            return
        if len(self._remembered) < _REMEMBERED_SEGMENTS:
            self._remembered.append(self._recent.popleft())
        else:
            self._remembered[int(self._random.integers(_REMEMBERED_SEGMENTS))] = self._recent.popleft()

    def _shorten(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Takes tokens from the longer segment, from either end, until both fit."""
        room = self._options.sequence_length - 3
        while (excess := len(first) + len(second) - room) > 0:
            longer, shorter = (first, second) if len(first) > len(second) else (second, first)
            count = min(excess, max(1, len(longer) - len(shorter)))
            front = int(self._random.integers(count + 1))
            kept = longer[front : len(longer) - (count - front)]
            first, second = (kept, second) if longer is first else (first, kept)
        return first, second

    def _encode(self, first: np.ndarray, second: np.ndarray, follows: bool) -> Sample:
        options, specials = self._options, self._specials
        separator = [specials["[SEP]"]]
        tokens = np.concatenate([[specials["[CLS]"]], first, separator, second, separator]).astype(np.int64)
        sentence_tokens = np.delete(np.arange(len(tokens)), [0, len(first) + 1, len(tokens) - 1])
        positions, masked = self._mask(tokens, sentence_tokens)
        segments = (np.arange(len(tokens)) > len(first) + 1).astype(np.int64)
        length, predictions = options.sequence_length, options.max_predictions_per_seq
        return {
            "input_ids": _pad(masked, length),
            "segment_ids": _pad(segments, length),
            "input_mask": _pad(np.ones(len(tokens), np.int64), length),
            "masked_lm_positions": _pad(positions, predictions),
            "masked_lm_ids": _pad(tokens[positions], predictions),
            "next_sentence_label": np.array([0 if follows else 1], np.int64),
        }

    def _mask(self, tokens: np.ndarray, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions to predict, in order, and the tokens with these positions disguised."""
        options, random = self._options, self._random
        count = max(1, round(len(candidates) * options.masked_lm_probability))
        count = min(count, options.max_predictions_per_seq, len(candidates))
        positions = np.sort(random.choice(candidates, count, replace=False))
        masked, fate = tokens.copy(), random.random(count)
        masked[positions[fate < 0.8]] = self._specials["[MASK]"]
        replaced = positions[fate >= 0.9]
        masked[replaced] = random.choice(self._ordinary_tokens, len(replaced))
        return positions, masked


def _pad(values: np.ndarray, length: int) -> np.ndarray:
    padded = np.zeros(length, np.int64)
    padded[: len(values)] = values
    return padded
