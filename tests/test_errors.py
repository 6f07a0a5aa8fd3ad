"""Chains of exceptions end, whatever they look like; nothing that walks them may hang a run that has failed."""

from __future__ import annotations

import ast
import itertools
import random

import pytest

from onward.errors import DataError, ModelError, chain_of
from onward.parallel.watch.cause import cause_of, out_of_memory
from onward.parallel.watch.ending import is_echo
from onward.retries import is_passing
from tests.test_architecture import source_files, tree_of

KINDS = (RuntimeError, ValueError, DataError, ModelError, OSError, KeyError)


def random_chain(seed: int) -> list[BaseException]:
    """Exceptions whose causes and contexts are any of them, circles and themselves included."""
    draw = random.Random(seed)
    errors: list[BaseException] = [draw.choice(KINDS)(f"error {number}") for number in range(draw.randint(1, 6))]
    for error in errors:
        error.__cause__ = draw.choice([None, *errors])
        error.__context__ = draw.choice([None, *errors])
    return errors


@pytest.mark.parametrize("seed", range(200))
def test_a_chain_is_walked_once(seed: int) -> None:
    first, *_ = errors = random_chain(seed)
    walked = list(chain_of(first))
    assert walked[0] is first
    assert len({id(one) for one in walked}) == len(walked) <= len(errors)
    last = walked[-1]
    following = last.__cause__ or last.__context__
    assert following is None or any(following is one for one in walked)
    assert all(later is (one.__cause__ or one.__context__) for one, later in itertools.pairwise(walked))
    assert out_of_memory(first) is None
    assert not is_echo(first)
    assert cause_of(first, "", 0).kind == "error"
    assert isinstance(is_passing(first), bool)


def test_memory_that_ran_out_is_found_inside_of_a_circle() -> None:
    outer, inner = RuntimeError("outer"), MemoryError()
    outer.__cause__, inner.__context__ = inner, outer
    assert out_of_memory(outer) is inner


def names_in(tree: ast.AST) -> set[str]:
    """The attributes that code reads."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_only_one_function_follows_causes() -> None:
    """A loop of one's own would forget the circles."""
    for path in source_files():
        loops = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.While)]
        found = [loop.lineno for loop in loops if {"__cause__", "__context__"} & names_in(loop)]
        if path.name != "errors.py":
            assert not found, f"{path}:{found}: use onward.errors.chain_of"
