"""Completion scripts know commands and fields."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from onward.commands.completion import script
from onward.commands.table import COMMANDS, words_of_commands


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_everything(shell: str) -> None:
    words = words_of_commands()
    text = script(shell, words)
    assert set(words) == set(COMMANDS)
    for word in (*COMMANDS, "training.batch_size", "sweep", "dry-run", "quantize"):
        assert word in text


def complete(line: str, folder: Path) -> list[str]:
    """What bash offers for a line."""
    (folder / "onward.bash").write_text(script("bash", words_of_commands()))
    words = line.split(" ")
    code = (
        f"source {folder / 'onward.bash'}; COMP_WORDS=({' '.join(word or chr(39) * 2 for word in words)}); "
        f"COMP_CWORD={len(words) - 1}; _onward; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path) -> None:
    assert complete("onward tr", tmp_path) == ["train"]
    assert complete("onward train --training.batch", tmp_path) == ["--training.batch_size"]
    assert complete("onward train run", tmp_path) == []  # files, by bash itself
    assert complete("onward help early_stopping.p", tmp_path) == ["early_stopping.patience"]
    assert "--quantize" in complete("onward export --", tmp_path)
    assert complete("onward completion fi", tmp_path) in (["fish"], [])
