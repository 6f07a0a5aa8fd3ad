"""Errors about a file or folder, with the field of RUN.yaml that names it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onward.errors import UserError
from onward.parameters import Parameters
from onward.remote.files import shown


@contextlib.contextmanager
def naming_path_fields(parameters: Parameters) -> Iterator[None]:
    """Adds to a user's error the field whose path it mentions, unless the message names the field itself."""
    try:
        yield
    except UserError as error:
        text = str(error)
        fields = [(len(path), field) for field, path in path_fields(parameters) if _mentions(text, path)]
        longest = max(fields, default=(0, ""))[0]
        named = [field for length, field in fields if length == longest]
        if named and not any(field in text for field in named):
            error.add_note(f"The path is set by {' and '.join(named)}; correct it there.")
        raise


def path_fields(parameters: Parameters) -> Iterator[tuple[str, str]]:
    """`section.field` and the path that it holds, for every path of the sections."""
    for section in dataclasses.fields(parameters):
        held = getattr(parameters, section.name)
        for one in dataclasses.fields(held) if dataclasses.is_dataclass(held) else ():
            value: Any = getattr(held, one.name)
            for path in value if isinstance(value, tuple) else (value,):
                if isinstance(path, Path):
                    yield f"{section.name}.{one.name}", shown(path)


def _mentions(text: str, path: str) -> bool:
    """Whether a message is about a path; one that is a plain word, such as data, only in quotes or before a slash."""
    is_word = re.fullmatch(r"\w+", path) is not None
    after = r"(?=['\"/])" if is_word else r"(?![\w-])"
    return re.search(rf"(?<![\w/.-]){re.escape(path)}{after}", text) is not None
