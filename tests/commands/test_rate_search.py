"""`onward lr-find`: a table, a suggestion and a picture, and a run that stays as it was."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onward.cli import main
from onward.commands.initialization import _try_a_step
from onward.commands.loaders import training_loader
from onward.commands.rate_search import find_rate
from onward.commands.rehearsal import without_traces
from onward.engine.loop import closing_batches
from onward.environment import Environment
from onward.parameters import Parameters
from onward.report.phases import Phases
from onward.runner import TrainingRunner
from tests.commands.test_init import losses_of_run
from tests.proposal.kinds import numbers, perceptron
from tests.watching import Recorder


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    perceptron(5, 1)(tmp_path)
    numbers(5, lambda x: x.sum(1))(tmp_path)
    assert main(["init", "net.onnx", "numbers.npz", "--no-trial"]) == 0
    capsys.readouterr()
    return tmp_path / "run.yaml"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_table_a_suggestion_and_a_picture(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run_file.parent)
    assert main(["lr-find", "run.yaml", "--image", "curve.svg", "--steps", "60"]) == 0
    said = capsys.readouterr().out
    assert "learning rate" in said
    suggestion = float(said.partition("suggested: learning_rate.initial_lr: ")[2].split()[0])
    assert 1e-4 < suggestion < 0.5
    assert "(now 0.003)" in said
    picture = run_file.parent / "curve.svg"
    ElementTree.fromstring(picture.read_text())
    assert f"suggested: {suggestion:.2g}" in picture.read_text()
    after = contents(run_file.parent)
    assert after.keys() - before.keys() == {picture}
    assert all(after[path] == before[path] for path in before)
    assert main(["lr-find", "run.yaml", "--steps", "60"]) == 0
    assert said.startswith(capsys.readouterr().out.rstrip())


def test_the_suggested_rate_trains_about_as_well_as_the_best(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lr-find", "run.yaml", "--steps", "60"]) == 0
    rate = capsys.readouterr().out.partition("suggested: learning_rate.initial_lr: ")[2].split()[0]
    found, *others = (
        losses_of_run(Parameters.load("run.yaml", {"learning_rate.initial_lr": one}), 120)[1]
        for one in (rate, "1.0e-04", "1.0e-03", "1.0e-02", "1.0e-01", "1.0")
    )
    assert found < 3 * min(others) + 0.01
    assert found < 0.2 * max(others)


def test_a_rate_that_diverges_ends_the_test(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lr-find", "run.yaml", "--to", "1e8", "--steps", "60"]
    assert (
        main([*words, "--optimizer.training_optimizer_name", "SGDOptimizer", "--optimizer.optimizer_attributes", "[]"])
        == 0
    )
    assert "the loss diverged at" in capsys.readouterr().out


def test_a_picture_as_png(run_file: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="a PNG needs pillow")
    assert main(["lr-find", "run.yaml", "--image", "curve.png", "--steps", "12"]) == 0
    with image.open("curve.png") as opened:
        assert opened.width > 1000
        assert len(np.unique(np.asarray(opened))) > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--from", "1", "--to", "0.1"],
            "--from is 1 and --to is 0.1; expected rates above 0, with --to above --from.",
        ),
        (["--steps", "3"], "--steps is 3; expected at least 10."),
        (["--image", "a.gif"], "--image 'a.gif': expected a file that ends in .svg or .png."),
        (["--training.nonsense", "1"], "training.nonsense"),
        (["--paths.train_data_dir", "nowhere"], "nowhere"),
        (["--checkpoint", "nowhere"], "nowhere"),
    ],
)
def test_mistakes(run_file: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lr-find", "run.yaml", *options]) == 2
    assert message in capsys.readouterr().err


def test_it_begins_with_a_checkpoint_if_asked(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "--training.num_epochs", "30"]) == 0
    capsys.readouterr()
    first = []
    for options in ([], ["--checkpoint", "trained/checkpoints"]):
        assert main(["lr-find", "run.yaml", "--steps", "12", *options]) == 0
        first.append(float(capsys.readouterr().out.splitlines()[1].split()[1]))
    assert first[1] < 0.5 * first[0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_range_test_the_trial_step_and_training_show_one_unit(
    run_file: Path, reduction: str, accumulation: int
) -> None:
    """The loss of the first update as onnxruntime has it, a sample: of one output a sample that is the mean as well."""
    asked = {"training.gradient_accumulation_steps": str(accumulation), "loss.reduction": reduction}
    parameters = Parameters.load("run.yaml", asked)
    session, loader = onnxruntime.InferenceSession("net.onnx"), training_loader(parameters)
    with closing_batches(loader.batches(parameters.training.batch_size)) as batches:
        first = [next(batches).features for _ in range(accumulation)]
    loader.close()
    squares = [(session.run(None, {"x": one["x"]})[0].reshape(-1) - one["y"].reshape(-1)) ** 2 for one in first]
    expected = np.concatenate(squares).astype(np.float64).mean()
    table = find_rate("run.yaml", asked, updates=10)
    assert float(table.splitlines()[1].split()[1]) == pytest.approx(expected, rel=1e-3)
    shown = _try_a_step(parameters, Phases.silent()).removeprefix("trial step: the initial loss is ").rstrip(".")
    assert float(shown) == pytest.approx(expected, rel=1e-3)
    recorder, loader = Recorder(), training_loader(parameters)
    runner = TrainingRunner(without_traces(parameters, 4), Environment(), [recorder], progress=False)
    runner.initialize(loader.feature_specs())
    runner.run(loader)
    loader.close()
    assert recorder.losses[0] == pytest.approx(expected, rel=1e-5)
