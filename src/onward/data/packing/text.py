"""Text -> token sequences for next-token training, or pairs of segments for BERT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.bert import BertSampler
from onward.data.packing.documents import DocumentChunk, count_bytes, is_split_by_document, read_documents
from onward.data.packing.options import TextOptions
from onward.data.packing.source import Advance, ChooseSplit, Read, Sample, Source
from onward.data.packing.splits import one_after_the_other
from onward.data.packing.tokenizing import TextTokenizer, make_tokenizer
from onward.data.packing.transforms import IGNORED_LABEL
from onward.errors import DataError


def open_text(paths: list[Path], options: TextOptions, seed: int, test_paths: Sequence[Path] = ()) -> Source:
    """Opens text files, and others for testing alone; trains the tokenizer on the former where one is to be trained."""
    tokenizer = make_tokenizer(paths, options)
    by_document = is_split_by_document(paths, options)
    details: dict[str, Any] = {
        "vocabulary_size": tokenizer.vocabulary_size,
        "special_tokens": tokenizer.specials,
        "split_by": "document" if by_document else "sample",
    }
    read = _reader(paths, options, tokenizer, details, seed, by_document)
    if test_paths:
        read = one_after_the_other(read, _reader(list(test_paths), options, tokenizer, details, seed, by_document))
    return Source(
        unit="bytes",
        total=count_bytes([*paths, *test_paths]),
        read=read,
        details=details,
        files={"tokenizer.json": tokenizer.json},
    )


def _reader(
    paths: list[Path],
    options: TextOptions,
    tokenizer: TextTokenizer,
    details: dict[str, Any],
    seed: int,
    by_document: bool,
) -> Read:
    if options.objective == "bert":
        return partial(_read_bert, paths, options, tokenizer, details, seed, by_document)
    read = partial(_read_sequences, paths, options, tokenizer, details)
    if options.objective == "masked":
        return partial(_masked, read, options, tokenizer, seed, by_document)
    return partial(read, by_document)


def _read_sequences(
    paths: list[Path],
    options: TextOptions,
    tokenizer: TextTokenizer,
    details: dict[str, Any],
    by_document: bool,
    choose_split: ChooseSplit,
    advance: Advance,
) -> Iterator[tuple[str, Sample]]:
    """Documents one after the other, cut every `sequence_length` tokens; the label of a token is the one after it."""
    streams: dict[str, np.ndarray] = {}
    separator = "[SEP]" if options.objective == "masked" else next(iter(tokenizer.specials))
    end = np.array([tokenizer.specials[separator]], np.int64)
    length, number, total = options.sequence_length, 0, 0
    for chunk in _decodable(read_documents(paths, options), paths, options, tokenizer, details):
        advance(chunk.read_bytes)
        parts = tokenizer.encode([chunk.text]) if chunk.text else []
        if chunk.last:
            parts.append(end)
        if not parts:
            continue
        document_split = choose_split(chunk.document) if by_document else ""
        tokens = np.concatenate([streams.get(document_split, end[:0]), *parts])
        total += sum(map(len, parts))
        start = 0
        while len(tokens) - start > length:
            window = tokens[start : start + length + 1]
            sample = {"tokens": window[:-1], "labels": window[1:]}
            if options.position_ids:
                sample["position_ids"] = np.arange(length)
            yield (document_split if by_document else choose_split(number)), sample
            number += 1
            start += length
        streams[document_split] = tokens[start:]
    left = sum(len(tokens) for tokens in streams.values())
    details["token_count"] = details.get("token_count", 0) + total
    details["tokens_left_over"] = details.get("tokens_left_over", 0) + left
    if number == 0:
        raise DataError(
            f"the text has {total} tokens, fewer than one sample of sequence_length {length} and its last label needs "
            f"({length + 1}): pass more text, or a smaller --sequence-length."
        )


def _masked(
    read: Callable[[bool, ChooseSplit, Advance], Iterator[tuple[str, Sample]]],
    options: TextOptions,
    tokenizer: TextTokenizer,
    seed: int,
    by_document: bool,
    choose_split: ChooseSplit,
    advance: Advance,
) -> Iterator[tuple[str, Sample]]:
    """Sequences with a share of their tokens masked, once, as `BertSampler` does; other positions have no label."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 4])))
    specials = tokenizer.specials
    ordinary = np.setdiff1d(np.arange(tokenizer.vocabulary_size), list(specials.values()))
    for split, sample in read(by_document, choose_split, advance):
        tokens = sample["tokens"].copy()
        candidates = np.flatnonzero(~np.isin(tokens, list(specials.values())))
        count = min(len(candidates), max(1, round(len(candidates) * options.masked_lm_probability)))
        positions, fate = np.sort(random.choice(candidates, count, replace=False)), random.random(count)
        labels = np.full(len(tokens), IGNORED_LABEL, np.int64)
        labels[positions] = tokens[positions]
        tokens[positions[fate < 0.8]] = specials["[MASK]"]
        replaced = positions[fate >= 0.9]
        tokens[replaced] = random.choice(ordinary, len(replaced))
        yield split, {**sample, "tokens": tokens, "labels": labels}


