"""An ONNX file as a protobuf message, in every form that onnx knows: binary, JSON and two of text. Nesting is measured
before a parser that calls itself sees it: onnx's own parser of text ends the process where it is too deep."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import onnx

from onward.untrusted_files import read_bytes

LARGEST_MESSAGE_BYTES = 2**31 - 1
"""Protobuf's own limit for one message; larger models keep their tensors in files next to them."""

DEEPEST_TEXT = 200
"""Brackets inside of each other in a file of text; protobuf ends at 100 messages, which is 33 graphs."""

_BRACKETS_OR_TEXT = re.compile(rb"""[\[({<]|[\])}>]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|=>""", re.DOTALL)


def load_message(path: Path) -> onnx.ModelProto:
    """The message of a file; tensors that it keeps in other files stay there.

    Raises:
        OSError: it cannot be opened, is no regular file, or larger than a message can be.
        ValueError: it is nested too deeply.
        Exception: whatever the parser of its form finds wrong.
    """
    content = read_bytes(path, LARGEST_MESSAGE_BYTES)
    form = onnx.serialization.registry.get_format_from_file_extension(os.path.splitext(path)[1]) or "protobuf"
    if form != "protobuf":
        _check_nesting(content)
    return onnx.load_model_from_string(content, format=form)


def _check_nesting(content: bytes) -> None:
    depth = 0
    for match in _BRACKETS_OR_TEXT.finditer(content):
        first = match[0]
        if first in (b"[", b"(", b"{", b"<"):
            depth += 1
            if depth > DEEPEST_TEXT:
                raise ValueError(f"it is nested more than {DEEPEST_TEXT} brackets deep")
        elif first in (b"]", b")", b"}", b">"):
            depth = max(0, depth - 1)


def external_locations(proto: onnx.ModelProto) -> Iterator[str]:
    """The names of the files in which tensors of a model are stored, as the model has them."""
    for tensor in onnx.external_data_helper._get_all_tensors(proto):
        if onnx.external_data_helper.uses_external_data(tensor):
            yield from (entry.value for entry in tensor.external_data if entry.key == "location")
