"""Commands `onward` and `python` in processes that are forked with torch imported and used already.

Each is a process of its own, in its folder, with its arguments and output; only what Python and torch do before the
first line of it, three seconds, was done once. Other commands, and those with operators of a shell, are the shell's.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, Self

from onward import cli
from tests.ranks import _CONTEXT

BIN = Path(sys.executable).parent
LONGEST_SECONDS = 300.0


def run_command(command: str, folder: Path) -> None:
    """Runs a line of a shell in a folder, in a forked process if it can be.

    Raises:
        AssertionError: it fails; with all that it has printed.
    """
    arguments = shlex.split(command)
    unquoted = re.sub(r"""'[^']*'|"[^"]*\"""", "", command)
    if arguments[0] in _COMMANDS and not re.search(r"[|&;<>$`*?~()]", unquoted):
        run_forked(arguments, folder)
    else:
        run_in_shell(command, folder)


def run_in_shell(command: str, folder: Path) -> None:
    """Runs a line of a shell in a folder, from the very beginning.

    Raises:
        AssertionError: it fails; with all that it has printed.
    """
    environment = {**os.environ, **_variables()}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def run_forked(arguments: Sequence[str], folder: Path) -> None:
    """Runs `onward ...`, `python FILE ...` or `python -c TEXT` in a folder.

    Raises:
        AssertionError: it fails; with all that it has printed.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        process = _CONTEXT.Process(target=_run, args=(list(arguments), str(folder), output.name))
        process.start()
        process.join(LONGEST_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode == 0, f"{shlex.join(arguments)}\n{output.read()}"


class ForkedCommand:
    """`onward ...` in place of `subprocess.Popen`; what it prints is printed here, too, as soon as it has ended.

    Args:
        command: the interpreter, `-m`, `onward` and the arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name) / name for name in ("output", "errors")]
        for output in self._outputs:
            output.touch()
        names = map(str, self._outputs)
        self._process = _CONTEXT.Process(target=_run, args=(["onward", *command[3:]], os.getcwd(), *names))
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def wait(self) -> int | None:
        """The exit code; None after `LONGEST_SECONDS`."""
        self._process.join(LONGEST_SECONDS)
        for descriptor, output in enumerate(self._outputs, start=1):
            os.write(descriptor, output.read_bytes())
        return self._process.exitcode


class ForkedProcess:
    """`onward ...` or `python -c TEXT ...` in place of `subprocess.Popen`, as far as tests of signals need it.

    Args:
        arguments: the command, as a shell splits it.
        folder: where it runs.
        errors: the file that stderr goes to; None: to where stdout goes.
        variables: of the environment, in addition to those here.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, errors: Path | None = None, variables: Mapping[str, str] = {}
    ) -> None:
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        self._errors = errors
        if errors is not None:
            errors.write_bytes(b"")
        given = (list(arguments), str(folder), theirs, None if errors is None else str(errors), dict(variables))
        self._process = _CONTEXT.Process(target=_run, args=given)
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()))
        ours.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self.stdout.close()

    @property
    def returncode(self) -> int | None:
        """None: it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """The rest of stdout, and stderr where it is apart, once the process has ended."""
        out = self.stdout.read()
        self.wait(timeout)
        return out, "" if self._errors is None else self._errors.read_text()

    def wait(self, timeout: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the process runs on.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self._process.exitcode


def _variables() -> dict[str, str]:
    return {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def _run(
    arguments: list[str],
    folder: str,
    output: str | Connection,
    errors: str | None = None,
    variables: Mapping[str, str] = {},
) -> NoReturn:
    os.chdir(folder)
    for stream, target in ((1, output), (2, errors or output)):
        opened = os.open(target, os.O_WRONLY | os.O_APPEND) if isinstance(target, str) else target.fileno()
        os.dup2(opened, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    os.environ |= {**_variables(), **variables}
    _COMMANDS[arguments[0]](arguments)
    sys.exit()


def _onward(arguments: list[str]) -> None:
    sys.argv = arguments
    cli.process()


def _python(arguments: list[str]) -> None:
    sys.path.insert(0, os.getcwd())
    if arguments[1] != "-c":
        sys.argv = arguments[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    sys.argv = ["-c", *arguments[3:]]
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(compile(arguments[2], "<string>", "exec"), vars(module))


_COMMANDS: dict[str, Callable[[list[str]], None]] = {"onward": _onward, "python": _python}
