"""Packing: text, arrays, tables, and folders of images or recordings into shards."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.data.packing.command import add_arguments as add_arguments
    from onward.data.packing.command import run as run
    from onward.data.packing.options import ArrayOptions as ArrayOptions
    from onward.data.packing.options import AudioOptions as AudioOptions
    from onward.data.packing.options import ImageOptions as ImageOptions
    from onward.data.packing.options import PackOptions as PackOptions
    from onward.data.packing.options import TableOptions as TableOptions
    from onward.data.packing.options import TextOptions as TextOptions
    from onward.data.packing.packer import PackSummary as PackSummary
    from onward.data.packing.packer import pack as pack

_HOMES = {
    "ArrayOptions": "options",
    "AudioOptions": "options",
    "ImageOptions": "options",
    "PackOptions": "options",
    "PackSummary": "packer",
    "TableOptions": "options",
    "TextOptions": "options",
    "add_arguments": "command",
    "pack": "packer",
    "run": "command",
}
"""Public name -> the module here that it lives in; imported at first use: a run on shards packs nothing."""

__all__ = [
    "ArrayOptions",
    "AudioOptions",
    "ImageOptions",
    "PackOptions",
    "PackSummary",
    "TableOptions",
    "TextOptions",
    "add_arguments",
    "pack",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
