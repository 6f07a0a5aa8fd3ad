"""What the numbers in packed samples mean: classes, categories, tokens, sample rate; and whether two folders agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.data.manifest import MANIFEST_NAME, Manifest
from onward.errors import DataError
from onward.remote.files import read_text, shown
from onward.spelling import shortened
from onward.untrusted_files import parse_json

_TOKENIZER_NAME = "tokenizer.json"
_SHOWN = 8


@dataclass(frozen=True)
class Numbering:
    """A folder of shards and the `pack.json` in it."""

    folder: Path
    manifest: Manifest


def check_same_numbering(first: Numbering, other: Numbering) -> None:
    """Refuses data whose labels, categories, tokens or sample rate mean something else than those of the first.

    One list of names may be the beginning of the other: the numbers then mean the same.

    Raises:
        DataError: they do.
    """
    if first.folder == other.folder:
        return
    ours, theirs = first.manifest.details, other.manifest.details
    for what, mine, its in _lists(ours, theirs):
        differing = next((k for k, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), None)
        if differing is not None:
            raise DataError(
                f"{what} have other numbers in {shown(other.folder)!r} than in {shown(first.folder)!r}, from number "
                f"{differing}: {_listed(its)} against {_listed(mine)} ({MANIFEST_NAME}). {_together(first, other)} Or "
                "pack it again from data with the same names."
            )
    rate, its_rate = ours.get("sample_rate"), theirs.get("sample_rate")
    if None not in (rate, its_rate) and rate != its_rate:
        raise DataError(
            f"the recordings in {shown(other.folder)!r} have {its_rate} Hz, those in {shown(first.folder)!r} {rate} Hz "
            f"({MANIFEST_NAME}). Pack them again with the same rate: onward pack {other.manifest.source} DEST "
            f"--sample-rate {rate}."
        )
    sizes = ours.get("vocabulary_size"), theirs.get("vocabulary_size")
    if None not in sizes and (sizes[0] != sizes[1] or not _have_same_tokens(first.folder, other.folder)):
        counts = f"{sizes[1]} tokens against {sizes[0]}" if sizes[0] != sizes[1] else f"both of {sizes[0]} tokens"
        flag = "--text-tokenizer" if first.manifest.kind == "table" else "--tokenizer"
        raise DataError(
            f"{shown(other.folder)!r} was packed with another tokenizer than {shown(first.folder)!r}, {counts} "
            f"({_TOKENIZER_NAME}). {_together(first, other)} Or pack it again with {flag} "
            f"{shown(first.folder / _TOKENIZER_NAME)}."
        )


def unseen_classes(training: Numbering, test: Numbering) -> str:
    """A sentence on classes of the test data that the training data lack; "" where there are none."""
    mine, its = (one.manifest.details.get("classes") for one in (training, test))
    if not isinstance(mine, list | tuple) or not isinstance(its, list | tuple) or len(its) <= len(mine):
        return ""
    names = shortened([repr(name) for name in its[len(mine) :]], _SHOWN)
    return (
        f"the test data ({shown(test.folder)!r}) have {len(its) - len(mine)} classes that the training data "
        f"({shown(training.folder)!r}) lack: {names}. Pack training data of these classes, or leave them out of the "
        "test data."
    )


def _lists(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Sequence[Any], Sequence[Any]]]:
    """What both number: (what, names of the one, names of the other)."""
    found: list[tuple[str, Any, Any]] = [("classes", ours.get("classes"), theirs.get("classes"))]
    columns = [one if isinstance(one := details.get("categories"), Mapping) else {} for details in (ours, theirs)]
    found += [(f"words of column {name!r}", columns[0][name], columns[1].get(name)) for name in columns[0]]
    return [one for one in found if isinstance(one[1], list | tuple) and isinstance(one[2], list | tuple)]


def _listed(names: Sequence[Any]) -> str:
    return shortened([f"{number} {name!r}" for number, name in enumerate(names)], _SHOWN)


def _together(first: Numbering, other: Numbering) -> str:
    """How both get the same numbers."""
    return (
        f"Pack both together (the second may lack some): onward pack {first.manifest.source} DEST --test-source "
        f"{other.manifest.source}."
    )


def _have_same_tokens(one: Path, other: Path) -> bool:
    """Whether the tokenizers next to the shards give the same numbers; also where one of them is not there."""
    texts = [_read(folder / _TOKENIZER_NAME) for folder in (one, other)]
    if None in texts or texts[0] == texts[1]:
        return True
    # Padding and truncation, which also are in the file, do not number tokens.
    parts = [_tokens(text, folder) for text, folder in zip(texts, (one, other), strict=True)]
    return parts[0] == parts[1]


def _read(path: Path) -> str | None:
    try:
        return read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{shown(path)!r} cannot be read: {error}. Pack the data again.") from error


def _tokens(text: str | None, folder: Path) -> object:
    try:
        values = parse_json(text or "")
        return values["model"], [(one["id"], one["content"]) for one in values.get("added_tokens") or ()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{shown(folder / _TOKENIZER_NAME)!r} is no tokenizer: {error}. Pack the data again."
        ) from error
