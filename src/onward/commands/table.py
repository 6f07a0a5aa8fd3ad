"""All commands of `onward`, with what can follow each of them."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, NamedTuple


class Command(NamedTuple):
    """What `onward --help` prints of a command."""

    help: str
    fields: str = ""
    """Fields of a RUN.yaml that may follow, as `--section.field value`: "*" all of them, else those of one section."""

    lists_fields: bool = True
    """Whether its `--help` lists them; else it says where they are listed."""


COMMANDS = {
    "create": Command("write a reference model as ONNX"),
    "pack": Command("turn text, arrays, tables, images or recordings into training shards", "limits"),
    "inspect": Command("report a model's inputs, operators and weights, and which weights are trainable", "limits"),
    "init": Command("write a RUN.yaml that trains a model on data, with the reason for every choice", "limits"),
    "lr-find": Command("run a learning-rate range test on a RUN.yaml and suggest a rate", "*", False),
    "reference": Command(
        "add the log-probabilities of a reference to the shards of a run with loss.type dpo", "*", False
    ),
    "plan": Command("report what each rank of a run computes, its cost, and whether it fits; no GPU needed", "*"),
    "train": Command("train as a RUN.yaml says", "*"),
    "export": Command("write a trained model from a checkpoint; quantize or dequantize a model", "limits"),
    "device": Command(
        "write a run as plain ONNX that any ONNX Runtime trains: browsers, phones, other languages", "*", False
    ),
    "report": Command("write one HTML page about a run, or one that compares several", "limits"),
    "help": Command("explain a command, a section of RUN.yaml or a field: onward help training.batch_size"),
    "completion": Command("print a script that completes commands and fields in bash, zsh or fish"),
    "doctor": Command("check this machine: versions, devices, disks, speed, communication"),
}
"""Name -> what `onward --help` prints of it; the module of that name in `onward.commands` holds the rest."""


def module_of(command: str) -> Any:
    """The module of a command, imported only when it is needed: others take seconds to import."""
    return importlib.import_module(f"onward.commands.{command.replace('-', '_')}")


def words_of_commands() -> dict[str, list[str]]:
    """Every command with what can follow it: its options, the fields that it takes, the names that it knows."""
    from onward.parameters.fields import field_names, sections

    fields = field_names()
    found = {}
    for name, command in COMMANDS.items():
        actions = _actions_of(name)
        found[name] = options_of(name)
        found[name] += [str(choice) for action in actions for choice in action.choices or ()]
        taken = [field for field in fields if command.fields in ("*", field.partition(".")[0])]
        found[name] += [f"--{field}" for field in taken]
    found["help"] += [*COMMANDS, *sections(), *fields]
    return found


def options_of(command: str) -> list[str]:
    """The options of a command, such as `--quiet`."""
    return [option for action in _actions_of(command) for option in action.option_strings]


def _actions_of(command: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser(prog=command)
    module_of(command).add_arguments(parser)
    return parser._actions
