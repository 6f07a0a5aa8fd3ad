"""The command line: argv -> one command of `onward.commands`, and its errors -> messages and exit codes.

Exit codes: 0 done, 2 the user's mistake (one clear message), 3 interrupted but saved, 1 anything else.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from onward import __version__
from onward.commands.table import COMMANDS, module_of, options_of
from onward.errors import Interrupted, NoteWarning, OnwardError, RenamedField, UserError
from onward.report.phases import Phases
from onward.spelling import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) == 2 and arguments[0] == "help" and arguments[1] in COMMANDS:
        arguments = [arguments[1], "--help"]
    lists_fields = any(word in arguments for word in ("-h", "--help"))
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    with Phases(functools.partial(_announce, chosen)) as phases:
        phases.begin("importing Python packages")
        parser = _make_parser(chosen, lists_fields)
        # Before the parser sees them: it would take the value of a field for a file that the command reads.
        others, fields = _split_fields(arguments)
        known, rest = parser.parse_known_args(others)
        unknown = {"": [*rest, *fields], "*": []}.get(COMMANDS[known.command].fields, rest)
        if unknown:
            _refuse(parser, known.command, unknown)
        return _run(known, [*fields, *rest], phases)


def process() -> NoReturn:
    """The process `onward`: its modules are never walked through as garbage, when it ends neither (a second of CPU)."""
    gc.freeze()
    try:
        sys.exit(main())
    finally:
        gc.freeze()


def _run(known: argparse.Namespace, rest: Sequence[str], phases: Phases) -> int:
    """Runs the command; returns the exit code."""
    try:
        with _warnings_as_notes():
            module_of(known.command).run(known, rest, phases)
    except OnwardError as error:
        phases.end()
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


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Warnings of onward's own are worth one line: of the process that the user started, else of rank 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("once", RenamedField)
        warnings.simplefilter("always", NoteWarning)
        show = warnings.showwarning

        def show_note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US, is_first_rank

            if not issubclass(category, RenamedField | NoteWarning):
                show(message, category, filename, lineno, file, line)
            elif is_first_rank() and (issubclass(category, NoteWarning) or LAUNCHED_BY_US not in os.environ):
                print(f"note   {message}", file=sys.stderr)

        warnings.showwarning = show_note
        yield


def _split_fields(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without its `--section.field value`s, and these: no option of a command has a dot in its name."""
    others: list[str] = []
    fields: list[str] = []
    rest = list(arguments)
    while rest:
        one = rest.pop(0)
        if not one.startswith("--") or "." not in one.partition("=")[0]:
            others.append(one)
            continue
        fields.append(one)
        if "=" not in one and rest and not rest[0].startswith("--"):
            fields.append(rest.pop(0))
    return others, fields


def _announce(command: str | None, text: str) -> None:
    """Reports what a command is doing where it disturbs nobody who reads its output."""
    with suppress(OSError, ValueError):  # a reader that left must not end the command from another thread
        print(f"onward {command}: {text}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    """A parser that names the nearest choice to one that there is not."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        """Says what is wrong; the usage, which argparse would print first, takes twenty lines in some commands."""
        is_answered = message.endswith("?") or "--help" in message
        hint = "" if is_answered else f". Run '{self.prog} --help' for its arguments."
        self.exit(2, f"{self.prog}: {message}{hint}\n")


def _refuse(parser: argparse.ArgumentParser, command: str, rest: Sequence[str]) -> NoReturn:
    """Ends the program for arguments that a command does not take."""
    unknown = next((word for word in rest if word.startswith("-")), None)
    hint = "" if unknown is None else did_you_mean(unknown.partition("=")[0], options_of(command))
    hint = hint or f" Run 'onward {command} --help' for its arguments."
    parser.error(f"{command} does not take {' '.join(rest)}.{hint}")


def _make_parser(chosen: str | None, lists_fields: bool = False) -> argparse.ArgumentParser:
    """The parser of all commands' names, and of the arguments of the one that is chosen; on request with all fields."""
    parser = _Parser(prog="onward", description="Train any ONNX model. ONNX in, ONNX out.")
    parser.add_argument("--version", action="version", version=f"onward {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=command.help, add_help=False)
            continue
        module = module_of(name)
        usage, description = getattr(module, "USAGE", None), getattr(module, "DESCRIPTION", None)
        one = commands.add_parser(name, help=command.help, usage=usage, description=description)
        if not command.lists_fields:
            one.epilog = (
                "Every field of RUN.yaml may follow, too, as --section.field value. onward train --help lists all, and "
                "onward help SECTION.FIELD explains one."
            )
        elif command.fields and lists_fields:
            from onward.parameters.fields import explain, listing

            one.formatter_class = argparse.RawDescriptionHelpFormatter
            taken = listing() if command.fields == "*" else explain(command.fields)
            one.epilog = f"Fields of RUN.yaml, each as --section.field value:\n\n{taken}"
        module.add_arguments(one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