def _read_bert(
    paths: list[Path],
    options: TextOptions,
    tokenizer: TextTokenizer,
    details: dict[str, Any],
    seed: int,
    by_document: bool,
    choose_split: ChooseSplit,
    advance: Advance,
) -> Iterator[tuple[str, Sample]]:
    """Non-empty lines are sentences; a split has its own sampler, so that no test sentence is seen in training."""
    samplers: dict[str, BertSampler] = {}
    number, rest = 0, b""
    for chunk in _decodable(read_documents(paths, options), paths, options, tokenizer, details):
        advance(chunk.read_bytes)
        text = rest + chunk.text
        end = len(text) if chunk.last else text.rfind(b"\n") + 1
        rest = text[end:]
        lines = [line for line in text[:end].splitlines() if line.strip()]
        document_split = choose_split(chunk.document) if by_document else ""
        if document_split not in samplers:
            key = [seed, 2, len(samplers)]
            samplers[document_split] = BertSampler(options, tokenizer.specials, tokenizer.vocabulary_size, key)
        sampler = samplers[document_split]
        for sample in sampler.add(tokenizer.encode(lines), chunk.last):
            yield (document_split if by_document else choose_split(number)), sample
            number += 1
    if number == 0:
        raise DataError("the text has only empty lines; pass a file with text.")


def _decodable(
    chunks: Iterator[DocumentChunk],
    paths: list[Path],
    options: TextOptions,
    tokenizer: TextTokenizer,
    details: dict[str, Any],
) -> Iterator[DocumentChunk]:
    """Handles documents that are not UTF-8 as the options ask; a byte tokenizer takes any bytes."""
    if not tokenizer.needs_utf8:
        yield from chunks
        return
    skipping, skipped = -1, 0
    document, offset = -1, 0
    for chunk in chunks:
        start, document = (offset if chunk.document == document else 0), chunk.document
        offset = start + len(chunk.text)
        try:
            chunk.text.decode()
        except UnicodeDecodeError as error:
            if options.undecodable == "error":
                name = f"text {str(paths[chunk.document])!r}" if _one_document_per_file(paths, options) else "a text"
                raise DataError(
                    f"{name} (document {chunk.document}) is not UTF-8: {error.reason} at byte {start + error.start}. "
                    "Convert it, leave it out with --undecodable skip, or replace such bytes by U+FFFD with "
                    "--undecodable replace."
                ) from error
            if options.undecodable == "replace":
                chunk = chunk._replace(text=chunk.text.decode("utf-8", "replace").encode())
            elif skipping != chunk.document:
                skipping, skipped = chunk.document, skipped + 1
        if skipping == chunk.document:
            chunk = chunk._replace(text=b"")
        yield chunk
    if skipped:
        details["documents_not_utf8"] = details.get("documents_not_utf8", 0) + skipped


def _one_document_per_file(paths: list[Path], options: TextOptions) -> bool:
    plain = all(path.suffix.lower() not in (".jsonl", ".ndjson", ".parquet") for path in paths)
    return plain and options.documents == "file"
