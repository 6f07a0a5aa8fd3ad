"""A size stands for five numbers, each of which can be given by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from onward.errors import ParametersError
from onward.models.reference_model import option
from onward.models.transformer_options import TransformerOptions, TransformerSize

TINY = TransformerSize(layers=2, heads=2, width=8, vocab_size=16, context_length=4)


@dataclass(frozen=True, kw_only=True)
class Options(TransformerOptions):
    """Of a transformer of one size."""

    SIZES: ClassVar[dict[str, TransformerSize]] = {"tiny": TINY}
    size: str = option("tiny", "of the network", choices=("tiny",))


def test_what_is_not_given_follows_the_size() -> None:
    assert Options().shape == TINY
    assert Options(heads=4, vocab_size=1).shape == TransformerSize(
        layers=2, heads=4, width=8, vocab_size=1, context_length=4
    )


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ParametersError, match=r"width 8 cannot be split into 3 heads; choose .* \(1, 2, 4, 8\) or ano"):
        Options(heads=3)
    with pytest.raises(ParametersError, match="heads"):
        Options(heads=0)
    with pytest.raises(ParametersError, match="dropout"):
        Options(dropout=1.0)
