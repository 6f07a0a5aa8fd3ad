"""What every kind of source offers to packing, and how files are found and missing packages named."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from onward.errors import DataError, UserError
from onward.spelling import shortened

Sample = dict[str, np.ndarray]
ChooseSplit = Callable[[int], str]
"""Number of a sample or document -> "train" or "test"."""
Advance = Callable[[int], None]
"""Called with what was read since the last call, in the source's unit."""
Read = Callable[[ChooseSplit, Advance], Iterator[tuple[str, Sample]]]
"""Gives ("train" or "test", sample) in a fixed order."""

SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "text": (".txt", ".text", ".md", ".rst", ".py"),
    "arrays": (".npz", ".npy"),
    "table": (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"),
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"),
    "audio": (".wav", ".flac", ".ogg", ".mp3", ".aiff", ".aif"),
}
"""Kind of source -> the suffixes by which its files are found in a folder."""

_IN_CLASS_FOLDERS = ("images", "audio")
"""Kinds whose labels are the names of folders."""

_ROWS = (".jsonl", ".ndjson", ".parquet", ".csv", ".tsv")
_OTHER_SUFFIXES = {"text": _ROWS[:3], "chat": _ROWS, "instruct": _ROWS, "preference": _ROWS}
"""Also read by a kind, where the kind was asked for."""


_STRAY_FILES_SHARE = 0.2
"""A folder has a kind if the files of all others are at most this share of its files: a readme next to images."""


class SourceFiles(NamedTuple):
    """The kind of a source and its files; `ignored` are those of other kinds in a folder whose kind was found out."""

    kind: str
    paths: list[Path]
    ignored: tuple[Path, ...] = ()

    def describe_ignored(self) -> str:
        """How many files are not read, and which; "" where all are."""
        if not self.ignored:
            return ""
        names = shortened([repr(path.name) for path in self.ignored], 3)
        return f"{len(self.ignored)} of other kinds than {self.kind}: {names}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened source.

    Attributes:
        unit: what progress counts: bytes, samples, images, recordings.
        total: how many of them there are.
        read: gives ("train" or "test", sample) in a fixed order.
        details: what the manifest says of this kind; may be filled while reading.
        files: name -> text of files that belong next to the shards.
    """

    unit: str
    total: int
    read: Read
    details: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def require(package: str, what_for: str) -> ModuleType:
    """Imports a package of the `pack` extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what_for} needs the Python package {package.partition('.')[0]!r}, which is not installed: run "
            "pip install onward[pack]"
        ) from error


def parse_json_line(line: bytes, path: Path, number: int) -> Any:
    """One line of a JSONL file.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        column = min(error.pos, len(error.doc.rstrip())) + 1
        what = f"{error.msg[:1].lower()}{error.msg[1:]} at column {column}"
    except ValueError as error:
        what = str(error)
    raise DataError(f"{str(path)!r}, line {number} is not JSON: {what}. Fix the line, or remove it.")


def make_split_chooser(test_fraction: float, seed: int) -> ChooseSplit:
    """Assigns numbers to "test" with the given probability; a number's split depends on it and on `seed` alone."""
    threshold = int(test_fraction * 2**64)

    def choose(number: int) -> str:
        digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
        return "test" if int.from_bytes(digest, "little") < threshold else "train"

    return choose if test_fraction > 0 else lambda _: "train"


