"""The types of fields in `Parameters`. Numbers and switches are taken as they are: neither `true` as 1 nor "8" as 8."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

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
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Ratio = Annotated[float, Field(strict=True, ge=0, lt=1)]
"""Of dropout: the share that is set to zero."""
Decay = Annotated[float, Field(strict=True, ge=0, lt=1)]
"""Of a moving average: what remains of it at each update."""
