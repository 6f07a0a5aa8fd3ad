"""The section `limits` of RUN.yaml: how much a file may ask of the machine before it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pydantic

from onward.errors import ParametersError
from onward.parameters.field_types import STRICT, Count, Positive
from onward.parameters.yaml_file import override, sentences
from onward.untrusted_files import validated


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What reading a model or data may take: a small file can stand for more than any machine holds.

    Every model of today is far below the defaults. Commands without a RUN.yaml take these fields as
    `--limits.nodes N`; in Python pass `onward.parameters.Limits(nodes=...)` as `limits` of `onward.to_torch`, and
    `parameters={"limits": {"nodes": ...}}` to `onward.fit`.

    Attributes:
        model_gb: stored tensors of a model together, in GB (10^9 bytes), those in files next to it included.
        nodes: nodes of a model, those of nested graphs included, functions expanded at every call.
        nesting: graphs inside of each other, and functions that call each other.
        tensor_axes: axes of an input, an output or a stored tensor.
        shape_numbers: numbers that follow from constants before a model runs, as shape arithmetic computes them, for
            one value.
        constant_gb: a tensor whose sizes stored numbers give, as a range or a fill, in GB (10^9 bytes).
        array_gb: what of an array in a compressed archive (.npz) is in memory at once when it is packed: a row, or all
            of it in Fortran order; in GB (10^9 bytes).
        template_seconds: to write one conversation of chat data by a chat template.
        template_characters: of all texts together that a chat template makes for one conversation.
        preparation_seconds: from reading a model to the graph that trains, before any step.
    """

    __pydantic_config__ = STRICT
    model_gb: Positive = 2000.0
    nodes: Count = 500_000
    nesting: Count = 30
    tensor_axes: Count = 64
    shape_numbers: Count = 1_000_000
    constant_gb: Positive = 16.0
    array_gb: Positive = 16.0
    template_seconds: Positive = 10.0
    template_characters: Count = 250_000_000
    preparation_seconds: Positive = 3600.0

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Limits:
        """Limits of a section as RUN.yaml holds it.

        Raises:
            ParametersError: a field is unknown or impossible.
        """
        if not isinstance(given, Mapping):
            raise ParametersError(f"limits is {given!r}; expected fields with their values.")
        try:
            return validated(cls, dict(given))
        except pydantic.ValidationError as error:
            raise ParametersError("\n".join(f"limits.{line}" for line in sentences(error, cls))) from error

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, str]) -> Limits:
        """Limits of a command line: `limits.field` -> value written as in YAML. Raises as `from_fields`."""
        raw: dict[str, Any] = {"limits": {}}
        for dotted, text in overrides.items():
            override(raw, dotted, text)
        return cls.from_fields(raw["limits"])

    def changed(self) -> dict[str, float]:
        """The fields that are not at their defaults."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value != getattr(DEFAULT_LIMITS, name)}


DEFAULT_LIMITS = Limits()
"""Of calls in Python that pass none."""

UNLIMITED = Limits(
    model_gb=1e12, nodes=10**15, nesting=10**6, tensor_axes=10**6, shape_numbers=10**15, constant_gb=1e12,
    array_gb=1e12, template_seconds=1e9, template_characters=10**15, preparation_seconds=1e9,
)  # fmt: skip
"""For files that this process has just written itself, from a model that was within its limits."""
