"""A RUN.yaml and an override that somebody made to exhaust the machine, or that YAML's own types cannot hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.parameters.yaml_file import override, read_yaml

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
def test_files(kind: str, tmp_path: Path):
    text, words = HOSTILE[kind]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ParametersError, match=words):
        read_yaml(path)


@pytest.mark.parametrize("kind", HOSTILE)
def test_overrides(kind: str):
    text, words = HOSTILE[kind]
    with pytest.raises(ParametersError, match=words) as error:
        override({}, "training.batch_size", text)
    assert len(str(error.value)) < 2000


def test_a_large_file(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("a: " + "x" * (17 << 20))
    with pytest.raises(ParametersError, match=r"at most 16,777,216 are read"):
        read_yaml(path)


def test_aliases_of_ordinary_use_are_read(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1}\nc: [*a, *a]")
    assert read_yaml(path) == {"a": {"x": 1}, "c": [{"x": 1}, {"x": 1}]}


@pytest.mark.parametrize("size", [10**18, 2**31, 10**4000])
def test_a_batch_that_no_memory_holds(size: int, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "loss: {type: mean_squared_error, prediction: y, label: t}\nlearning_rate: {initial_lr: 0.1}\n"
        f"training: {{batch_size: {size}, num_train_steps: 1}}\n"
    )
    with pytest.raises(ParametersError, match="expected less than 2147483648"):
        Parameters.load(path)
