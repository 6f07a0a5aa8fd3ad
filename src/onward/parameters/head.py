"""The section `head` of RUN.yaml: a last layer for other classes than the file was trained for."""

from __future__ import annotations

from dataclasses import dataclass

from onward.parameters.field_types import STRICT, Count


@dataclass(frozen=True, kw_only=True)
class Head:
    """A new last layer, drawn at random, in place of the one that computes `loss.prediction`.

    Attributes:
        num_classes: how many outputs it has; a layer with that many already is kept. Absent: the file's own layer.
    """

    __pydantic_config__ = STRICT
    num_classes: Count | None = None
