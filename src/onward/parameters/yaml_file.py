"""RUN.yaml as text: reading it, changing single fields, and saying in plain sentences what is wrong with it."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from onward.errors import ParametersError
from onward.remote.files import is_file, read_text, shown, url_of
from onward.spelling import did_you_mean

LARGEST_YAML_BYTES = 16 << 20
MOST_YAML_VALUES = 100_000
"""Of a file, aliases counted as often as they are used: nine lines of nine aliases each stand for 9^9 values."""
DEEPEST_YAML = 50
"""Lists and mappings inside of each other."""


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that refuses a key given twice, where YAML would let the last one win, and that reads 6e-4
    as a number, as YAML 1.2 does (1.1 wants 6.0e-4). What it gives is of bounded depth and size."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._count = 0
        self._values_of: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node; refuses what is too deep, too large or contains itself."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark, is_alias = event.start_mark, isinstance(event, yaml.AliasEvent)
        before, self._count, self._depth = self._count, self._count + 1, self._depth + 1
        if self._depth > DEEPEST_YAML:
            problem = f"it is nested more than {DEEPEST_YAML} deep"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node is not None:
            if node not in self._values_of:
                problem = f"the alias *{event.anchor} is used inside of what it names"
                raise yaml.composer.ComposerError(None, None, problem, mark)
            self._count += self._values_of[node]
        elif node is not None:
            self._values_of[node] = self._count - before
        if self._count > MOST_YAML_VALUES:
            problem = f"it holds more than {MOST_YAML_VALUES:,} values, each alias counted with all that it names"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; of a number or date that Python cannot hold the error names the place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, LookupError, AttributeError, TypeError) as error:
            problem = f"this value cannot be read ({str(error).partition(';')[0]})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node whose keys are all different."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} cannot be the name of a field", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given a second time", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """A YAML value.

    Raises:
        yaml.YAMLError: it is not YAML, or too large or too deep.
    """
    if len(text) > LARGEST_YAML_BYTES:
        raise yaml.YAMLError(f"it has {len(text):,} characters; at most {LARGEST_YAML_BYTES:,} are read")
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a file, as YAML gives them."""
    if path.is_dir():
        raise ParametersError(f"{str(path)!r} is a folder; give the path of a RUN.yaml.")
    try:
        if not is_file(path):
            raise ParametersError(f"{shown(path)!r} does not exist; give the path of a RUN.yaml.")
        raw = parse_yaml(read_text(path))
    except OSError as error:
        raise ParametersError(f"{shown(path)!r} cannot be read: {error.strerror or error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        is_layout = isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
        hint = " Look at brackets and indentation there and in the lines before." if is_layout else ""
        raise ParametersError(f"{str(path)!r}{where} is not YAML: {problem}.{hint}") from error
    except UnicodeDecodeError as error:
        raise ParametersError(
            f"{str(path)!r} is not text (UTF-8), as a RUN.yaml is; the model is named in it, as paths.model_path."
        ) from error
    if not isinstance(raw, dict):
        found = "is empty" if raw is None else f"holds a {type(raw).__name__}"
        raise ParametersError(f"{str(path)!r} {found}; expected sections such as `training:`.")
    return raw


def override(raw: dict[str, Any], dotted: str, text: str) -> None:
    """Sets one field, named `section.field` or `next_rounds.0.section.field`, to a value written as in YAML."""
    section, _, name = dotted.partition(".")
    number, _, of_round = name.partition(".")
    rounds = raw.get(section)
    if section == "next_rounds" and isinstance(rounds, list) and number.isdigit() and int(number) < len(rounds):
        rounds[int(number)] = {**(rounds[int(number)] or {})}
        override(rounds[int(number)], of_round, text)
        return
    if not name:
        raise ParametersError(f"--{dotted} names no field; write --section.field, such as --training.batch_size 8.")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        shown_text = text if len(text) <= 200 else f"{text[:200]}..."
        problem = getattr(error, "problem", None) or str(error)
        raise ParametersError(f"--{dotted} {shown_text!r} is not a YAML value: {problem}.") from error
    holder = raw.get(section)
    if holder is None:
        holder = raw[section] = {}
    if not isinstance(holder, dict):
        raise ParametersError(f"--{dotted}: section {section!r} holds {holder!r}, not fields.")
    holder[name] = value


def overlay(sections: Mapping[str, Any], changes: Any, where: str) -> dict[str, Any]:
    """Sections with some fields changed: a later round as the first one with differences."""
    if not isinstance(changes, Mapping):
        raise ParametersError(f"{where} is {changes!r}; expected sections with the fields that differ.")
    result = {name: dict(fields) if isinstance(fields, Mapping) else fields for name, fields in sections.items()}
    for name, fields in changes.items():
        if not isinstance(fields, Mapping):
            raise ParametersError(f"{where}.{name} is {fields!r}; expected the fields that differ.")
        first = result.get(name)  # of the first round, where anything but fields is refused
        result[name] = {**(first if isinstance(first, dict) else {}), **fields}
    return result


_EXPECTED = {
    "tuple_type": "a list",
    "too_long": "fewer items",
    "string_type": "text, in quotes where it looks like something else",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "path_type": "a path",
    "callable_type": "a function",
    "dict_type": "names with values",
    "mapping_type": "names with values",
    "dataclass_type": "a section with fields",
    "invalid_key": "the name of a field",
}
"""Kind of error in pydantic's words -> what was expected, in ours."""


def sentences(error: pydantic.ValidationError, root: type) -> list[str]:
    """One sentence for each wrong field: the field, its value, what was expected."""
    lines: dict[str, str] = {}
    # Of a union, the other branch says more of what is wrong with a value that is no function either.
    for problem in sorted(error.errors(), key=lambda problem: problem["type"] == "callable_type"):
        location = [part for part in problem["loc"] if not _is_type_tag(part)]
        where = _dotted(location)
        kind, value = problem["type"], problem["input"]
        if kind == "callable_type" and any(line.startswith(where) for line in lines):
            continue
        if kind in ("unexpected_keyword_argument", "extra_forbidden"):
            fields = _fields_at(root, location[:-1])
            hint = _hint(root, location, fields)
            known = f"Known here: {', '.join(fields)}." if fields else "This section has no fields."
            lines.setdefault(where, f"{where} is unknown.{hint} {known}")
        elif kind in ("missing", "missing_argument"):
            lines.setdefault(where, f"{where} is missing; it has no default.")
        else:
            message = problem["msg"].removeprefix("Value error, expected ").removeprefix("Input should be ")
            expected = _EXPECTED.get(kind, message.rstrip("."))
            hint = did_you_mean(value, re.findall("'([^']+)'", expected), most=2) if isinstance(value, str) else ""
            lines.setdefault(where, f"{where} is {value!r}; expected {expected}.{hint}")
    return list(lines.values())


def _hint(root: type, location: Sequence[Any], fields: Sequence[str]) -> str:
    """Which field was meant by an unknown one: of that name in another section, or of a similar name in this one."""
    name = str(location[-1])
    sections = [section for section in _fields_at(root, []) if section != "next_rounds"]
    others = [section for section in sections if name in _fields_at(root, [section])]
    if len(location) == 2 and others:
        return f" Did you mean {f'{others[0]}.{name}'!r}?"
    return did_you_mean(name, fields)


def _is_type_tag(part: Any) -> bool:
    """pydantic names the branch of a union in the location; a user does not want to read it."""
    return isinstance(part, str) and (part in ("str", "int", "float", "callable", "Callable") or "[" in part)


def _dotted(location: Sequence[Any]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text or "the file"


def _fields_at(root: type, location: Sequence[Any]) -> list[str]:
    """The field names of the dataclass at a location."""
    here: Any = root
    for part in location:
        if isinstance(part, int):
            continue
        hints = typing.get_type_hints(here)
        if part not in hints:
            return []
        here = next((t for t in alternatives(hints[part]) if dataclasses.is_dataclass(t)), None)
        if here is None:
            return []
    return [f.name.rstrip("_") for f in dataclasses.fields(here)]


def alternatives(hint: Any) -> list[Any]:
    """The types that a hint allows, those within tuples included."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return [t for option in typing.get_args(hint) for t in alternatives(option)]
    return [hint]


def resolve_paths(parameters: Any, base: Path, overridden: frozenset[str]) -> Any:
    """Makes every relative path absolute: those of the file from its folder, overridden ones from here."""
    sections = {}
    for section in dataclasses.fields(parameters):
        value = getattr(parameters, section.name)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            continue
        changes: dict[str, Any] = {}
        for one in dataclasses.fields(value):
            path = getattr(value, one.name)
            start = Path.cwd() if f"{section.name}.{one.name}" in overridden else base
            if isinstance(path, Path):
                changes[one.name] = _absolute(path, start)
            elif isinstance(path, tuple) and path and all(isinstance(item, Path) for item in path):
                changes[one.name] = tuple(_absolute(item, start) for item in path)
        sections[section.name] = dataclasses.replace(value, **changes)
    return dataclasses.replace(parameters, **sections)


def _absolute(path: Path, start: Path) -> Path:
    if url_of(path) is not None:
        return path
    joined = start / path.expanduser()
    plain = Path(os.path.normpath(joined))
    # A link before `..` leads elsewhere.
    return plain if os.path.realpath(plain) == os.path.realpath(joined) else joined


def to_plain(value: Any) -> Any:
    """Dataclasses, mappings and paths as dictionaries, lists, numbers and text, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name.rstrip("_"): to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return shown(value)
    if callable(value):
        return f"function {getattr(value, '__qualname__', repr(value))}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
