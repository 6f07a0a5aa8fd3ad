"""`onward help` and `onward train --help` explain every field; completions know commands and fields."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from onward.cli import main
from onward.parameters.fields import field_names, fields_of, meanings, sections


def test_every_field_has_a_meaning_and_a_type() -> None:
    for name, kind in sections().items():
        told = meanings(kind)
        assert set(told) == {f.name for f in dataclasses.fields(kind)}, name
        for field in fields_of(name, kind):
            assert field.meaning, field.name
            assert field.type != "a value", f"{field.name} has a type without words"


@pytest.mark.parametrize("arguments", [["train", "--help"], ["help", "train"], ["plan", "--help"]])
def test_the_help_of_train_lists_every_field(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in field_names():
        assert f"--{name}" in text


@pytest.mark.parametrize("command", ["device", "lr-find", "reference"])
def test_other_commands_list_what_is_their_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 40
    assert "onward help SECTION.FIELD explains one" in " ".join(text.split())


def test_help_of_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "training.batch_size"]) == 0
    assert capsys.readouterr().out.split() == [
        "training.batch_size",
        "samples",
        "in",
        "one",
        "micro-batch",
        "of",
        "one",
        "replica.",
        "expected",
        "a",
        "whole",
        "number",
        "from",
        "1",
        "unit",
        "samples",
        "default",
        "none:",
        "it",
        "is",
        "required",
    ]
    assert main(["help", "learning_rate"]) == 0
    assert "--learning_rate.warmup_mode  [default none]" in capsys.readouterr().out
    assert main(["help", "optimizer.optimizer_attributes"]) == 0
    assert "ratio_min: bounds of Lamb's trust ratio" in capsys.readouterr().out
    assert main(["help"]) == 0
    assert "training.num_epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "near"), [("training.batch_sise", "training.batch_size"), ("batch_size", "training.ba")]
)
def test_a_name_that_is_none(name: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", name]) == 2
    text = capsys.readouterr().err
    assert text.startswith(
        f"onward help: {name!r} is neither a command, a section nor a field of a RUN.yaml. Did you mean "
    )
    assert near in text


def test_help_does_not_import_torch() -> None:
    for arguments in (["train", "--help"], ["help", "training.batch_size"], ["completion", "bash"]):
        code = (
            f"import sys, onward.cli\ntry: onward.cli.main({arguments!r})\nfinally: assert 'torch' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
