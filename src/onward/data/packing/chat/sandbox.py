"""Chat templates are programs of strangers: Jinja in a sandbox that counts what they make and how long they take.

Jinja's own sandbox keeps templates away from Python's internals, but bounds neither loops nor the sizes of what they
make. Before compilation, the template's tree is rewritten so that every iteration, call of a macro, list, concatenation
and output passes a counting filter; what makes large results of small arguments is checked first, or left out.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.visitor import NodeTransformer

from onward.parameters.limits import Limits

_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select", "selectattr",
    "sort", "title", "trim", "unique", "upper",
)  # fmt: skip
"""Jinja's filters whose results are no larger than what they are given."""

_LEFT_OUT = {
    "center",
    "encode",
    "expandtabs",
    "format",
    "format_map",
    "ljust",
    "rjust",
    "to_bytes",
    "translate",
    "zfill",
}
"""Methods of Python's texts and numbers that make large results of small arguments."""

_BYTES_OF_REFERENCE = 8
_LARGEST_NUMBER_BITS = 4096
_DEEPEST_INDENTATION = 16
_MARKS = ("_generation_begin", "_generation_end")


class TemplateStopped(Exception):
    """A template that fails, asks for too much, or for what the sandbox does not give; the message says which."""


class TemplateRefused(Exception):
    """What a template itself raises, by `raise_exception`."""


@dataclass
class _Budget:
    """What one rendering may still do."""

    limits: Limits
    characters: int = 0
    ends: float = field(default=float("inf"))

    def start(self) -> None:
        self.characters, self.ends = 0, time.monotonic() + self.limits.template_seconds

    def step(self) -> None:
        if time.monotonic() > self.ends:
            raise TemplateStopped(
                f"it takes more than {self.limits.template_seconds:g} seconds for one conversation. If the template "
                "is as intended, pass --limits.template_seconds."
            )

    def take(self, characters: int) -> None:
        """Counts a text before it is made."""
        self.step()
        self.characters += characters
        if self.characters > self.limits.template_characters:
            raise TemplateStopped(
                f"it makes texts of more than {self.limits.template_characters:,} characters. If the template is as "
                "intended, pass --limits.template_characters."
            )

    def measured(self, value: Any) -> Any:
        """Counts all that a value holds, so that lists which hold a list twice, and so on, do not grow unseen."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                self.take(len(one))
            elif isinstance(one, Mapping):
                self.take(len(one))
                waiting += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                self.take(_BYTES_OF_REFERENCE * len(one))
                waiting += one
            elif not isinstance(one, int | float | range | jinja2.Undefined | None):
                raise TemplateStopped(f"it writes or collects a value of the type {type(one).__name__}.")
        return value

    def each(self, values: Any) -> Iterator[Any]:
        """The items, each counted."""
        for value in values:
            self.step()
            yield value

    def iterated(self, values: Any) -> Any:
        """What a loop goes through: sequences as they are, since a loop may ask for its length."""
        self.step()
        return values if isinstance(values, jinja2.Undefined) else list(self.each(values))

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose result is counted if it is a text."""

        @functools.wraps(function)
        def count(*arguments: Any, **keywords: Any) -> Any:
            found = function(*arguments, **keywords)
            self.take(len(found) if isinstance(found, str) else 1)
            return found

        return count


