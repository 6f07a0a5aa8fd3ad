"""The command line: argv -> one command of `onward.commands`, and its errors -> messages and exit codes.

Exit codes: 0 done, 2 the user's mistake (one clear message), 3 interrupted but saved, 1 anything else.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from onward import __version__
from onward.errors import Interrupted, OnwardError, UserError


class _Command(NamedTuple):
    help: str
    takes_fields: bool = False
    """Whether fields of a RUN.yaml may follow, as `--section.field value`."""


COMMANDS = {
    "create": _Command("write a reference model as ONNX"),
    "pack": _Command("turn text, arrays, tables or images into training shards"),
    "inspect": _Command("report what a model holds and what of it is trainable"),
    "init": _Command("write a RUN.yaml that trains a model on data, every choice with its reason"),
    "lr-find": _Command("try learning rates on a RUN.yaml and suggest one", True),
    "plan": _Command("report who does what in a run, what it takes, and whether it fits; no GPU needed", True),
    "train": _Command("train as a RUN.yaml says", True),
    "export": _Command("write a trained model from a checkpoint"),
    "report": _Command("write one HTML page about a run, or several compared"),
    "help": _Command("explain a command, a section of RUN.yaml or a field: onward help training.batch_size"),
    "completion": _Command("print a script that completes commands and fields in bash, zsh or fish"),
    "doctor": _Command("report what this machine has, whether it works, and how fast it is"),
}
"""Name -> what `onward --help` prints of it; the module of that name in `onward.commands` holds the rest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) == 2 and arguments[0] == "help" and arguments[1] in COMMANDS:
        arguments = [arguments[1], "--help"]
    lists_fields = any(word in arguments for word in ("-h", "--help"))
    parser = _make_parser(next((word for word in arguments if not word.startswith("-")), None), lists_fields)
    known, rest = parser.parse_known_args(arguments)
    if rest and not COMMANDS[known.command].takes_fields:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        _module(known.command).run(known, rest)
    except OnwardError as error:
        print(f"onward {known.command}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3 if isinstance(error, Interrupted) else 1
    except KeyboardInterrupt:
        # While it trains, `train` saves and says so (Interrupted); here there was nothing to save.
        print(f"onward {known.command}: interrupted.", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has left; what it wanted it has.
        sys.stderr.close()
        return 1
    return 0


def _module(command: str) -> Any:
    """The module of a command, imported only when it is needed: others take seconds to import."""
    return importlib.import_module(f"onward.commands.{command.replace('-', '_')}")


def _make_parser(chosen: str | None, lists_fields: bool = False) -> argparse.ArgumentParser:
    """The parser of all commands' names, and of the arguments of the one that is chosen; on request with all fields."""
    parser = argparse.ArgumentParser(prog="onward", description="Train any ONNX model. ONNX in, ONNX out.")
    parser.add_argument("--version", action="version", version=f"onward {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=command.help, add_help=False)
            continue
        module = _module(name)
        usage, description = getattr(module, "USAGE", None), getattr(module, "DESCRIPTION", None)
        one = commands.add_parser(name, help=command.help, usage=usage, description=description)
        if command.takes_fields and lists_fields:
            from onward.parameters.fields import listing

            one.formatter_class = argparse.RawDescriptionHelpFormatter
            one.epilog = f"Fields of RUN.yaml, each as --section.field value:\n\n{listing()}"
        module.add_arguments(one)
    return parser


def words_of_commands() -> dict[str, list[str]]:
    """Every command with what can follow it: its options, the fields that it takes, the names that it knows."""
    from onward.parameters.fields import field_names, sections

    fields = field_names()
    found = {}
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=name)
        _module(name).add_arguments(parser)
        found[name] = [option for action in parser._actions for option in action.option_strings]
        found[name] += [str(choice) for action in parser._actions for choice in action.choices or ()]
        found[name] += [f"--{field}" for field in fields] if command.takes_fields else []
    found["help"] += [*COMMANDS, *sections(), *fields]
    return found


if __name__ == "__main__":
    sys.exit(main())
