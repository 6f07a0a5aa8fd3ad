"""Text files, JSONL and Parquet -> documents, in chunks small enough that none needs to fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from onward.data.packing.options import TextOptions
from onward.data.packing.source import parse_json_line, require
from onward.errors import DataError

CHUNK_BYTES = 1 << 18


class DocumentChunk(NamedTuple):
    """Part of a document: its number, UTF-8 bytes (empty at its end), whether it ends here, and source bytes read."""

    document: int
    text: bytes
    last: bool
    read_bytes: int


def read_documents(paths: list[Path], options: TextOptions) -> Iterator[DocumentChunk]:
    """Walks over all documents; chunks end at line ends where lines are shorter than a chunk.

    Raises:
        DataError: a file cannot be read, or lacks the text field.
    """
    document = 0
    for path in paths:
        try:
            for chunk in _read_file(path, options, document):
                yield chunk
                document = chunk.document + chunk.last
        except OSError as error:
            raise DataError(f"text {str(path)!r} cannot be read: {error.strerror or error}.") from error


def count_bytes(paths: list[Path]) -> int:
    """Size of all files."""
    return sum(path.stat().st_size for path in paths)


def is_split_by_document(paths: list[Path], options: TextOptions) -> bool:
    """Whether documents are numerous enough to be split into train and test undivided.

    That keeps a test sample from continuing a training sample. With few files samples are split instead.
    """
    many = any(path.suffix.lower() in (".jsonl", ".ndjson", ".parquet") for path in paths)
    return many or options.documents == "blank-line" or len(paths) >= 20


def _read_file(path: Path, options: TextOptions, document: int) -> Iterator[DocumentChunk]:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return _read_jsonl(path, options.text_field, document)
    if suffix == ".parquet":
        return _read_parquet(path, options.text_field, document)
    if options.documents == "blank-line":
        return _read_paragraphs(path, document)
    return _read_plain(path, document)


def _read_plain(path: Path, document: int) -> Iterator[DocumentChunk]:
    with open(path, "rb") as file:
        rest = b""
        while block := file.read(CHUNK_BYTES):
            text = rest + block
            end = text.rfind(b"\n") + 1
            if end == 0 and len(text) >= 4 * CHUNK_BYTES:
                end = _whole_characters(text)
            yield DocumentChunk(document, text[:end], False, len(block))
            rest = text[end:]
        yield DocumentChunk(document, rest, True, 0)


def _whole_characters(text: bytes) -> int:
    """Where to cut so that no UTF-8 character is torn."""
    end = len(text)
    while end > len(text) - 4 and text[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if text[end - 1] >= 0xC0 else len(text)


def _read_paragraphs(path: Path, document: int) -> Iterator[DocumentChunk]:
    """Documents are between blank lines."""
    lines: list[bytes] = []
    size = 0
    with open(path, "rb") as file:
        for line in file:
            size += len(line)
            if line.strip():
                lines.append(line)
            elif lines:
                yield DocumentChunk(document, b"".join(lines), True, size)
                document, size = document + 1, 0
                lines.clear()
    if lines:
        yield DocumentChunk(document, b"".join(lines), True, size)


def _read_jsonl(path: Path, text_field: str, document: int) -> Iterator[DocumentChunk]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            record = parse_json_line(line, path, number)
            text = record.get(text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(map(repr, record)) if isinstance(record, dict) else "no keys"
                raise DataError(
                    f"{str(path)!r}, line {number}: no text under {text_field!r} (there are {keys}); name it with "
                    "--text-field."
                )
            yield DocumentChunk(document, text.encode("utf-8", "surrogatepass"), True, len(line))
            document += 1


def _read_parquet(path: Path, text_field: str, document: int) -> Iterator[DocumentChunk]:
    parquet = require("pyarrow.parquet", "packing Parquet")
    arrow = require("pyarrow", "packing Parquet")
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if text_field not in names:
            raise DataError(
                f"{str(path)!r}: no column {text_field!r} (there are {', '.join(map(repr, names))}); name the text's "
                "with --text-field."
            )
        file_bytes, rows = path.stat().st_size, max(1, file.metadata.num_rows)
        row = done = 0
        for batch in file.iter_batches(batch_size=256, columns=[text_field]):
            for value in batch.column(0):
                text = value.as_py()
                if not isinstance(text, str):
                    raise DataError(f"{str(path)!r}, row {row}: column {text_field!r} holds {text!r}, not text.")
                row += 1
                share = file_bytes * row // rows - done
                yield DocumentChunk(document, text.encode(), True, share)
                done += share
                document += 1
    except arrow.ArrowException as error:
        raise DataError(f"Parquet file {str(path)!r} cannot be read: {error}.") from error
