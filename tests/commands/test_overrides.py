"""Fields on the command line: values, and what is not understood."""

from __future__ import annotations

import pytest

from onward.commands.overrides import read_overrides
from onward.errors import ParametersError


def test_overrides() -> None:
    given = ["--a.b", "1", "--a.c=2", "--d.e", "-3", "--f.g=[x, y]", "--h.i="]
    assert read_overrides(given) == {"a.b": "1", "a.c": "2", "d.e": "-3", "f.g": "[x, y]", "h.i": ""}
    for wrong, words in (
        (["a.b", "1"], r"^'a\.b' is not understood; set fields as --section\.field value\.$"),
        (
            ["--batch_size", "1"],
            r"^'--batch_size' is not understood; set fields as --section\.field value\. "
            r"Did you mean '--training\.batch_size'\?$",
        ),
        (["--a.b"], r"^--a\.b has no value; pass --a\.b VALUE\.$"),
    ):
        with pytest.raises(ParametersError, match=words):
            read_overrides(wrong)
