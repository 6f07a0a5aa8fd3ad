"""Text -> token ids: one token per byte, a byte-level BPE trained on the spot, or a tokenizer.json from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.documents import read_documents
from onward.data.packing.options import TextOptions
from onward.data.packing.source import require
from onward.data.packing.tokenizer_files import load_tokenizer
from onward.errors import DataError, ParametersError

_OF_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPECIALS = {
    "causal": ("<|endoftext|>",),
    "chat": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "bert": _OF_BERT,
    "masked": _OF_BERT,
}
"""Special tokens of an objective; for BERT [PAD] is 0, which its loss ignores."""


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """Token ids of texts.

    Attributes:
        encode: UTF-8 texts -> int64 ids of each, without special tokens.
        vocabulary_size: number of ids.
        specials: special token -> id.
        needs_utf8: whether `encode` decodes its input.
        json: the text of a `tokenizer.json` that the `tokenizers` package loads, to turn ids back into text.
    """

    encode: Callable[[Sequence[bytes]], list[np.ndarray]]
    vocabulary_size: int
    specials: dict[str, int]
    needs_utf8: bool
    json: str


def make_tokenizer(paths: list[Path], options: TextOptions) -> TextTokenizer:
    """The tokenizer that the options ask for; a BPE is trained on the text first.

    Raises:
        UserError: the `tokenizers` package is needed and not installed.
        ParametersError: a vocabulary too small for bytes and special tokens.
        DataError: a tokenizer.json that cannot be read or lacks special tokens.
    """
    if options.tokenizer == "bytes":
        return make_byte_tokenizer(options.objective)
    if options.tokenizer == "bpe":
        return _wrap(*train_bpe(_training_texts(paths, options), options.vocabulary_size, SPECIALS[options.objective]))
    return _load_tokenizer(Path(options.tokenizer), options)


# -------------------------------------------------------------------------------------------------------------- bytes


def make_byte_tokenizer(objective: str) -> TextTokenizer:
    """causal, chat: a byte's id is the byte, 256 ends a text. bert, masked: special tokens 0 to 4, bytes from 5 on."""
    names = SPECIALS[objective]
    are_last = objective in ("causal", "chat")
    first = 0 if are_last else len(names)
    specials = {name: (256 if are_last else 0) + k for k, name in enumerate(names)}

    def encode(texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8).astype(np.int64) + first for text in texts]

    vocabulary = {character: byte + first for byte, character in enumerate(_byte_characters())}
    added = [
        {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for name, number in specials.items()
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {**vocabulary, **specials}, "merges": [],
        },
    }  # fmt: skip
    return TextTokenizer(
        encode=encode,
        vocabulary_size=256 + len(names),
        specials=specials,
        needs_utf8=False,
        json=json.dumps(content, indent=1) + "\n",
    )


def _byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# ---------------------------------------------------------------------------------------------------------------- BPE


def train_bpe(texts: Iterator[str], vocabulary_size: int, specials: Sequence[str]) -> tuple[Any, dict[str, int]]:
    """A byte-level BPE as a `tokenizers.Tokenizer`, and its special tokens with their ids.

    Raises:
        ParametersError: a vocabulary too small for bytes and special tokens.
        UserError: the `tokenizers` package is not installed.
    """
    tokenizers = require("tokenizers", "a BPE tokenizer")
    if vocabulary_size < 256 + len(specials):
        raise ParametersError(
            f"vocabulary_size is {vocabulary_size}; a byte-level BPE needs at least {256 + len(specials)}: all "
            f"bytes and {len(specials)} special tokens."
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer, {name: tokenizer.token_to_id(name) for name in specials}


def _training_texts(paths: list[Path], options: TextOptions) -> Iterator[str]:
    """Text up to the limit, of every file an equal share at most, so that no folder is left out."""
    left = options.tokenizer_training_bytes
    for number, path in enumerate(paths):
        share = left // (len(paths) - number)
        for chunk in read_documents([path], options):
            text = chunk.text[:share]
            share -= len(text)
            left -= len(text)
            if text:
                yield text.decode("utf-8", "ignore")
            if share <= 0:
                break


def _load_tokenizer(path: Path, options: TextOptions) -> TextTokenizer:
    if not path.exists():
        raise DataError(f"tokenizer {str(path)!r} does not exist; give 'bytes', 'bpe' or the path of a tokenizer.json.")
    tokenizer = load_tokenizer(path)
    tokenizer.no_padding()
    if options.objective == "masked":
        found = {name: _first_id(tokenizer, others) for name, others in _MASKED_SPECIALS.items()}
    else:
        names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]") if options.objective == "bert" else (options.end_of_text,)
        found = {name: tokenizer.token_to_id(name) for name in names}
    missing = [name for name, number in found.items() if number is None]
    specials = {name: number for name, number in found.items() if number is not None}
    if missing:
        raise DataError(
            f"tokenizer {str(path)!r} lacks the token {', '.join(missing)}, which {options.objective} needs"
            + ("; name its own with --end-of-text." if options.objective == "causal" else ".")
        )
    if options.objective == "bert" and specials.get("[PAD]", 0) != 0:
        raise DataError(
            f"tokenizer {str(path)!r} has [PAD] at {specials['[PAD]']}; BERT samples are padded with 0, which the loss "
            "ignores, so that [PAD] must be token 0."
        )
    return _wrap(tokenizer, specials)


_MASKED_SPECIALS = {
    "[CLS]": ("[CLS]", "<s>", "<cls>"),
    "[SEP]": ("[SEP]", "</s>", "<eos>"),
    "[MASK]": ("[MASK]", "<mask>"),
}
"""Special token of the objective `masked` -> what tokenizers call it."""


def _first_id(tokenizer: Any, names: Sequence[str]) -> int | None:
    found = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in found if number is not None), None)


def _wrap(tokenizer: Any, specials: dict[str, int]) -> TextTokenizer:
    def encode(texts: Sequence[bytes]) -> list[np.ndarray]:
        encodings = tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    return TextTokenizer(
        encode=encode,
        vocabulary_size=tokenizer.get_vocab_size(),
        specials=specials,
        needs_utf8=True,
        json=tokenizer.to_str(pretty=True) + "\n",
    )
