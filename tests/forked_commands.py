"""Commands `onward` and `python` in processes that are forked with torch imported and used already.

Each is a process of its own, in its folder, with its arguments and output; only what Python and torch do before the
first line of it, three seconds, was done once. Other commands, and those with operators of a shell, are the shell's.
"""

from __future__ import annotations

import contextlib
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
    with tempfile.TemporaryFile("w+") as output, ForkedProcess(arguments, folder, output.fileno()) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait()
        output.seek(0)
        assert process.returncode == 0, f"{shlex.join(arguments)}\n{output.read()}"


class ForkedProcess:
    """A command in place of `subprocess.Popen`, as far as tests need that.

    Args:
        arguments: `onward ...`, `python FILE ...` or `python -c TEXT ...`, as a shell splits it.
        folder: where it runs.
        output: the descriptor that stdout goes to; None: the pipe `stdout`.
        errors: the descriptor that stderr goes to; None: to where stdout goes.
        variables: of the environment, in addition.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        output: int | None = None,
        errors: int | None = None,
        variables: Mapping[str, str] = {},
    ) -> None:
        ours, theirs = os.pipe()
        self.stdout = os.fdopen(ours)
        given = [theirs if output is None else output]
        given.append(given[0] if errors is None else errors)
        streams = [Connection(os.dup(descriptor), readable=False) for descriptor in given]
        target = (list(arguments), str(folder), dict(variables), *streams)
        self._process = _CONTEXT.Process(target=_run, args=target)
        self._process.start()
        os.close(theirs)
        for stream in streams:
            stream.close()

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

    def finish(self) -> tuple[int, str]:
        """The exit code, and the rest of stdout."""
        said = self.stdout.read()
        return self.wait(), said

    def wait(self, timeout: float = LONGEST_SECONDS) -> int:
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
    arguments: list[str], folder: str, variables: dict[str, str], output: Connection, errors: Connection
) -> NoReturn:
    os.chdir(folder)
    for place, stream in ((1, output), (2, errors)):
        os.dup2(stream.fileno(), place)
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
