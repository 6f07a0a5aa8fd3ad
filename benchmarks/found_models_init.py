"""`onward init MODEL DATA`, then `onward train` with what it wrote: the way of somebody with a file and a folder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.found_models_data import write_data
from benchmarks.found_models_inputs import open_session
from benchmarks.found_models_row import Outcome
from onward.data.loader import DataLoader
from onward.environment import Environment
from onward.graph.reading.model_file import read_model
from onward.graph.repair.fixed_inputs import propose_fixed_inputs
from onward.parameters import Checkpoint, Parameters, TensorBoard
from onward.runner import TrainingRunner

UPDATES = 30


@dataclass(frozen=True)
class Ended:
    """A command that ended, with the seconds until its first step was shown (0: none was)."""

    code: int
    text: str
    first_step_seconds: float = 0.0


def init_and_train(model: Path, file: str, scratch: Path) -> Outcome:
    """Whether both commands end well and the loss on the training set is lower after them than before."""
    try:
        label = write_data(open_session(model), file, list(propose_fixed_inputs(read_model(model))), scratch / "d.npz")
    except ValueError as error:
        return Outcome(None, "no data set", str(error))
    start = time.perf_counter()
    made = _run("init", str(model), "d.npz", "-o", "run.yaml", folder=scratch)
    if made.code != 0:
        # Refusals of what cannot train are as good as a success when they say why; a crash never is.
        return Outcome(None if made.code == 2 else False, "refused" if made.code == 2 else "fails", _shown(made.text))
    init_seconds = time.perf_counter() - start
    overrides = _overrides(scratch)
    trained = _run("train", "run.yaml", *(f"--{k}={v}" for k, v in overrides.items()), folder=scratch)
    if trained.code != 0:
        return Outcome(False, "fails", f"onward train: {_shown(trained.text)}")
    before, after = (_loss(scratch, overrides, one) for one in (model, _trained(scratch, overrides)))
    first = init_seconds + trained.first_step_seconds
    return Outcome(after < before, f"{before:.3g} to {after:.3g}", label, round(first, 1))


def _overrides(folder: Path) -> dict[str, str]:
    """30 updates, whatever the file says of epochs; the first one is shown, so that its time can be taken."""
    asked = Parameters.load(folder / "run.yaml").training
    passes = UPDATES * asked.gradient_accumulation_steps
    fields = {"training.num_train_steps": str(passes), "training.display_loss_steps": "1"}
    if getattr(asked, "num_epochs", None) is not None:
        fields["training.num_epochs"] = "null"
    return fields


def _trained(folder: Path, overrides: dict[str, str]) -> Path:
    parameters = Parameters.load(folder / "run.yaml", overrides)
    (path,) = Path(str(parameters.paths.output_dir)).glob("*_trained.onnx")
    return path


def _loss(folder: Path, overrides: dict[str, str], model: Path) -> float:
    """The mean loss over the training set of the run, with the weights of a file."""
    parameters = Parameters.load(folder / "run.yaml", overrides)
    parameters = replace(parameters, paths=replace(parameters.paths, model_path=model, output_dir=None))
    parameters = replace(parameters, checkpoint=Checkpoint(), tensorboard=TensorBoard())
    assert parameters.paths.train_data_dir is not None
    loader = DataLoader(parameters.data.input_name_map, parameters.paths.train_data_dir)
    runner = TrainingRunner(parameters, Environment(execution_provider="CPU"), progress=False)
    try:
        runner.initialize(loader.feature_specs())
        return float(runner.evaluate(loader).metrics["loss"])
    finally:
        loader.close()


def _run(*arguments: str, folder: Path) -> Ended:
    """A command of onward; when a line of it first shows a step."""
    start, first, lines = time.perf_counter(), 0.0, []
    command = [sys.executable, "-u", "-m", "onward", *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not first and line.lstrip().startswith("step"):
                first = time.perf_counter() - start
    return Ended(process.returncode, "".join(lines), first)


def _shown(text: str) -> str:
    """The message of a command that failed, for a cell of a table."""
    return " ".join(text.split())[-400:]


def as_json(folder: Path) -> str:
    """The run that was proposed, for a look at it."""
    return json.dumps(Parameters.load(folder / "run.yaml").to_mapping(), default=str)
