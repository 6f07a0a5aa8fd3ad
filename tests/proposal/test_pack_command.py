"""Packing options as a command line that a shell and `onward pack` read back as the same options."""

from __future__ import annotations

import shlex

import pytest

from onward.data.packing.options import ImageOptions, PackOptions, TableOptions
from onward.proposal.pack_command import pack_command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PackOptions(), []),
        (PackOptions(test_fraction=0.25, progress=False), ["--test-fraction", "0.25"]),
        (
            PackOptions(transform=(("x", "scale:0.5"), ("x", "reshape:2x2")), cast=(("y", "int64"),)),
            ["--transform", "x=scale:0.5", "--transform", "x=reshape:2x2", "--cast", "y=int64"],
        ),
        (
            PackOptions(source=ImageOptions(image_size=(8, 9), mean=(-0.5, 0.1, 1.0), std=(2.0,))),
            ["--image-size", "8x9", "--mean=-0.5,0.1,1.0", "--std=2.0"],
        ),
        (PackOptions(overwrite=True), ["--overwrite"]),
    ],
)
def test_what_is_a_default_is_left_out(options: PackOptions, words: list[str]) -> None:
    assert shlex.split(pack_command("my data", "it's", options)) == ["onward", "pack", "my data", "it's", *words]


def test_every_kind_of_source_has_a_command() -> None:
    assert pack_command("a", "b", PackOptions(source=TableOptions())) == "onward pack a b"
