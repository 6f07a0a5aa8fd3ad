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
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from onward.lowering.context import ExecutionContext

_Function = TypeVar("_Function", bound=Callable[..., Any])

OperatorKey = tuple[str, str]
"""(domain, operator type); the default domain is ""."""

_CONTEXT = frozenset(field.name for field in fields(ExecutionContext))
RESERVED = _CONTEXT | {
    "training", "device", "output_count", "is_read", "owned", "dtypes", "element_types", "only_dequantized",
}  # fmt: skip
"""Keyword-only parameters that the program fills in, never an attribute of the node:

- `training: bool`: the network is in training mode;
- `device: torch.device`: where new tensors belong;
- `output_count: int`: outputs of the node up to the last one that is named;
- `is_read: tuple[bool, ...]`: per output, whether a node reads it, or the program gives it out;
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
    parameters: tuple[inspect.Parameter, ...]
    host: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    produces: Literal["tensor", "host"]
    result_dtype: str
    growth: Callable[..., int] | None = None
    spare: tuple[str, ...] = ()

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


MEMORY_HINT = "consumed_inputs"
"""An attribute of opsets 1 to 5 that says which inputs may be overwritten; it changes no result and is not passed."""

_on_device: dict[OperatorKey, dict[int, Lowering]] = {}
_on_host: dict[OperatorKey, dict[int, Lowering]] = {}


def _register(
    table: dict[OperatorKey, dict[int, Lowering]], inputs: tuple[str, ...], **described: Any
) -> Callable[[_Function], _Function]:
    """A decorator that enters a function; `inputs` are its inputs where it has no signature of its own, as torch's."""

    def register(function: _Function) -> _Function:
        parameters = tuple(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in inputs)
        parameters = parameters or tuple(inspect.signature(function).parameters.values())
        lowering = Lowering(function=function, parameters=parameters, **described)
        versions = table.setdefault((lowering.domain, lowering.op_type), {})
        assert lowering.since not in versions, f"{lowering.op_type}-{lowering.since} is lowered twice"
        unknown = {*lowering.host, *lowering.either, *lowering.spare} - {p.name for p in parameters}
        assert not unknown, f"{lowering.op_type}: host inputs {unknown} are not parameters"
        versions[lowering.since] = lowering
        return function

    return register


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
    inputs: tuple[str, ...] = (),
) -> Callable[[_Function], _Function]:
    """Registers a function that computes `op_type` from torch tensors.

    `host` names inputs that arrive as Python values (a number, or nested tuples of numbers) instead of
    tensors: shapes, axes, sizes. `either` names inputs that arrive as a Python value when they come out of
    shape arithmetic or are a constant of one element, and as a tensor otherwise. `produces="host"` says that
    the result itself is such a value, of the ONNX type `result_dtype`. `spare` names optional inputs that the
    function can do without: they arrive as None in a program that computes none of them for another reason.
    `inputs` names the inputs of a function that has no signature of its own, as torch's have none. An attribute
    whose name is a Python keyword gets a trailing underscore. May be stacked to register one function for several
    operators or versions.
    """
    return _register(
        _on_device,
        inputs,
        domain=domain,
        op_type=op_type,
        since=since,
        host=host,
        either=either,
        produces=produces,
        result_dtype=result_dtype,
        spare=spare,
    )


def lowers_on_host(
    op_type: str,
    since: int = 1,
    *,
    result_dtype: str = "first",
    growth: Callable[..., int] | None = None,
) -> Callable[[_Function], _Function]:
    """Registers a function that computes `op_type` on Python values: shape arithmetic.

    It is used when every input is a host value. `result_dtype` is "first" or "second" (the type of that
    input), "to" (the type in the attribute `to`), "value" (the type of the attribute `value`), or a type's name
    such as "int64" or "bool".
    """
    return _register(
        _on_host,
        (),
        domain="",
        op_type=op_type,
        since=since,
        produces="host",
        result_dtype=result_dtype,
        growth=growth,
    )


def _newest(table: dict[OperatorKey, dict[int, Lowering]], key: OperatorKey, version: int) -> Lowering | None:
    fitting = [since for since in table.get(key, {}) if since <= version]
    return table[key][max(fitting)] if fitting else None


def takes_attributes_of(other: Callable[..., Any], without: Collection[str] = ()) -> Callable[[_Function], _Function]:
    """Gives a function that passes its `**attributes` on to another the keyword-only parameters of that one.

    Those named in `without` keep the other's defaults, and those that the function has itself are its own.
    """

    def describe(function: _Function) -> _Function:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {*without, *(p.name for p in own)}
        passed = inspect.signature(other).parameters.values()
        passed_on = [p for p in passed if p.kind is p.KEYWORD_ONLY and p.name not in names]
        function.__signature__ = inspect.Signature([*own, *passed_on])  # type: ignore[attr-defined]
        return function

    return describe


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
