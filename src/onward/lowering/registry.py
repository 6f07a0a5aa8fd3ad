"""Which function lowers which (operator, version).

A lowering is registered for the first version at which an operator took a meaning; the newest one at or
below the version that the model's opset selects is used. A Python function documents its operator: its
positional parameters are the operator's inputs in order, its keyword-only parameters the attributes with
the standard's defaults, under the standard's names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from onward.lowering.context import ExecutionContext

_Function = TypeVar("_Function", bound=Callable[..., Any])

OperatorKey = tuple[str, str]
"""(domain, operator type); the default domain is ""."""

_CONTEXT = frozenset(field.name for field in fields(ExecutionContext))
RESERVED = _CONTEXT | {"training", "device", "output_count", "owned", "dtypes", "element_types", "only_dequantized"}
"""Keyword-only parameters that the program fills in, never an attribute of the node:

- `training: bool`: the network is in training mode;
- `device: torch.device`: where new tensors belong;
- `output_count: int`: outputs of the node up to the last one that is named;
- `owned: tuple[bool, ...]`: per input, whether it is a tensor of the model itself (initializer or constant);
- `dtypes: tuple[torch.dtype | None, ...]`: per input, its element type as far as it is known before running;
- `element_types: tuple[int | None, ...]`: the same as ONNX's own codes, which distinguish types that torch holds alike;
- `only_dequantized: bool`: whether the node's first output reaches nothing but `DequantizeLinear`, and
  products that give real numbers;
- the fields of `ExecutionContext`, each under its name.
"""


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """One function, the operator and first version it stands for, and how the program must call it."""

    domain: str
    op_type: str
    since: int
    function: Callable[..., Any]
    host: frozenset[str]
    either: frozenset[str]
    produces: Literal["tensor", "host"]
    result_dtype: str
    parameters: tuple[inspect.Parameter, ...]
    growth: Callable[..., int] | None = None
    spare: frozenset[int] = frozenset()

    @property
    def attributes(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters that are attributes of the operator."""
        return {p.name.rstrip("_"): p for p in self.parameters if p.kind is p.KEYWORD_ONLY and p.name not in RESERVED}

    @property
    def inputs(self) -> tuple[inspect.Parameter, ...]:
        """The positional parameters: the operator's inputs in order (a last `*name` takes all the rest)."""
        return tuple(p for p in self.parameters if p.kind is not p.KEYWORD_ONLY)

    @property
    def reserved(self) -> frozenset[str]:
        """Which of `RESERVED` the function asks for."""
        return frozenset(p.name for p in self.parameters if p.name in RESERVED)


_on_device: dict[OperatorKey, dict[int, Lowering]] = {}
_on_host: dict[OperatorKey, dict[int, Lowering]] = {}


def _record(table: dict[OperatorKey, dict[int, Lowering]], lowering: Lowering) -> None:
    versions = table.setdefault((lowering.domain, lowering.op_type), {})
    assert lowering.since not in versions, f"{lowering.op_type}-{lowering.since} is lowered twice"
    versions[lowering.since] = lowering


def lowers(
    op_type: str,
    since: int = 1,
    *,
    domain: str = "",
    host: tuple[str, ...] = (),
    either: tuple[str, ...] = (),
    produces: Literal["tensor", "host"] = "tensor",
    result_dtype: str = "int64",
    spare: tuple[str, ...] = (),
) -> Callable[[_Function], _Function]:
    """Registers a function that computes `op_type` from torch tensors.

    `host` names inputs that arrive as Python values (a number, or nested tuples of numbers) instead of
    tensors: shapes, axes, sizes. `either` names inputs that arrive as a Python value when they come out of
    shape arithmetic or are a constant of one element, and as a tensor otherwise. `produces="host"` says that
    the result itself is such a value, of the ONNX type `result_dtype`. `spare` names optional inputs that the
    function can do without: they arrive as None in a program that computes none of them for another reason. An
    attribute whose name is a Python keyword gets a trailing underscore. May be stacked to register one function for
    several operators or versions.
    """

    def register(function: _Function) -> _Function:
        parameters = tuple(inspect.signature(function).parameters.values())
        names = [p.name for p in parameters]
        unknown = {*host, *either, *spare} - set(names)
        assert not unknown, f"{op_type}: host inputs {unknown} are not parameters"
        _record(
            _on_device,
            Lowering(
                domain=domain,
                op_type=op_type,
                since=since,
                function=function,
                host=frozenset(host),
                either=frozenset(either),
                produces=produces,
                result_dtype=result_dtype,
                parameters=parameters,
                spare=frozenset(names.index(name) for name in spare),
            ),
        )
        return function

    return register


def lowers_on_host(
    op_type: str,
    since: int = 1,
    *,
    domain: str = "",
    result_dtype: str = "first",
    growth: Callable[..., int] | None = None,
) -> Callable[[_Function], _Function]:
    """Registers a function that computes `op_type` on Python values: shape arithmetic.

    It is used when every input is a host value. `result_dtype` is "first" or "second" (the type of that
    input), "to" (the type in the attribute `to`), "value" (the type of the attribute `value`), or a type's name
    such as "int64" or "bool".
    """

    def register(function: _Function) -> _Function:
        parameters = tuple(inspect.signature(function).parameters.values())
        _record(
            _on_host,
            Lowering(
                domain=domain,
                op_type=op_type,
                since=since,
                function=function,
                host=frozenset(),
                either=frozenset(),
                produces="host",
                result_dtype=result_dtype,
                parameters=parameters,
                growth=growth,
            ),
        )
        return function

    return register


def _newest(table: dict[OperatorKey, dict[int, Lowering]], key: OperatorKey, version: int) -> Lowering | None:
    fitting = [since for since in table.get(key, {}) if since <= version]
    return table[key][max(fitting)] if fitting else None


def find_lowering(domain: str, op_type: str, version: int) -> Lowering | None:
    """The lowering on tensors for an operator at an opset version, or None."""
    _load_operators()
    return _newest(_on_device, (domain, op_type), version)


def find_host_lowering(domain: str, op_type: str, version: int) -> Lowering | None:
    """The lowering on Python values for an operator at an opset version, or None."""
    _load_operators()
    return _newest(_on_host, (domain, op_type), version)


def all_lowerings() -> list[Lowering]:
    """Every lowering on tensors, sorted by domain, operator and version."""
    _load_operators()
    found = [lowering for versions in _on_device.values() for lowering in versions.values()]
    return sorted(found, key=lambda lowering: (lowering.domain, lowering.op_type, lowering.since))


@functools.cache
def _load_operators() -> None:
    """Imports every module of `onward.lowering.ops`, once: importing is registering."""
    package = importlib.import_module("onward.lowering.ops")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"onward.lowering.ops.{module.name}")
