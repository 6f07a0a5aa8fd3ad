"""Rows of a table -> features: columns grouped, words turned into class numbers, dtypes found out."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.options import TableOptions
from onward.data.packing.rows import Block, is_missing, read_blocks
from onward.data.packing.source import Advance, ChooseSplit, Read, Sample, Source
from onward.data.packing.splits import one_after_the_other
from onward.data.packing.text_columns import TextColumns, open_text_columns
from onward.errors import DataError, ParametersError
from onward.spelling import shortened

_RECORDS = {".jsonl", ".ndjson", ".parquet"}
"""Files whose rows name their columns."""


@dataclass(frozen=True)
class _TableColumn:
    """How a column is read: by the numbers of its words, as whole numbers, or as numbers."""

    name: str
    words: dict[str, int] | None
    is_integer: bool


def open_table(paths: list[Path], options: TableOptions, test_paths: Sequence[Path] = ()) -> Source:
    """Opens table files of the same columns; those of `test_paths` are for testing alone.

    The dtypes of columns are those of the first block of rows; words of `categories` are collected in a first pass,
    over all files, so that they have the same numbers everywhere.

    Raises:
        DataError: a file is broken or empty, or an option names a column that is not there.
    """
    first = next((block for path in paths for block in read_blocks(path, options) if block.count), None)
    if first is None:
        raise DataError(f"table {str(paths[0])!r} has no rows.")
    _check_text_options(paths, options)
    text = open_text_columns(options)
    texts = () if text is None else text.columns
    for name in texts:
        _match(name, list(first.columns), str(first.path))
    categories = _categories(list(first.columns), options, str(first.path))
    names = [name for name in first.columns if name not in texts]
    features = _group_columns(names, list(categories), options, str(first.path))
    clash = next((name for name in features if text is not None and name in text.features), None)
    if clash is not None:
        raise ParametersError(
            f"--text and a column both make the feature {clash!r}; rename one with --columns or --text."
        )
    words = _collect_words([*paths, *test_paths], categories, options) if categories else {}
    needed = dict.fromkeys(name for names in features.values() for name in names)
    columns = {name: _describe(name, words.get(name), first, options) for name in needed}
    details: dict[str, Any] = {"categories": {name: list(numbers) for name, numbers in words.items()}} if words else {}
    details |= {} if text is None else text.details
    read: Read = partial(_read, paths, options, features, columns, text, details)
    if test_paths:
        read = one_after_the_other(read, partial(_read, list(test_paths), options, features, columns, text, details))
    total = sum(path.stat().st_size for path in (*paths, *test_paths))
    return Source(
        unit="bytes",
        total=total,
        read=read,
        details=details,
        files={} if text is None else {"tokenizer.json": text.json},
    )


def _check_text_options(paths: list[Path], options: TableOptions) -> None:
    """Options that none of the files reads are refused."""
    kinds = {path.suffix.lower() for path in paths}
    listed = ", ".join(sorted(kinds))
    if options.delimiter != "," and kinds <= {".tsv", *_RECORDS}:
        raise ParametersError(f"--delimiter is read of CSV files only, and the files are {listed}; leave it out.")
    if not options.header and kinds <= _RECORDS:
        raise ParametersError(
            f"--no-header is read of CSV and TSV files only, and the files are {listed}; leave it out."
        )


def _match(pattern: str, names: list[str], where: str) -> list[str]:
    found = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"table {where!r} has no column {pattern!r}; it has {', '.join(map(repr, names))}.{hint}")
    return found


def _categories(names: list[str], options: TableOptions, where: str) -> dict[str, list[str]]:
    """The columns of words, each once -> their words in the order that is given; none: alphabetical."""
    found: dict[str, list[str]] = {}
    for asked in options.categories:
        pattern, separator, order = asked.partition("=") if asked not in names else (asked, "", "")
        words = order.split(",") if separator else []
        if len(set(words)) != len(words):
            raise ParametersError(f"--categories {asked} names a word twice; name each once.")
        found.update(dict.fromkeys(_match(pattern, names, where), words))
    return found


def _group_columns(names: list[str], categories: list[str], options: TableOptions, where: str) -> dict[str, list[str]]:
    """Feature -> columns; a category that no feature reads is a feature of its own name."""
    if not options.columns:
        return {name: [name] for name in names}
    features: dict[str, list[str]] = {}
    for feature, patterns in options.columns:
        if feature in features:
            raise ParametersError(
                f"--columns gives the feature {feature!r} twice; list all of its columns in one: "
                f"--columns {feature}=COLUMN,COLUMN."
            )
        features[feature] = [name for pattern in patterns.split(",") for name in _match(pattern, names, where)]
    read = {name for columns in features.values() for name in columns}
    for name in categories:
        if name not in read and name in features:
            raise ParametersError(
                f"--categories {name} makes a feature {name!r}, but --columns gives that name to other columns. Pass "
                f"--columns OTHER={name} to name the feature of the category."
            )
        if name not in read:
            features[name] = [name]
    return features


def _collect_words(
    paths: list[Path], categories: dict[str, list[str]], options: TableOptions
) -> dict[str, dict[str, int]]:
    found: dict[str, set[str]] = {name: set() for name in categories}
    for path in paths:
        for block in read_blocks(path, options):
            for name, words in found.items():
                words.update(_word(value) for value in block.columns.get(name, []) if value is not None)
    for name, words in found.items():
        others = sorted(words - set(categories[name])) if categories[name] else []
        if others:
            raise DataError(
                f"column {name!r} of table {str(paths[0])!r} holds {shortened(map(repr, others), 5)}, which "
                f"--categories {name}=... does not list; its words are {', '.join(map(repr, categories[name]))}. Fix "
                "the values, or add the words."
            )
    ordered = {name: categories[name] or sorted(words) for name, words in found.items()}
    return {name: {word: number for number, word in enumerate(words)} for name, words in ordered.items()}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _describe(name: str, words: dict[str, int] | None, block: Block, options: TableOptions) -> _TableColumn:
    if words is not None:
        return _TableColumn(name, words, True)
    values = [value for value in block.columns[name] if not is_missing(value)]
    try:
        is_integer = all(_is_whole(value) for value in values) and options.missing != "keep"
    except ValueError as error:
        raise DataError(
            f"table {str(block.path)!r}: column {name!r} holds {error}, which is not a number. Make it a class with "
            f"--categories {name}, or leave it out by naming the features' columns with --columns NAME=COLUMN,..."
        ) from error
    return _TableColumn(name, None, is_integer)


def _is_whole(value: Any) -> bool:
    """Whether a value is a whole number, or lists of them.

    Raises:
        ValueError: it is not a number; the message is its text.
    """
    if isinstance(value, list):
        wholes = [_is_whole(part) for part in value]
        return all(wholes)
    if isinstance(value, str):
        try:
            int(value)
        except ValueError:
            try:
                float(value)
            except ValueError:
                raise ValueError(repr(value)) from None
            return False
        return True
    if isinstance(value, bool | int):
        return True
    if isinstance(value, float):
        return False
    raise ValueError(repr(value))


def _read(
    paths: list[Path],
    options: TableOptions,
    features: dict[str, list[str]],
    columns: dict[str, _TableColumn],
    text: TextColumns | None,
    details: dict[str, Any],
    choose_split: ChooseSplit,
    advance: Advance,
) -> Iterator[tuple[str, Sample]]:
    number = skipped = 0
    empty: Counter[str] = Counter()
    for path in paths:
        for block in read_blocks(path, options):
            advance(block.read_bytes)
            texts = () if text is None else text.columns
            kept = _complete_rows(
                block, {**columns, **{name: _TableColumn(name, {}, False) for name in texts}}, options, empty
            )
            skipped += block.count - len(kept)
            values = {name: _convert(block, column, kept) for name, column in columns.items()} if kept else {}
            tokens = [Sample()] * len(kept)
            if text is not None and kept:
                tokens = text.encode([[block.columns[name][row] for row in kept] for name in texts])
            for row in range(len(kept)):
                joined = {name: _join([values[one][row] for one in names]) for name, names in features.items()}
                yield choose_split(number), {**tokens[row], **joined}
                number += 1
    if skipped:
        details["rows_skipped"] = details.get("rows_skipped", 0) + skipped
        details["missing_values"] = dict(Counter(details.get("missing_values", {})) + empty)


def _join(values: list[np.ndarray]) -> np.ndarray:
    if len(values) == 1:
        return values[0]
    joined: np.ndarray = np.concatenate([np.ravel(value) for value in values])
    # numpy makes int64 and float32 float64.
    return joined if joined.dtype == np.int64 else joined.astype(np.float32)


def _complete_rows(
    block: Block, columns: dict[str, _TableColumn], options: TableOptions, empty: Counter[str]
) -> list[int]:
    """The rows that are packed; `empty` counts the cells without a value of those that are not."""
    kept = []
    absent = [name for name in columns if name not in block.columns]
    present = [(name, column.words is None) for name, column in columns.items() if name not in absent]
    if options.missing == "keep":
        present = [(name, False) for name, is_number in present if not is_number]
    for row in range(block.count):
        missing = [*absent, *(name for name, number in present if is_missing(block.columns[name][row], number))]
        if not missing:
            kept.append(row)
        elif options.missing == "skip":
            empty.update(missing)
        else:
            raise DataError(
                f"table {str(block.path)!r}, {block.where(row)}: column {missing[0]!r} has no value. Fill it, or leave "
                "such rows out with --missing skip."
            )
    return kept


def _convert(block: Block, column: _TableColumn, rows: list[int]) -> list[np.ndarray]:
    """A column's values of some rows, as arrays of one dtype."""
    values = [block.columns[column.name][row] for row in rows]
    if column.words is not None:
        return [np.array(column.words[_word(value)], np.int64) for value in values]
    dtype = np.dtype(np.int64 if column.is_integer else np.float32)
    values = [math.nan if is_missing(value) else value for value in values]
    try:
        if column.is_integer and not all(_is_whole(value) for value in values):
            raise ValueError
        if not any(isinstance(value, list) for value in values):
            return list(np.array(values).astype(dtype))
        return [np.array(value, dtype) for value in values]
    except (ValueError, TypeError, OverflowError):
        raise _find_bad_value(block, column, rows, dtype) from None


def _find_bad_value(block: Block, column: _TableColumn, rows: list[int], dtype: np.dtype) -> DataError:
    for row in rows:
        value = block.columns[column.name][row]
        try:
            np.array(value).astype(dtype)
            fits = not column.is_integer or _is_whole(value)
        except (ValueError, TypeError, OverflowError):
            fits = False
        if not fits:
            break
    kind = "whole numbers" if column.is_integer else "numbers"
    return DataError(
        f"table {str(block.path)!r}, {block.where(row)}: column {column.name!r} holds {value!r}, but {kind} before. "
        f"Fix the value, or make the column a class with --categories {column.name}."
    )
