"""CSV, JSONL and Parquet files -> blocks of rows, each column a numpy array or a list."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from onward.data.packing.options import TableOptions
from onward.data.packing.source import parse_json_line, require
from onward.errors import DataError

BLOCK_ROWS = 1024

MISSING_WORDS = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "none", "?"})
"""What a cell of a column of numbers holds, in any case, where there is no number."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of one file.

    Attributes:
        path: the file.
        where: names a row of this block for messages, as "line 7".
        columns: name -> values, one per row: str (CSV), or what JSON or Arrow gave; None where there is none.
        count: rows.
        read_bytes: how much of the file they took.
    """

    path: Path
    where: Callable[[int], str]
    columns: dict[str, list[Any]]
    count: int
    read_bytes: int


def is_missing(value: Any, is_number: bool = True) -> bool:
    """Whether a cell holds no value; of a column of numbers also "NA", "nan" and the like."""
    if value is None or not is_number:
        return value is None
    return value != value if isinstance(value, float) else isinstance(value, str) and _bare(value) in MISSING_WORDS


def _bare(word: str) -> str:
    return word.strip().casefold()


def read_blocks(path: Path, options: TableOptions) -> Iterator[Block]:
    """Reads a table file in blocks of rows.

    Raises:
        DataError: it cannot be read, or a row is not of the table's form.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path)
        elif suffix in (".jsonl", ".ndjson"):
            yield from _read_jsonl(path)
        else:
            yield from _read_csv(path, "\t" if suffix == ".tsv" else options.delimiter, options.header)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"table {str(path)!r} cannot be read: {error}.") from error


def _read_csv(path: Path, delimiter: str, header: bool) -> Iterator[Block]:
    if len(delimiter) != 1:
        raise DataError(f"the delimiter is {delimiter!r}; expected one character.")
    with open(path, "rb") as file:
        lines = _Lines(file)
        reader = csv.reader(lines, delimiter=delimiter)
        names: list[str] = []
        try:
            if header:
                names = next(reader, [])
                if len(set(names)) != len(names):
                    raise DataError(f"table {str(path)!r}: the header names a column twice: {names}.")
            while rows := [(reader.line_num, row) for row in islice(reader, BLOCK_ROWS)]:
                rows = [(number, row) for number, row in rows if row]
                names = names or [f"column_{k}" for k in range(len(rows[0][1]))] if rows else names
                for number, row in rows:
                    if len(row) != len(names):
                        raise DataError(
                            f"table {str(path)!r}, line {number}: {len(row)} values for {len(names)} columns; is "
                            f"{delimiter!r} the delimiter (--delimiter)?"
                        )
                numbers = [number for number, _ in rows]
                columns = {name: [row[k] or None for _, row in rows] for k, name in enumerate(names)}
                yield Block(
                    path=path,
                    where=_line_of(numbers),
                    columns=columns,
                    count=len(rows),
                    read_bytes=lines.take(),
                )
        except csv.Error as error:
            raise DataError(f"table {str(path)!r}, line {reader.line_num}: {error}.") from error


def _line_of(numbers: Sequence[int]) -> Callable[[int], str]:
    return lambda row: f"line {numbers[row]}"


def _row_after(start: int) -> Callable[[int], str]:
    return lambda row: f"row {start + row}"


class _Lines:
    """Decoded lines of a file, counting the bytes they took."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._taken = 0
        self._first = True

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._file)
        self._taken += len(line)
        text: str = line.decode("utf-8-sig" if self._first else "utf-8")
        self._first = False
        return text

    def take(self) -> int:
        taken, self._taken = self._taken, 0
        return taken


def _read_jsonl(path: Path) -> Iterator[Block]:
    with open(path, "rb") as file:
        numbered = enumerate(file, start=1)
        while lines := [(number, line) for number, line in islice(numbered, BLOCK_ROWS)]:
            records, numbers = [], []
            for number, line in lines:
                if not line.strip():
                    continue
                record = parse_json_line(line, path, number)
                if not isinstance(record, dict):
                    raise DataError(f"{str(path)!r}, line {number}: expected an object, found {type(record).__name__}.")
                records.append(record)
                numbers.append(number)
            names = dict.fromkeys(name for record in records for name in record)
            columns = {name: [record.get(name) for record in records] for name in names}
            size = sum(len(line) for _, line in lines)
            yield Block(
                path=path,
                where=_line_of(numbers),
                columns=columns,
                count=len(records),
                read_bytes=size,
            )


def _read_parquet(path: Path) -> Iterator[Block]:
    parquet = require("pyarrow.parquet", "packing Parquet")
    arrow = require("pyarrow", "packing Parquet")
    try:
        file = parquet.ParquetFile(path)
        rows, size = max(1, file.metadata.num_rows), path.stat().st_size
        start = 0
        for batch in file.iter_batches(batch_size=BLOCK_ROWS):
            columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
            read = size * (start + batch.num_rows) // rows - size * start // rows
            yield Block(
                path=path,
                where=_row_after(start),
                columns=columns,
                count=batch.num_rows,
                read_bytes=read,
            )
            start += batch.num_rows
    except arrow.ArrowException as error:
        raise DataError(f"Parquet file {str(path)!r} cannot be read: {error}.") from error
