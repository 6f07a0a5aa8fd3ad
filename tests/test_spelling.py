"""A misspelled command, option, field or value is answered with the nearest that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.cli import main
from onward.commands.table import COMMANDS, options_of
from onward.spelling import did_you_mean, listed, shortened
from tests.test_cli import workplace, write_run  # noqa: F401


def test_the_nearest_names() -> None:
    assert did_you_mean("trian", ["train", "plan"]) == " Did you mean 'train'?"
    assert did_you_mean("batchsize", ["batch_size", "eval_batch_size"], most=2) == (
        " Did you mean 'batch_size' or 'eval_batch_size'?"
    )
    assert did_you_mean("xyz", ["train", "plan"]) == ""


SWAPPED = [name for name in COMMANDS if len(name) > 4]


@pytest.mark.parametrize("command", SWAPPED)
def test_every_command_is_found_from_two_swapped_letters(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = f"{command[:2]}{command[3]}{command[2]}{command[4:]}"
    with pytest.raises(SystemExit) as stop:
        main([wrong, "run.yaml"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(f"Did you mean {command!r}?")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("inspect mlp.onnx --weigths 3", "inspect does not take --weigths 3. Did you mean '--weights'?"),
        ("export mlp.onnx --quantise fp16", "export does not take --quantise fp16. Did you mean '--quantize'?"),
        ("export mlp.onnx --quantize fp61 -o a", "'fp61' (choose from 'fp16', 'int8-dynamic', 'int8-static')"),
        ("export mlp.onnx --quantize fp61 -o a", "Did you mean 'fp16'?"),
        ("create gpt3 -o a.onnx", "Did you mean 'gpt2'?"),
        ("inspect a b c", "inspect does not take c. Run 'onward inspect --help' for its arguments."),
    ],
)
def test_options_and_choices(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "plan", "lr-find"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--batch_size 3", "set fields as --section.field value. Did you mean '--training.batch_size'?"),
        ("--batch-size 3", "set fields as --section.field value. Did you mean '--training.batch_size'?"),
        ("--initial_lr=3", "set fields as --section.field value. Did you mean '--learning_rate.initial_lr'?"),
        ("--training.batchsize 3", "training.batchsize is unknown. Did you mean 'batch_size'?"),
        ("--training.initial_lr 3", "training.initial_lr is unknown. Did you mean 'learning_rate.initial_lr'?"),
        ("--trainig.seed 3", "trainig is unknown. Did you mean 'training'?"),
        ("--loss.type cross_entropy", "Did you mean 'binary_cross_entropy' or 'softmax_cross_entropy'?"),
    ],
)
def test_fields(
    workplace: Path,  # noqa: F811
    command: str,
    given: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, str(workplace / "run.yaml"), *given.split()]) == 2
    assert words in capsys.readouterr().err


def test_the_options_of_commands_that_take_fields(
    workplace: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(workplace / "run.yaml"), "--dryrun"]) == 2
    assert "'--dryrun' is not understood" in (told := capsys.readouterr().err)
    assert told.rstrip().endswith("Did you mean '--dry-run'?")
    assert "--dry-run" in options_of("train")


def test_fields_in_a_file(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    path = write_run(workplace, optimizer={"max_grad_nrm": 1.0}, trainng={"seed": 1})
    assert main(["train", str(path)]) == 2
    told = capsys.readouterr().err
    assert "optimizer.max_grad_nrm is unknown. Did you mean" in told
    assert "trainng is unknown. Did you mean 'training'?" in told


def test_lists_of_words() -> None:
    assert [listed(words) for words in ((), ("a",), ("a", "b"), ("a", "b", "c"))] == ["", "a", "a or b", "a, b or c"]
    assert shortened("abcde", 5) == "a, b, c, d, e"
    assert [shortened("abcde", most) for most in (4, 1)] == ["a, b, c, d and 1 more", "a and 4 more"]
    assert shortened("abc", 2, "; ") == "a; b; and 1 more"
    assert shortened((), 3) == ""
