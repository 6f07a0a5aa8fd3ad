"""`onward doctor`: every check on this machine, and what it says where something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from onward.cli import main
from onward.diagnosis import communication
from onward.diagnosis.findings import Finding


def test_the_whole_command() -> None:
    command = [sys.executable, "-m", "onward", "doctor", "--seconds", "0.4", "--processes", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True
    assert {one["topic"] for one in told["findings"]} >= {
        "versions",
        "cpu",
        "memory",
        "gpu",
        "clock",
        "disk",
        "speed",
        "communication",
    }
    sums = [one["text"] for one in told["findings"] if one["topic"] == "communication"]
    assert any("over 2 processes (cpu, gloo)" in text and text.endswith("sums correct") for text in sums)


def test_clocks_that_stand_still_are_a_problem_and_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    told = capsys.readouterr().out
    assert (
        "clock     PROBLEM  the monotonic clock advanced by 0.000 s in a sleep of 0.05 s; nothing was timed\n"
        "                   -> Synchronize the machine's clock and restart what controls it "
        "(virtual machine, debugger, time namespace).\n" in told
    )
    assert "speed" not in told
    assert "communication" not in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "0"], "onward doctor: --seconds is 0; pass a number above 0.\n"),
        (["--processes", "0"], "onward doctor: --processes is 0; pass at least 1.\n"),
        (
            ["--folder", "nowhere"],
            "onward doctor: --folder 'nowhere' is not a folder; pass the folder to write runs to.\n",
        ),
    ],
)
def test_options_that_are_none(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err == words


def test_a_problem_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = [Finding("exchange", "2 processes cannot exchange", "problem", "Look at firewalls.")]
    monkeypatch.setattr(communication, "check_communication", lambda *_: broken)
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--seconds", "0.02"])
    assert stop.value.code == 1
    text = capsys.readouterr().out
    assert "exchange  PROBLEM  2 processes cannot exchange\n                   -> Look at firewalls.\n" in text
    assert "1 problem, " in text.splitlines()[-1]