class _Counting(NodeTransformer):
    """Puts a counting filter around whatever a template repeats, collects, joins or writes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_iterated")
        return node

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") == "store"
        return node if is_target else _filtered(node, "_measured")

    visit_Tuple = visit_Dict = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(one, "_measured") for one in node.nodes]
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_filtered(nodes.Const("", lineno=node.lineno), "_measured")]))
        return node

    visit_CallBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(_as_value(one), "_measured") for one in node.nodes]
        return node


def _as_value(node: Any) -> Any:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own form)

    def parse(self, parser: Any) -> list[nodes.Node]:
        """What is between the tags, with a mark at each end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line) for name in _MARKS)
        return [begin, *body, end]


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the budget of the rendering that is going on."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, limits: Limits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        self.budget = budget = _Budget(limits)
        own = {"tojson": self._to_json, "join": self._join, "replace": self._replace, "string": self._string}
        self.filters = {name: budget.counting(self.filters[name]) for name in _FILTERS} | own
        self.filters |= {"_iterated": _when_rendering(budget.iterated), "_measured": _when_rendering(budget.measured)}
        known = {name: self.globals[name] for name in ("range", "namespace", "dict")}
        self.globals = {**known, "raise_exception": _refuse}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute of a value."""
        return attr not in _LEFT_OUT and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Texts do not format: a width is a small argument, and its result large."""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, which may make large results."""
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise TemplateStopped(f"it uses the operator {operator}, which chat templates do not have here.")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int):
                    self.budget.take(len(one) * other)
                elif isinstance(one, int) and one.bit_length() > _LARGEST_NUMBER_BITS:
                    raise TemplateStopped(f"it computes with a number of more than {_LARGEST_NUMBER_BITS} bits.")
        return self.budget.measured(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *arguments: Any, **keywords: Any) -> Any:
        """A call of a method or a function."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(arguments) >= 2:
            return self._replace(owner, *arguments)
        if isinstance(owner, str) and name == "join" and len(arguments) == 1:
            return self._join(arguments[0], owner)
        found = super().call(context, obj, *arguments, **keywords)
        self.budget.take(len(found) if isinstance(found, str | list | tuple) else 1)
        return found

    def _to_json(self, value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
        """As Hugging Face has it: no escapes of HTML or of letters outside of ASCII."""
        if not (indent is None or (isinstance(indent, int) and 0 <= indent <= _DEEPEST_INDENTATION)):
            raise TemplateStopped(f"it indents JSON by {indent!r}; expected 0 to {_DEEPEST_INDENTATION}.")
        return json.dumps(self.budget.measured(value), ensure_ascii=bool(ensure_ascii), indent=indent)

    def _join(self, value: Any, d: str = "", attribute: str | None = None) -> str:
        items = [self.getitem(one, attribute) if attribute else one for one in self.budget.each(value)]
        texts = [self._string(one) for one in items]
        self.budget.take(sum(map(len, texts)) + len(d) * len(texts))
        return d.join(texts)

    def _replace(self, value: Any, old: str, new: str, count: int = -1) -> str:
        text = self._string(value)
        self.budget.take(len(text) + text.count(old) * len(new))
        return text.replace(old, new, count)

    def _string(self, value: Any) -> str:
        self.budget.measured(value)
        return value if isinstance(value, str) else str(value)


def _when_rendering(count: Callable[[Any], Any]) -> Callable[..., Any]:
    """A filter that is never evaluated in advance, as filters of constants are."""
    return jinja2.pass_context(lambda context, value: count(value))


def _refuse(message: Any = "") -> None:
    raise TemplateRefused(str(message))


@dataclass(frozen=True)
class SandboxedTemplate:
    """A compiled chat template.

    Attributes:
        source: its text.
        marks_answers: whether it marks what the assistant says.
    """

    source: str
    marks_answers: bool
    _environment: _Environment
    _template: jinja2.Template

    @classmethod
    def compile(cls, source: str, limits: Limits) -> SandboxedTemplate:
        """Compiles a template.

        Raises:
            TemplateStopped: it is malformed, or uses what the sandbox does not give.
        """
        environment = _Environment(limits)
        try:
            names = {node.name for node in environment.parse(source).find_all(nodes.Name)}
            return cls(source, _MARKS[0] in names, environment, environment.from_string(source))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateStopped(f"line {error.lineno}: {_sentence(error)}") from error
        except (jinja2.TemplateError, RecursionError, ArithmeticError, MemoryError, ValueError) as error:
            raise TemplateStopped(f"{type(error).__name__}: {_sentence(error)}") from error

    def render(self, values: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and from which to which of its characters the assistant speaks, where the template marks that.

        Raises:
            TemplateRefused: the template refuses the conversation.
            TemplateStopped: it fails, or asks for too much.
        """
        word = self._unused_word(values)
        begin, end = f"\x00{word}(", f"\x00{word})"
        self._environment.budget.start()
        try:
            text = self._template.render({**values, _MARKS[0]: begin, _MARKS[1]: end})
        except (TemplateRefused, TemplateStopped):
            raise
        except RecursionError as error:
            raise TemplateStopped("its macros call each other too deeply.") from error
        except Exception as error:  # what a template does wrong has the types of what Python does wrong
            raise TemplateStopped(f"{type(error).__name__}: {_sentence(error)}") from error
        return _without_marks(text, begin, end)

    def _unused_word(self, values: Mapping[str, Any]) -> str:
        """A word that is neither in the template nor in the conversation."""
        taken = self.source + json.dumps(values, ensure_ascii=False, default=str)
        return next(word for number in range(len(taken) + 1) if (word := f"mark{number}") not in taken)


def _sentence(error: Exception) -> str:
    return str(error).rstrip(".") + "."


def _without_marks(text: str, begin: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    first, *others = text.split(begin)
    kept, spans, length = [first.replace(end, "")], [], len(first.replace(end, ""))
    for other in others:
        said, _, rest = other.partition(end)
        rest = rest.replace(end, "")
        spans.append((length, length + len(said)))
        kept += [said, rest]
        length += len(said) + len(rest)
    return "".join(kept), spans
