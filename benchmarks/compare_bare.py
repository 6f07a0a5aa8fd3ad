"""Stand-ins for pydantic and PyYAML, so that benchmarks run from the source tree where neither can be installed.

Parameters are then taken as they are, unchecked, and no RUN.yaml can be read: enough for what a benchmark writes.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def fill_in() -> list[str]:
    """Puts a stand-in for each that is missing, before onward is imported; which they are."""
    makers = {"pydantic": _pydantic, "yaml": _yaml}
    missing = [name for name in makers if name not in sys.modules and find_spec(name) is None]
    for name in missing:
        sys.modules[name] = makers[name]()
    return missing


def _pydantic() -> types.ModuleType:
    module: Any = types.ModuleType("pydantic")
    module.ConfigDict, module.Field = dict, lambda **named: str(named)
    module.TypeAdapter, module.ValidationError = _Adapter, type("ValidationError", (Exception,), {})
    module.field_validator = _without_validation
    return typing.cast(types.ModuleType, module)


def _yaml() -> types.ModuleType:
    module: Any = types.ModuleType("yaml")
    module.SafeLoader = type("SafeLoader", (), {"add_implicit_resolver": staticmethod(lambda *_: None)})
    module.YAMLError = type("YAMLError", (Exception,), {})
    return typing.cast(types.ModuleType, module)


def _without_validation(*_: str, **__: str) -> Callable[[Any], Any]:
    return lambda method: method


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """Builds a dataclass, and those in its fields, from nested mappings."""

    kind: type

    def validate_python(self, raw: Any) -> Any:
        """The same values in their dataclasses."""
        return _built(self.kind, raw)


def _built(hint: Any, raw: Any) -> Any:
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        fitting = (option for option in options if _fits(option, raw))
        return _built(next(fitting, None), raw)
    if typing.get_origin(hint) is tuple and isinstance(raw, list | tuple):
        return tuple(_built(options[0], value) for value in raw)
    if hint is Path and isinstance(raw, str):
        return Path(raw)
    if not (dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(raw, Mapping)):
        return raw
    fields = typing.get_type_hints(hint)
    named = {name if name in fields else f"{name}_": value for name, value in raw.items()}
    return hint(**{name: _built(fields[name], value) for name, value in named.items()})


def _fits(option: Any, raw: Any) -> bool:
    if isinstance(raw, list | tuple):
        return typing.get_origin(option) is tuple
    return (dataclasses.is_dataclass(option) and isinstance(raw, Mapping)) or (option is Path and isinstance(raw, str))
