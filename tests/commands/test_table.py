"""The table of commands: every command has a module, and its words are those that its parser takes."""

from __future__ import annotations

import pytest

from onward.commands.table import COMMANDS, module_of, options_of, words_of_commands
from onward.parameters.fields import field_names


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_that_explains_and_runs_it(name: str) -> None:
    module = module_of(name)
    assert callable(module.run)
    assert "--help" in options_of(name)
    assert COMMANDS[name].help[0].islower()


def test_what_can_follow() -> None:
    words, fields = words_of_commands(), field_names()
    assert set(words) == set(COMMANDS)
    assert {f"--{field}" for field in fields} <= set(words["train"])
    limits = {f"--{field}" for field in fields if field.startswith("limits.")}
    assert {word for word in words["inspect"] if "." in word} == limits
    assert not [word for word in words["doctor"] if "." in word]
    assert {"bash", "zsh", "fish"} <= set(words["completion"])
    assert {"train", "training", "training.batch_size"} <= set(words["help"])


def test_a_name_with_a_dash() -> None:
    assert module_of("lr-find").__name__ == "onward.commands.lr_find"
