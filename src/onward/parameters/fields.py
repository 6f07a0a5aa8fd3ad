"""Every field of a RUN.yaml with type, unit, default and meaning, read from the dataclasses and their docstrings."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import re
import textwrap
import typing
from typing import Any

from onward.errors import ParametersError
from onward.parameters.field_types import OneOf
from onward.parameters.run import Parameters
from onward.parameters.yaml_file import alternatives
from onward.spelling import did_you_mean

_TYPES = {
    "Flag": "true or false",
    "BatchSize": "a whole number from 1",
    "Count": "a whole number from 1",
    "CountFromZero": "a whole number from 0",
    "WholeNumber": "a whole number",
    "Seed": "a whole number from 0",
    "ZeroStage": "0, 1, 2 or 3",
    "Number": "a number",
    "FiniteNumber": "a number",
    "NonNegative": "a number from 0",
    "NonPositive": "a number up to 0",
    "FromOne": "a number from 1",
    "Positive": "a number above 0",
    "Share": "a number from 0 to 1",
    "PositiveShare": "a number above 0, to 1",
    "ShareBelowOne": "a number from 0 to below 1",
    "Path": "a path",
    "str": "text",
}
"""Annotation -> in words."""

_UNITS = {
    r".*_steps|evaluation_period|(first|last)_step": "steps (forward/backward passes)",
    r"display_loss_steps|checkpoint_period|keep_every|.*_updates?": "weight updates",
    r".*_epochs": "passes over the training data",
    r"(eval_)?batch_size": "samples",
    r"patience": "evaluations",
    r".*_seconds": "seconds",
    r".*_gb": "GB (10^9 bytes)",
}
"""Pattern of names -> what they are counted in; a later pattern comes before an earlier one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldHelp:
    """A field as a user sees it.

    Attributes:
        name: `section.field`.
        type: what may be given, in words.
        unit: what is counted; empty: nothing is.
        default: as one would write it in YAML; empty: absent.
        is_required: whether there is no default.
        meaning: from the docstring.
    """

    name: str
    type: str
    unit: str
    default: str
    is_required: bool
    meaning: str


def sections() -> dict[str, type]:
    """Section -> its dataclass, in the order of `Parameters`."""
    hints = typing.get_type_hints(Parameters)
    return {f.name: hints[f.name] for f in dataclasses.fields(Parameters) if f.name != "next_rounds"}


def summary_of(kind: type) -> str:
    """The first paragraph of a class's docstring, in one line."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def meanings(kind: type) -> dict[str, str]:
    """Field name -> what the class's docstring says of it, `{names}` being those that a registry has."""
    text, hints = inspect.getdoc(kind) or "", typing.get_type_hints(kind, include_extras=True)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.partition("Attributes:\n")[2].splitlines():
        match = re.match(r"    (\w[\w, ]*): (.*)", line)
        if match:
            names = [name.strip() for name in match[1].split(",")]
            found |= dict.fromkeys(names, match[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    for name, meaning in found.items():
        for one in _registries(hints.get(name)):
            found[name] = meaning.replace("{names}", one.described())
    return found


def default_of(field: dataclasses.Field[Any]) -> str:
    """A field's default as one would write it in YAML; empty where there is none."""
    value = field.default
    if value is None or value == () or value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def fields_of(section: str, kind: type) -> list[FieldHelp]:
    """The fields of a section."""
    told, hints = meanings(kind), typing.get_type_hints(kind, include_extras=True)
    return [
        FieldHelp(
            name=f"{section}.{one.name.rstrip('_')}",
            type=_type_in_words(one, hints[one.name]),
            unit=_unit(one.name),
            default=default_of(one),
            is_required=is_required(one),
            meaning=told.get(one.name, ""),
        )
        for one in dataclasses.fields(kind)
    ]


def field_names() -> list[str]:
    """`section.field` of every field."""
    return [f"{name}.{f.name.rstrip('_')}" for name, kind in sections().items() for f in dataclasses.fields(kind)]


def listing(width: int = 100) -> str:
    """All fields, a section after the other."""
    return "\n".join(_section_text(name, kind, width) for name, kind in sections().items())


def explain(name: str, width: int = 100) -> str:
    """What a section, or a field as `section.field`, means.

    Raises:
        ParametersError: there is none of that name; it names the nearest.
    """
    found = sections()
    section, _, field = name.partition(".")
    if name in found:
        return _section_text(name, found[name], width)
    for one in fields_of(section, found[section]) if section in found else ():
        if one.name == name:
            return _field_text(one, found[section], field, width)
    known = [*found, *field_names()]
    by_field = [one for one in known if one.partition(".")[2] == name]
    hint = did_you_mean(name, by_field or known, most=3, cutoff=0.1 if by_field else 0.5)
    hint = hint or did_you_mean(name, [one for one in known if field and field in one], most=3, cutoff=0.0)
    hint = hint or f" The sections are: {', '.join(found)}."
    raise ParametersError(f"{name!r} is neither a command, a section nor a field of a RUN.yaml.{hint}")


def _section_text(name: str, kind: type, width: int) -> str:
    lines = [f"{name}: {summary_of(kind)}"]
    for one in fields_of(name, kind):
        value = "required" if one.is_required else f"default {one.default}" if one.default else ""
        about = ", ".join(part for part in (one.unit, value) if part)
        lines.append(f"  --{one.name}" + (f"  [{about}]" if about else ""))
        lines += textwrap.wrap(one.meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def _field_text(one: FieldHelp, kind: type, field: str, width: int) -> str:
    lines = [one.name, ""]
    lines += textwrap.wrap(one.meaning, width, initial_indent="  ", subsequent_indent="  ")
    lines += ["", f"  expected  {one.type}"]
    lines += [f"  unit      {one.unit}"] if one.unit else []
    lines.append(f"  default   {'none: it is required' if one.is_required else one.default or 'absent'}")
    rules = [k for k in alternatives(typing.get_type_hints(kind)[field]) if dataclasses.is_dataclass(k)]
    for rule in rules if field in typing.get_type_hints(kind) else ():
        lines += ["", f"  {summary_of(rule)}" if isinstance(rule, type) else ""]
        told = meanings(rule) if isinstance(rule, type) else {}
        for part in dataclasses.fields(rule):
            text = f"{part.name.rstrip('_')}: {told.get(part.name, '')}"
            lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _type_in_words(field: dataclasses.Field[Any], hint: Any) -> str:
    text = str(field.type)
    parts = [part.strip() for part in text.split(" | ")]
    words = [_TYPES[part] for part in parts if part in _TYPES]
    choices = [
        c for one in alternatives(hint) if typing.get_origin(one) is typing.Literal for c in typing.get_args(one)
    ]
    choices += [name for names in _registries(hint) for name, _ in names.names()]
    if choices:
        chosen = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices]
        words = [*words, f"one of {', '.join(chosen)}"]
        words = [f"a list of {words[-1].removeprefix('one of ')}"] if text.startswith("tuple") else words
    elif "Callable" in text or any(typing.get_origin(one) is collections.abc.Callable for one in alternatives(hint)):
        words = ["in Python, a function"]
    elif text.startswith("tuple"):
        words = ["a list"]
    elif text.startswith("Mapping"):
        words = ["names with values"]
    return " or ".join(words) if words else "a value"


def _registries(hint: Any) -> list[OneOf]:
    return [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, OneOf)]


def _unit(name: str) -> str:
    for pattern, unit in reversed(_UNITS.items()):
        if re.fullmatch(pattern, name):
            return unit
    return ""
