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
    "doctor": _Command("report what this machine has, whether it works, and how fast it is"),
}
"""Name -> what `onward --help` prints of it; the module of that name in `onward.commands` holds the rest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _make_parser(next((word for word in arguments if not word.startswith("-")), None))
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


def _make_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of all commands' names, and of the arguments of the one that is chosen."""
    parser = argparse.ArgumentParser(prog="onward", description="Train any ONNX model. ONNX in, ONNX out.")
    parser.add_argument("--version", action="version", version=f"onward {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=command.help, add_help=False)
            continue
        module = _module(name)
        usage, description = getattr(module, "USAGE", None), getattr(module, "DESCRIPTION", None)
        module.add_arguments(commands.add_parser(name, help=command.help, usage=usage, description=description))
    return parser


if __name__ == "__main__":
    sys.exit(main())
