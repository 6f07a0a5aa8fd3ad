"""The tokenizer of a model, from the files that people have: `tokenizer.json`, WordPiece, byte-level BPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.data.packing.source import require
from onward.errors import DataError
from onward.untrusted_files import parse_json, read_text

_SENTENCEPIECE = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
_PADDING = ("[PAD]", "<pad>", "<PAD>", "<|pad|>", "<|padding|>")
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "[SEP]")


def find_tokenizer(folder: Path) -> Path | None:
    """The file of a folder that a tokenizer is read from; None: there is none.

    Raises:
        DataError: there is one that only the sentencepiece package reads.
    """
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    if (folder / "vocab.txt").is_file():
        return folder / "vocab.txt"
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return folder / "vocab.json"
    for name in _SENTENCEPIECE:
        if (folder / name).is_file():
            raise DataError(
                f"tokenizer {str(folder / name)!r} is a SentencePiece model, which onward does not read. Write a "
                f"tokenizer.json next to it: transformers.AutoTokenizer.from_pretrained({str(folder)!r})"
                f".save_pretrained({str(folder)!r})."
            )
    return None


def find_tokenizer_of_model(model: Path) -> Path | None:
    """The tokenizer next to a model, or above a folder `onnx` that it is in.

    Raises:
        DataError: as `find_tokenizer`.
    """
    found = find_tokenizer(model.parent)
    is_inside = found is None and model.absolute().parent.name == "onnx"
    return find_tokenizer(model.parent / "..") if is_inside else found


def load_tokenizer(path: Path) -> Any:
    """A `tokenizers.Tokenizer` without truncation and padding.

    Args:
        path: a `tokenizer.json`, a `vocab.txt` (WordPiece, as of BERT), a `vocab.json` with a `merges.txt` next to it
            (byte-level BPE, as of GPT-2 and RoBERTa), or a folder that holds one of them.

    Raises:
        DataError: there is none, or it cannot be read.
        UserError: the `tokenizers` package is not installed.
    """
    file = find_tokenizer(path) if path.is_dir() else path
    if file is None or not file.is_file():
        raise DataError(
            f"tokenizer {str(path)!r} does not exist; pass a tokenizer.json, a vocab.txt, a vocab.json next to a "
            "merges.txt, or a folder that holds one of them."
        )
    tokenizers = require("tokenizers", f"reading {file.name}")
    try:
        if file.suffix == ".txt":
            return _word_pieces(tokenizers, file)
        if file.name == "vocab.json":
            return _byte_pairs(tokenizers, file)
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"tokenizer {str(file)!r} cannot be read: {error}.") from error
    tokenizer.no_truncation()
    return tokenizer


def find_padding(tokenizer: Any, file: Path) -> dict[str, Any]:
    """What texts are padded with, as `enable_padding` takes it: as the tokenizer says, else a token of that name."""
    said = tokenizer.padding or {}
    kept = {name: said[name] for name in ("direction", "pad_id", "pad_token", "pad_type_id") if name in said}
    if "pad_id" in kept:
        return kept
    token = _settings(file).get("pad_token")
    if isinstance(token, dict):
        token = token.get("content")
    for name in (token, *_PADDING, *_ENDS):
        number = None if name is None else tokenizer.token_to_id(name)
        if number is not None:
            return {"pad_id": number, "pad_token": name}
    return {"pad_id": 0, "pad_token": tokenizer.id_to_token(0) or ""}


def _settings(file: Path) -> dict[str, Any]:
    """`tokenizer_config.json` next to a file of a tokenizer."""
    try:
        found = parse_json(read_text(file.parent / "tokenizer_config.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _word_pieces(tokenizers: Any, file: Path) -> Any:
    """BERT's tokenizer; it ignores case where its vocabulary has no capital letters."""
    words = read_text(file).split("\n")
    words = words[:-1] if words and not words[-1] else words
    vocabulary = {word: number for number, word in enumerate(words)}
    lacking = [name for name in ("[UNK]", "[CLS]", "[SEP]") if name not in vocabulary]
    if lacking:
        raise DataError(
            f"tokenizer {str(file)!r} lacks {', '.join(lacking)}, so it is no WordPiece vocabulary as BERT has it. "
            "Pass a tokenizer.json."
        )
    ignores_case = all(word == word.lower() for word in words if not word.startswith("["))
    settings = _settings(file)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(
        [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocabulary]
    )
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(
        lowercase=bool(settings.get("do_lower_case", ignores_case)),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = (("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.post_processor = tokenizers.processors.BertProcessing(*ends)
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer


def _byte_pairs(tokenizers: Any, file: Path) -> Any:
    """GPT-2's tokenizer; RoBERTa's where there are tokens for the beginning and the end of a text."""
    merges = file.with_name("merges.txt")
    if not merges.is_file():
        raise DataError(
            f"tokenizer {str(file)!r} has no merges.txt next to it. Copy it there, or pass a tokenizer.json."
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(file), str(merges)))
    specials = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")
    tokenizer.add_special_tokens([name for name in specials if tokenizer.token_to_id(name) is not None])
    spaced = bool(_settings(file).get("add_prefix_space", False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    ends = [(name, tokenizer.token_to_id(name)) for name in ("</s>", "<s>")]
    if all(number is not None for _, number in ends):
        tokenizer.post_processor = tokenizers.processors.RobertaProcessing(*ends, add_prefix_space=spaced)
    return tokenizer
