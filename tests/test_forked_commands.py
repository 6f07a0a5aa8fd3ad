"""Forked processes begin with what the server has done, and are told of as other processes are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import forked_commands
from tests.forked_commands import run_command
from tests.ranks import run_on_ranks


def has_begun_before() -> bool:
    return "tests.fork_server" in sys.modules


def test_the_server_has_trained_once() -> None:
    """A server that fails to import what it should have is silent, and every rank does it for itself."""
    assert run_on_ranks(1, has_begun_before) == [True]


def test_commands_run_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import sys\nopen('written', 'w').write(' '.join([__name__, *sys.argv[1:]]))\n")
    run_command("python one.py 'a b' c", tmp_path)
    assert (tmp_path / "written").read_text() == "__main__ a b c"


def test_a_command_that_fails_shows_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)onward inspect none\.onnx\n.*none\.onnx"):
        run_command("onward inspect none.onnx", tmp_path)


@pytest.mark.parametrize("line", ["python one.py > written", "python one.py && true", "echo $HOME", "cat *.py"])
def test_what_only_a_shell_understands_is_left_to_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text("print(1)\n")
    monkeypatch.setattr(forked_commands, "run_forked", None)
    run_command(line, tmp_path)
