"""`onward init` where labels are sequences for CTC: what it refuses, and what can be asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from onward.cli import main
from tests.commands.test_init import prepare
from tests.proposal.kinds import Kind
from tests.proposal.recognizers import digit_strings, recognizer


def fix_time_steps() -> None:
    model = onnx.load("net.onnx")
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 20
    onnx.save(model, "net.onnx")


def one_long_label(folder: Path) -> str:
    name = digit_strings()(folder)
    data = dict(np.load(folder / name))
    data["text"] = np.pad(data["text"], ((0, 0), (0, 25)), constant_values=-1)
    data["text"][7] = 4
    np.savez(folder / name, **data)
    return name


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (digit_strings(longest=5, first_class=2), "it has 11 classes, the largest label is 11"),
        (one_long_label, "it has 20 time steps, and the longest labels need 59 (CTC, a blank between equal neighbors)"),
    ],
)
def test_label_sequences_that_do_not_fit_are_refused(
    data: Callable[[Path], str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(Kind(recognizer(), data, {}), tmp_path, monkeypatch)
    fix_time_steps()
    assert main(["init", "net.onnx", "digits.npz"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_ctc_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are as many labels as time steps, a class for each is the likelier task."""
    prepare(Kind(recognizer(), digit_strings(), {}), tmp_path, monkeypatch)
    fix_time_steps()
    data = dict(np.load("digits.npz"))
    data["text"] = np.pad(data["text"], ((0, 0), (0, 15)), constant_values=-1)
    np.savez("digits.npz", **data)
    assert main(["init", "net.onnx", "digits.npz", "--no-trial"]) == 2
    assert main(["init", "net.onnx", "digits.npz", "--loss", "ctc", "--no-trial"]) == 0
    assert yaml.safe_load(Path("run.yaml").read_text())["loss"]["type"] == "ctc"
