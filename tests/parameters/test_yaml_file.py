"""A RUN.yaml and an override that somebody made to exhaust the machine, or that YAML's own types cannot hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.parameters.yaml_file import overlay, override, parse_yaml, read_yaml, to_plain

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
)

HOSTILE = {
    "lists": ("a: " + "[" * 100_000, "nested more than 50 deep"),
    "mappings": ("a: " + "{a: " * 100_000, "nested more than 50 deep"),
    "blocks": ("- " * 100_000, "nested more than 50 deep"),
    "aliases": (LAUGHS, "holds more than 100,000 values"),
    "merges": (MERGES, "holds more than 100,000 values"),
    "itself": ("a: &a [*a]", "is used inside of what it names"),
    "values": ("a: [" + "1," * 100_001 + "]", "holds more than 100,000 values"),
    "digits": ("a: " + "9" * 10_000, "this value cannot be read"),
    "base 60": ("a: " + "1:" * 400 + "1.5", "this value cannot be read"),
    "a date": ("a: 2020-13-01", "this value cannot be read"),
    "a flag": ("a: !!bool perhaps", "this value cannot be read"),
    "a number": ("a: !!int ''", "this value cannot be read"),
    "a tag": ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_files(kind: str, tmp_path: Path) -> None:
    text, words = HOSTILE[kind]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ParametersError, match=words):
        read_yaml(path)


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "values"])  # it takes seconds, and once is enough
def test_overrides(kind: str) -> None:
    text, words = HOSTILE[kind]
    with pytest.raises(ParametersError, match=words) as error:
        override({}, "training.batch_size", text)
    assert len(str(error.value)) < 2000


def test_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: " + "x" * (17 << 20))
    with pytest.raises(ParametersError, match=r"at most 16,777,216 are read"):
        read_yaml(path)


def test_aliases_of_ordinary_use_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1}\nc: [*a, *a]")
    assert read_yaml(path) == {"a": {"x": 1}, "c": [{"x": 1}, {"x": 1}]}


@pytest.mark.parametrize("size", [10**18, 2**31, 10**4000])
def test_a_batch_that_no_memory_holds(size: int, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "loss: {type: mean_squared_error, prediction: y, label: t}\nlearning_rate: {initial_lr: 0.1}\n"
        f"training: {{batch_size: {size}, num_train_steps: 1}}\n"
    )
    with pytest.raises(ParametersError, match="expected less than 2147483648"):
        Parameters.load(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [("6e-4", 6e-4), ("-1E3", -1000.0), ("0x10", 16), ("1_000", 1000), ("~", None), ("", None), ("[a, 1]", ["a", 1])],
)
def test_numbers_as_yaml_1_2_has_them(text: str, value: object) -> None:
    assert parse_yaml(text) == value


def test_a_key_that_is_given_twice_or_is_no_name() -> None:
    with pytest.raises(yaml.YAMLError, match="the key 'a' is given a second time"):
        parse_yaml("a: 1\na: 2")
    with pytest.raises(yaml.YAMLError, match=r"\['b'\] cannot be the name of a field"):
        parse_yaml("? [b]\n: 1")


def test_one_field_is_set_where_its_section_is_lacking_or_empty() -> None:
    raw = {"empty": None, "number": 3}
    for dotted in ("empty.a", "new.a"):
        override(raw, dotted, "[1, x]")
    assert raw == {"empty": {"a": [1, "x"]}, "new": {"a": [1, "x"]}, "number": 3}
    for dotted, words in (
        ("new", r"--new names no field; write --section\.field, such as --training\.batch_size 8\."),
        ("number.a", "--number.a: section 'number' holds 3, not fields"),
    ):
        with pytest.raises(ParametersError, match=words):
            override(raw, dotted, "1")
    with pytest.raises(ParametersError, match=r"^--a\.b '\[+\.\.\.' is not a YAML value: "):
        override(raw, "a.b", "[" * 300)


def test_a_later_round_is_the_first_with_differences() -> None:
    sections = {"training": {"seed": 1, "batch_size": 2}, "checkpoint": None}
    changed = overlay(sections, {"training": {"seed": 3}, "checkpoint": {"keep": 1}, "new": {}}, "next_rounds[0]")
    assert changed == {"training": {"seed": 3, "batch_size": 2}, "checkpoint": {"keep": 1}, "new": {}}
    assert sections["training"] == {"seed": 1, "batch_size": 2}
    for changes, words in (
        (3, "next_rounds[0] is 3; expected sections with the fields that differ."),
        ({"training": [1]}, "next_rounds[0].training is [1]; expected the fields that differ."),
    ):
        with pytest.raises(ParametersError) as caught:
            overlay(sections, changes, "next_rounds[0]")
        assert str(caught.value) == words


def test_a_section_that_holds_no_fields_is_left_to_the_check_of_its_type() -> None:
    assert overlay({"training": 5}, {"training": {"seed": 1}}, "next_rounds[0]") == {"training": {"seed": 1}}


def test_values_as_json_holds_them() -> None:
    plain = to_plain({1: (Path("a"), float("inf"), float("nan"), to_plain, None), "b": 0.5})
    assert plain == {"1": ["a", "inf", "nan", "function to_plain", None], "b": 0.5}
