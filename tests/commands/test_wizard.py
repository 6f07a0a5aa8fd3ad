"""The wizard of `onward init`: its questions, its defaults, and answers that cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onward.cli import main
from onward.parameters import Parameters
from tests.proposal.kinds import Kind, perceptron, table
from tests.proposal.prepared import prepare


def answering(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Feeds lines to `input`; returns what it was asked, filled as it is."""
    asked: list[str] = []
    answers = iter(lines)

    def read(prompt: str) -> str:
        asked.append(prompt)
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    return asked


def test_the_wizard_writes_the_same_file_where_every_default_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Kind(perceptron(4, 3), table, {}), tmp_path, monkeypatch)
    assert main(["init", "net.onnx", "trees.csv", "--no-trial"]) == 0
    plain = Path("run.yaml").read_text().split("\n", 1)
    asked = answering([""] * 20, monkeypatch)
    assert main(["init", "net.onnx", "trees.csv", "--no-trial", "--wizard", "--force"]) == 0
    assert Path("run.yaml").read_text().split("\n", 1)[1] == plain[1]
    assert [prompt.partition("?")[0] for prompt in asked] == [
        "Which feature is the label", "Which loss is minimized",
        "Which fraction of the samples is held out for testing",
        "How many samples per batch", "How many passes over the data", "Which peak learning rate",
        "Which weights are trained (names or *-patterns)", "Which folder is the trained model written to",
    ]  # fmt: skip
    assert "[tree]" in asked[0]
    assert "[softmax_cross_entropy]" in asked[1]


def test_the_wizard_asks_again_until_an_answer_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Kind(perceptron(4, 3), table, {}), tmp_path, monkeypatch)
    lines = ["leaf", "tree", "crossentropy", "", "1.5", "0.25", "many", "24", "0", "3", "fast", "0.01", "", "there"]
    asked = answering(lines, monkeypatch)
    assert main(["init", "net.onnx", "trees.csv", "--no-trial", "--wizard"]) == 0
    assert len(asked) == len(lines)
    said = capsys.readouterr().out
    for words in (
        "there is no feature 'leaf'; the data hold row, length",
        "expected one of softmax_cross_entropy, binary_cross_entropy",
        "expected a fraction from 0 to below 1, such as 0.1",
        "expected a whole number of at least 1",
        "expected a number above 0, such as 0.001",
    ):
        assert words in said
    parameters = Parameters.load("run.yaml")
    assert (parameters.training.batch_size, parameters.training.num_epochs) == (24, 3)
    assert parameters.learning_rate.initial_lr == 0.01
    assert parameters.paths.output_dir == tmp_path / "there"


def test_the_wizard_leaves_out_what_an_option_says_and_says_where_the_input_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Kind(perceptron(4, 3), table, {}), tmp_path, monkeypatch)
    asked = answering([""], monkeypatch)
    words = ["init", "net.onnx", "trees.csv", "--wizard", "--label", "tree", "--loss", "softmax_cross_entropy"]
    assert main(words) == 2
    assert asked[0].startswith("Which fraction")
    assert "the input ended at the question 'How many samples per batch?" in capsys.readouterr().err
    assert not Path("run.yaml").exists()


def test_the_wizard_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a pseudo-terminal, as a person sees it."""
    pty = pytest.importorskip("pty", reason="pseudo-terminals are of Unix")
    prepare(Kind(perceptron(4, 3), table, {}), tmp_path, monkeypatch)
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "onward", "init", "net.onnx", "trees.csv", "--no-trial", "--wizard"]
    os.write(controller, b"\n" * 5 + b"0.004\n" + b"\n" * 5)
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        output, _ = process.communicate(timeout=240)
    os.close(controller)
    os.close(terminal)
    assert process.returncode == 0, output.decode()
    assert b"Press Enter to accept the value in brackets." in output
    assert Parameters.load("run.yaml").learning_rate.initial_lr == 0.004