def find_source_files(source: Path, kind: str | None, pattern: str = "", exclude: Sequence[str] = ()) -> SourceFiles:
    """The kind of a source and its files, sorted by path; hidden files and folders are left out.

    Args:
        source: a file or a folder, walked to its leaves.
        kind: None: found out from suffixes; a few files of another kind are left out.
        pattern: of file names in a folder; empty: the suffixes of the kind.
        exclude: patterns of names of files and folders to leave out.

    Raises:
        DataError: nothing there, nothing of a known kind, or several kinds.
    """
    if source.is_file():
        kind = kind or _kind_of_suffix(source)
        return SourceFiles(kind, [source])
    if not source.is_dir():
        raise DataError(f"source {str(source)!r} does not exist; give a file or a folder.")
    everything = [path for path in _walk(source, exclude) if not pattern or fnmatchcase(path.name, pattern)]
    is_asked, others = kind is not None, _OTHER_SUFFIXES.get(kind or "", ())
    kind = kind or _kind_of_folder(source, everything, pattern)
    suffixes = SUFFIXES.get(kind, ()) + others
    paths = [path for path in everything if pattern or path.suffix.lower() in suffixes]
    if not paths:
        wanted = f"of the name {pattern!r}" if pattern else f"with the suffix {', '.join(suffixes)}"
        raise DataError(f"source folder {str(source)!r} holds no files {wanted} ({kind}); name others with --pattern.")
    if pattern:
        ignored = list[Path]()
    elif kind in _IN_CLASS_FOLDERS:  # every file in a class folder is meant to be a sample
        ignored = [path for path in everything if path.suffix.lower() not in suffixes]
    else:
        known = {suffix for of_kind in SUFFIXES.values() for suffix in of_kind}.difference(suffixes)
        ignored = [path for path in everything if path.suffix.lower() in known and not is_asked]
    if kind in _IN_CLASS_FOLDERS:
        _check_class_folders(source, everything, paths, exclude, kind)
    return SourceFiles(kind, paths, tuple(ignored))


def _check_class_folders(
    source: Path, everything: Sequence[Path], paths: Sequence[Path], exclude: Sequence[str], kind: str
) -> None:
    """Refuses a class of which no file is read: it would vanish, and those after it would get its number."""
    read = {path.relative_to(source).parts[0] for path in paths}
    for entry in sorted(source.iterdir()):
        if _is_left_out(entry, exclude) or not entry.is_dir() or entry.name in read:
            continue
        inside = [path for path in everything if path.relative_to(source).parts[0] == entry.name]
        names = shortened([repr(path.name) for path in inside], 3)
        what = f"holds {len(inside)} files, {names}" if inside else "holds nothing"
        if entry.is_symlink():
            what = "is a link, which is not followed"
        raise DataError(
            f"{str(source)!r} has the class folder {entry.name!r} without files to read ({kind}: "
            f"{', '.join(SUFFIXES[kind])}): it {what}. Convert its files; or leave the class out: move the "
            f"folder elsewhere, or pass --exclude {entry.name!r} to onward pack."
        )


def _is_left_out(entry: Path, exclude: Sequence[str]) -> bool:
    return entry.name.startswith(".") or any(fnmatchcase(entry.name, pattern) for pattern in exclude)


def _walk(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """Files below a folder in the order of their paths' parts; links to folders are not followed."""
    for entry in sorted(folder.iterdir()):
        if _is_left_out(entry, exclude):
            continue
        if entry.is_dir():
            if not entry.is_symlink():
                yield from _walk(entry, exclude)
        elif entry.is_file():
            yield entry


def _kind_of_suffix(path: Path) -> str:
    for kind, suffixes in SUFFIXES.items():
        if path.suffix.lower() in suffixes and kind not in _IN_CLASS_FOLDERS:
            return kind
    known = ", ".join(suffix for kind, own in SUFFIXES.items() if kind not in _IN_CLASS_FOLDERS for suffix in own)
    raise DataError(
        f"the kind of {str(path)!r} is not clear from its suffix (known: {known}); pass --kind text, arrays or table."
    )


def _kind_of_folder(folder: Path, paths: Sequence[Path], pattern: str) -> str:
    counts = {
        kind: count
        for kind, suffixes in SUFFIXES.items()
        if (count := sum(path.suffix.lower() in suffixes for path in paths))
    }
    if len(counts) == 1:
        return next(iter(counts))
    most = max(counts, key=counts.__getitem__, default="")
    if counts and not pattern and sum(counts.values()) - counts[most] <= _STRAY_FILES_SHARE * counts[most]:
        return most
    found = ", ".join(f"{count} of {kind}" for kind, count in counts.items()) or "none of a known suffix"
    named = f" named {pattern!r}" if pattern else ""
    raise DataError(
        f"source folder {str(folder)!r} holds {len(paths)} files{named}: {found}. Pass --kind text, arrays, table, "
        "images or audio, or keep files of one kind in the folder."
    )
