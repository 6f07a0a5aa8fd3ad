"""What a reference model is: a name, a set of typed options, and a function from the options to an ONNX graph.

Options are frozen dataclasses whose fields carry their help text and their bounds, so that the command line and
the checks are made from one description.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onward.errors import ParametersError

OLDEST_OPSET = 13
NEWEST_OPSET = 23


def option(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A field of an options class: its default, one sentence for the command line, and what it may be."""
    bounds = {"choices": choices, "minimum": minimum, "below": below, "maximum": maximum}
    return dataclasses.field(default=default, metadata={"help": help_text, **bounds})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options that every reference model has."""

    opset: int = option(
        18,
        f"version of the ONNX operator set, {OLDEST_OPSET} to {NEWEST_OPSET}",
        minimum=OLDEST_OPSET,
        maximum=NEWEST_OPSET,
    )
    seed: int = option(0, "seed of the initial weights", minimum=0)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ReferenceModel:
    """A model that onward can write as an ONNX graph.

    Attributes:
        name: what the command line calls it.
        summary: one sentence for the command line.
        options: the dataclass of its options.
        build: from options to a checked graph with fresh weights.
    """

    name: str
    summary: str
    options: type[ModelOptions]
    build: Callable[[Any], ir.Model]


def make_options(model: ReferenceModel, values: Mapping[str, Any]) -> ModelOptions:
    """The options of a model from names and values.

    Raises:
        ParametersError: an option is unknown, of the wrong type, or out of its range.
    """
    known = [field.name for field in dataclasses.fields(model.options)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ParametersError(f"{model.name} has no option {name!r}; {hint}Its options: {', '.join(known)}.")
    return model.options(**values)


def check_options(options: ModelOptions) -> None:
    """Checks the type and the range of every field.

    Raises:
        ParametersError: names the first field that is wrong, its value, and what was expected.
    """
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        kind, optional = option_type(hints[field.name])
        if value is None and optional:
            continue
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ParametersError(f"option {field.name} must be of type {kind.__name__}, got {value!r}.")
        _check_range(field.name, value, field.metadata)


def option_type(hint: Any) -> tuple[type, bool]:
    """The type behind an annotation `T` or `T | None`, and whether None is allowed."""
    if isinstance(hint, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        assert len(members) == 1, f"an option is of one type, got {hint}"
        return members[0], True
    return hint, False


def _check_range(name: str, value: Any, bounds: Mapping[str, Any]) -> None:
    choices = bounds["choices"]
    if choices is not None and value not in choices:
        raise ParametersError(f"option {name} is {value!r}; choose one of: {', '.join(choices)}.")
    minimum, below, maximum = bounds["minimum"], bounds["below"], bounds["maximum"]
    if minimum is None and below is None and maximum is None:
        return
    fits = math.isfinite(value) and (minimum is None or value >= minimum)
    fits = fits and (below is None or value < below) and (maximum is None or value <= maximum)
    if not fits:
        wanted = [] if minimum is None else [f"at least {minimum}"]
        wanted += [] if below is None else [f"below {below}"]
        wanted += [] if maximum is None else [f"at most {maximum}"]
        raise ParametersError(f"option {name} is {value}; it must be {' and '.join(wanted)}.")
