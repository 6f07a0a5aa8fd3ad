"""Packing: text, arrays, tables, and folders of images or recordings into shards."""

from onward.data.packing.command import add_arguments, run
from onward.data.packing.options import ArrayOptions, AudioOptions, ImageOptions, PackOptions, TableOptions, TextOptions
from onward.data.packing.packer import PackSummary, pack

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
