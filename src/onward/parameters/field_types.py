"""The types of fields in `Parameters`. Numbers and switches are taken as they are: neither `true` as 1 nor "8" as 8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic_core import core_schema

from onward.spelling import listed

STRICT = ConfigDict(extra="forbid", revalidate_instances="always", populate_by_name=True)
"""Of every section of the parameters."""

Flag = Annotated[bool, Field(strict=True)]
WholeNumber = Annotated[int, Field(strict=True)]
CountFromZero = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
BatchSize = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
"""Samples at a time: more are a typing error, and no memory holds them."""
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
ZeroStage = Annotated[int, Field(strict=True, ge=0, le=3)]
Number = Annotated[float, Field(strict=True)]
FiniteNumber = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
NonPositive = Annotated[float, Field(strict=True, allow_inf_nan=False, le=0)]
FromOne = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
PositiveShare = Annotated[float, Field(strict=True, gt=0, le=1)]
ShareBelowOne = Annotated[float, Field(strict=True, ge=0, lt=1)]


@dataclass(frozen=True)
class OneOf:
    """Annotates a field that takes one of the names in a registry, which are looked up when it is checked.

    Attributes:
        names: as the field takes them -> what the reference says of each, or nothing.
    """

    names: Callable[[], Sequence[tuple[str, str]]]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def check(self, value: Any) -> str:
        """The name itself.

        Raises:
            ValueError: it is none of them.
        """
        names = [name for name, _ in self.names()]
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"expected {listed([repr(name) for name in names])}")
        return value

    def described(self) -> str:
        """All names, each with what the reference says of it."""
        return listed([f"`{name}` ({remark})" if remark else f"`{name}`" for name, remark in self.names()])


def auto_or_flag(value: Any) -> Any:
    """`auto`, true or false as they are. Raises ValueError for anything else, 1 and 0 included."""
    if value == "auto" or isinstance(value, bool):
        return value
    raise ValueError("expected auto, true or false")
