"""What a chat template of an attacker may do: write text of a bounded size within a bounded time, and nothing else."""

from __future__ import annotations

import time

import pytest

from onward.data.packing.chat.sandbox import SandboxedTemplate, TemplateRefused, TemplateStopped
from onward.parameters.limits import Limits

SMALL = Limits(template_seconds=0.2, template_characters=1_000_000)
MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def render(source: str, limits: Limits = SMALL) -> str:
    return SandboxedTemplate.compile(source, limits).render(MESSAGES)[0]


def grows(step: str, start: str = "'a'") -> str:
    loop = f"{{% for i in range(99) %}}{{% set n.s = {step} %}}{{% endfor %}}"
    return f"{{% set n = namespace(s={start}) %}}{loop}{{{{ n.s }}}}"


LOOPS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{% set x = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a filter in a loop": "{% for a in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
}
SIZES = {
    "~": grows("n.s ~ n.s"),
    "+ of texts": grows("n.s + n.s"),
    "+ of lists": grows("n.s + n.s", "[1]"),
    "lists that hold a list twice": grows("[n.s, n.s]"),
    "dictionaries that hold one twice": grows("{'a': n.s, 'b': n.s}"),
    "such lists as JSON": grows("[n.s, n.s]").replace("{{ n.s }}", "{{ n.s | tojson }}"),
    "the filter replace": grows("n.s | replace('a', 'aa')"),
    "the method replace": grows("n.s.replace('a', 'aa')"),
    "the filter join": "{{ range(99999) | map('string') | list | join('a' * 10000) }}",
    "the method join": "{{ ('a' * 10000).join(range(99999) | map('string')) }}",
    "texts of a list": "{{ range(99999) | map(attribute='x') | map('default', 'a' * 10000) | map('upper') | list }}",
    "text in a loop": "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "text in a block": "{% set x %}{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}{% endset %}",
    "*": "{{ 'a' * 1000000000000 }}",
    "* of lists": "{{ [[1] * 100000] * 100000 }}",
}
FORBIDDEN = {
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__' of 'str' object is unsafe",
    "{{ messages.append(1) }}": "access to attribute 'append' of 'list' object is unsafe",
    "{{ raise_exception.__globals__.x }}": "access to attribute '__globals__'",
    "{{ 'a'.ljust(1000000000) }}": "access to attribute 'ljust' of 'str' object is unsafe",
    "{{ '{:>1000000000}'.format(1) }}": "access to attribute 'format' of 'str' object is unsafe",
    "{{ 'a'.encode() }}": "access to attribute 'encode' of 'str' object is unsafe",
    "{{ '%1000000000d' % 1 }}": "it uses the operator %",
    "{{ 10 ** 1000000000 }}": "it uses the operator **",
    grows("n.s * n.s", "9"): "a number of more than 4096 bits",
    "{{ 'a' | center(1000000000) }}": "line 1: No filter named 'center'.",
    "{{ messages | attr('x') }}": "No filter named 'attr'",
    "{{ messages | tojson(indent=1000000000) }}": "it indents JSON by 1000000000; expected 0 to 16",
    "{% include 'secrets' %}": "no loader for this environment specified",
    "{% import 'os' as os %}": "no loader for this environment specified",
    "{{ self }}": "it writes or collects a value of the type TemplateReference",
    "{{ lipsum() }}": "'lipsum' is undefined",
    "{{ range(1000000) | list }}": "Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "its macros call each other too deeply",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}": "its macros call each other too deeply",
    "{% if %}": "line 1: Expected an expression",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero.",
}


@pytest.mark.parametrize("name", LOOPS)
def test_time_is_bounded(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(
        TemplateStopped, match=r"more than 0.2 seconds for one conversation. If .* --limits.template_sec"
    ):
        render(LOOPS[name])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_bounded(name: str) -> None:
    with pytest.raises(TemplateStopped, match=r"texts of more than 1,000,000 characters. If .*--limits.template_char"):
        render(SIZES[name], Limits(template_seconds=20, template_characters=1_000_000))


@pytest.mark.parametrize("source", FORBIDDEN)
def test_what_templates_do_not_have(source: str) -> None:
    with pytest.raises(TemplateStopped) as caught:
        render(source)
    assert FORBIDDEN[source] in str(caught.value)


def test_a_template_refuses_a_conversation_in_its_own_words() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_what_templates_have() -> None:
    """Loops with their variables, slices, continue and break, macros, sets, filters and JSON, as jinja2 gives them."""
    source = (
        "{%- macro show(m, tag='x') -%}<{{ tag }}>{{ m.content | trim | upper }}{%- endmacro -%}"
        "{%- for m in messages -%}{{ loop.index0 }}{{ loop.last }}{{ show(m, tag=m['role']) }}{%- endfor -%}"
        "{% for m in messages[::-1] %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}"
        "{% set n = namespace(s=false) %}{% for m in messages if m.role == 'user' %}{% set n.s = true %}{% endfor %}"
        "{{ n.s }}{{ messages | tojson }}{{ {'a': 'é<'} | tojson(indent=1) }}{{ messages | length }}"
        "{{ messages | map(attribute='content') | join(', ') }}{{ 'a-b'.split('-') | join('+') }}{{ 'abc'[1:] }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ none is none }}{{ tools is defined }}"
        "{% for a, b in {'k': 1}.items() %}{{ a }}{{ b + 1 }}{% endfor %}{{ ' x '.strip() }}{{ 'x' ~ 1 }}"
    )
    assert render(source) == (
        "0False<user>HI1True<assistant>YO" "user" "True"
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]{\n "a": "é<"\n}2'
        "hi, yoa+bbc1TrueFalse" "k2xx1"
    )  # fmt: skip


def test_marks_are_of_answers_wherever_they_are() -> None:
    """In macros and blocks as well, and whatever the texts contain."""
    source = (
        "{% macro say(m) %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}"
        "{% set all %}{% for m in messages %}{{ say(m) if m.role == 'assistant' else m.content }}{% endfor %}"
        "{% endset %}<{{ all }}>"
    )
    template = SandboxedTemplate.compile(source, SMALL)
    assert template.marks_answers
    for answer in ("yo", "", "\x00mark0(\x00mark0)mark1", "é😀"):
        turns = [{"role": "user", "content": "mark0"}, {"role": "assistant", "content": answer}] * 2
        text, spans = template.render({"messages": turns})
        assert text == f"<mark0[{answer}]mark0[{answer}]>"
        assert [text[a:b] for a, b in spans] == [answer] * 2
    assert not SandboxedTemplate.compile("{{ messages }}", SMALL).marks_answers
