"""The command line as a user meets it: from a model to a trained one, and every mistake in one message."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from onnx import numpy_helper

import onward
from onward.cli import main
from onward.errors import NoteWarning
from tests.forked_commands import ForkedProcess
from tests.initializers import stored_arrays
from tests.mlp import cross_entropies, data, forward, save_mlp, write_shards

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "onward"]


def write_run(folder: Path, **changes: Any) -> Path:
    """A RUN.yaml for the small network, some fields of its sections changed."""
    sections: dict[str, Any] = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "test_data_dir": "test", "output_dir": "out"},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"},
        "training": {"batch_size": 4, "num_train_steps": 8, "display_loss_steps": 4},
        "learning_rate": {"initial_lr": 0.1},
        "checkpoint": {"checkpoints_dir": "out/checkpoints"},
        "machine": {"execution_provider": "CPU", "threads": 1},
    }
    for name, fields in changes.items():
        sections[name] = {**sections.get(name, {}), **fields} if isinstance(fields, dict) else fields
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with a model, training and test data, and a RUN.yaml."""
    save_mlp(tmp_path)
    write_shards(tmp_path / "train", data(24))
    write_shards(tmp_path / "test", data(9, seed=1))
    write_run(tmp_path)
    return tmp_path


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: onward ")
    for command in ("create", "pack", "inspect", "init", "lr-find", "train", "export"):
        assert f"    {command} " in text
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"onward {onward.__version__}\n"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, onward.cli\ntry: onward.cli.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("command", ["create", "pack", "inspect", "init", "lr-find", "train", "export"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: onward {command} ")


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train"], ["inspect", "a", "b", "c"], ["doctor", "--c.d", "e"]])
def test_a_command_line_that_is_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("onward")
    assert "--help' for its arguments." in said or "Did you mean '" in said
    assert said.count("\n") == 1, "one line, not the usage of the command"


def test_from_a_reference_model_to_a_trained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """create, pack, inspect, train, export, in a folder of the user's own; onnxruntime runs what comes out."""
    monkeypatch.chdir(tmp_path)
    assert main(split("create mnist --variant conv --image-size 9 -o digits.onnx")) == 0
    assert capsys.readouterr().out.startswith("digits.onnx: ")

    generator = np.random.default_rng(0)
    images = generator.random((40, 1, 9, 9), dtype=np.float32)
    np.savez("digits.npz", X=images, labels=generator.integers(0, 10, 40))
    assert main(split("pack digits.npz data --samples-per-file 16")) == 0
    assert len(list((tmp_path / "data").glob("**/*.pb"))) == 3

    assert main(split("inspect digits.onnx --weights 3")) == 0
    text = capsys.readouterr().out
    assert "Inputs\n  X  float32  [batch, 1, 9, 9]" in text
    assert "Cannot be lowered" not in text

    (tmp_path / "run.yaml").write_text(
        "paths: {model_path: digits.onnx, train_data_dir: data, test_data_dir: data, output_dir: out}\n"
        "loss: {type: softmax_cross_entropy, prediction: predictions, label: labels}\n"
        "training: {batch_size: 8, num_train_steps: 10, evaluation_period: 5}\n"
        "learning_rate: {initial_lr: 1e-2}\n"
        "checkpoint: {checkpoints_dir: out/checkpoints}\n"
        "tensorboard: {log_dir: out/tensorboard}\n"
        "machine: {execution_provider: CPU, threads: 1}\n"
    )
    assert main(split("train run.yaml --training.num_train_steps 6 --optimizer.training_optimizer_name=Adam")) == 0
    out = capsys.readouterr().out
    assert re.search(r"^train .*6/6 ", out, re.M)
    assert re.search(r"^eval .*loss", out, re.M)
    assert re.search(
        r"^note .*trained model written to out/digits_trained\.onnx\.$", out.replace(f"{tmp_path}/", ""), re.M
    )
    compiling = (
        "speed.compile: off, since on a CPU compiling gains too little in a run of this length; `true` turns it on."
    )
    assert f"note   {compiling}" in out
    assert compiling in (tmp_path / "out" / "tensorboard" / "metrics.jsonl").read_text()

    assert main(split("export digits.onnx --checkpoint out/checkpoints -o trained.onnx")) == 0
    assert capsys.readouterr().out == "wrote trained.onnx\n"
    assert (tmp_path / "trained.onnx").read_bytes() == (tmp_path / "out" / "digits_trained.onnx").read_bytes()
    logits = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"X": images})[0]
    assert logits.shape == (40, 10)
    assert np.isfinite(logits).all()


def test_train_prints_what_evaluation_by_numpy_gives(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(workplace / "run.yaml")]) == 0
    out = capsys.readouterr().out
    trained = stored_arrays(workplace / "out" / "mlp_trained.onnx")
    test = data(9, seed=1)
    order = [*range(0, 9, 2), *range(1, 9, 2)]  # as the shards hold them; a mean does not mind
    loss = cross_entropies(forward(test["x"][order], trained), test["label"][order]).mean()
    shown = re.search(r"^eval .*?loss\s+([0-9.]+)", out, re.M)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(loss, abs=1e-3)


def test_all_rounds_of_a_file(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained one after the other; a second start finds them all done, evaluates and writes the model again."""
    write_shards(workplace / "longer", data(12, seed=3))
    rounds = [{"paths": {"train_data_dir": "longer"}, "training": {"num_train_steps": 3, "batch_size": 2}}]
    run = write_run(workplace, next_rounds=rounds)
    assert main(["train", str(run)]) == 0
    out = capsys.readouterr().out
    assert "\nsummary\n" in out
    assert "\nsummary of round 1\n" in out
    assert [path.name for path in (workplace / "out" / "checkpoints").glob("c*")] == ["checkpoint-00000011"]
    trained = workplace / "out" / "mlp_trained.onnx"
    content = trained.read_bytes()
    trained.unlink()
    assert main(["train", str(run)]) == 0
    out = capsys.readouterr().out
    assert "all rounds of this run are already trained; evaluating and writing the model." in out
    assert "train " not in out
    assert re.search(r"^eval ", out, re.M)
    assert trained.read_bytes() == content


def break_model(folder: Path) -> None:
    (folder / "mlp.onnx").write_bytes(b"no model at all")


def cut_model(folder: Path) -> None:
    path = folder / "mlp.onnx"
    path.write_bytes(path.read_bytes()[:-40])


def remove_model(folder: Path) -> None:
    (folder / "mlp.onnx").unlink()


def empty_data(folder: Path) -> None:
    for path in (folder / "train").iterdir():
        path.unlink()


def narrow_data(folder: Path) -> None:
    empty_data(folder)
    features = data(24)
    (folder / "train").rmdir()
    write_shards(folder / "train", {**features, "x": features["x"][:, :5]})


def label_data(folder: Path) -> None:
    empty_data(folder)
    features = data(24)
    (folder / "train").rmdir()
    write_shards(folder / "train", {**features, "label": features["label"] + 3})


def train_another_model(folder: Path) -> None:
    assert main(["train", str(folder / "run.yaml")]) == 0
    model = onnx.load(folder / "mlp.onnx")
    for name, shape in (("w1", (6, 9)), ("b1", 9), ("w2", (9, 4))):
        index = [t.name for t in model.graph.initializer].index(name)
        model.graph.initializer[index].CopyFrom(numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(model, folder / "mlp.onnx")


def use_unknown_operator(folder: Path) -> None:
    model = onnx.load(folder / "mlp.onnx")
    model.graph.node[1].op_type = "Fancy"
    model.graph.node[1].domain = "my.domain"
    model.opset_import.append(onnx.helper.make_opsetid("my.domain", 1))
    onnx.save(model, folder / "mlp.onnx")


def plan_a_second_round(folder: Path) -> None:
    write_run(folder, next_rounds=[{"paths": {"train_data_dir": "nowhere"}}])


def put_file_in_the_way(folder: Path) -> None:
    (folder / "file").write_text("")


def do_nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "overrides", "words"),
    [
        (remove_model, [], ["mlp.onnx", "does not exist"]),
        (break_model, [], ["mlp.onnx"]),
        (cut_model, [], ["mlp.onnx"]),
        (use_unknown_operator, [], ["1 node(s) cannot be lowered", "'relu' (Fancy)", "my.domain"]),
        (do_nothing, ["--training.batchsize", "8"], ["training.batchsize is unknown. Did you mean 'batch_size'?"]),
        (do_nothing, ["--training.batch_size", "many"], ["training.batch_size is 'many'; expected a whole number."]),
        (
            do_nothing,
            ["--training.gradient_accumulation_steps", "3"],
            ["training.num_train_steps is 8, not a multiple of training.gradient_accumulation_steps, which is 3;"],
        ),
        (
            do_nothing,
            ["--distributed.sequence_parallel", "true"],
            ["distributed.sequence_parallel is true, but horizontal_parallel_size is 1"],
        ),
        (do_nothing, ["--paths.train_data_dir", "null"], ["paths.train_data_dir is missing; name the folder of the"]),
        (do_nothing, ["--paths.train_data_dir", "/nowhere"], ["/nowhere", "does not exist"]),
        (plan_a_second_round, [], ["data directory '{folder}/nowhere' does not exist"]),
        (do_nothing, ["--loss.label", "y"], ["the data have no feature 'y'", "data.input_name_map"]),
        (do_nothing, ["--loss.prediction", "y"], ["'y'", "logits"]),
        (
            do_nothing,
            ["--training.weights_to_train", "[v]"],
            ["training.weights_to_train: 'v' matches none of the model's 4 float"],
        ),
        (do_nothing, ["--tensorboard.norm_names", "[v]"], ["tensorboard names 'v': neither a value of the graph"]),
        (do_nothing, ["--checkpoint.checkpoint_to_load_path", "/nowhere"], ["checkpoint /nowhere does not exist"]),
        (
            empty_data,
            [],
            ["train' holds no .pb files; write shards there with onward pack, or give another directory."],
        ),
        (narrow_data, [], ["feature 'x' has shape [5] per sample; the model expects [6]"]),
        (label_data, [], ["feature 'label' holds the label", "expected 0 to 3"]),
        (train_another_model, [], ["is a checkpoint of another model", "weights/w1", "[6, 8]", "[6, 9]"]),
        (
            put_file_in_the_way,
            ["--paths.output_dir", "{folder}/file/out"],
            ["paths.output_dir: '{folder}/file/out' cannot be made: Not a directory. Name another folder."],
        ),
        (
            put_file_in_the_way,
            ["--checkpoint.checkpoints_dir", "{folder}/file/c"],
            [
                "{folder}/file/c could not be prepared for checkpoints: Not a directory",
                "Name a directory in checkpoint.",
            ],
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    workplace: Path,
    spoil: Callable[[Path], None],
    overrides: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(workplace)
    capsys.readouterr()
    held = {path: path.read_bytes() for path in (workplace / "out").glob("**/*") if path.is_file()}
    overrides = [text.replace("{folder}", str(workplace)) for text in overrides]
    assert main(["train", str(workplace / "run.yaml"), *overrides]) == 2
    captured = capsys.readouterr()
    assert "step " not in captured.out, "told before the first step"
    assert captured.err.startswith("onward train: ")
    for word in words:
        assert word.replace("{folder}", str(workplace)) in captured.err
    assert {path: path.read_bytes() for path in held} == held


def test_a_broken_file_on_the_way(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Met after three steps, which are saved; skipped where the user says so, and counted."""
    path = workplace / "train" / "1.pb"
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["train", str(workplace / "run.yaml")]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert re.match(
        rf"onward train: shard '{path}', sample 11, byte \d+: its length field says that \d+ bytes follow", first
    )
    assert first.endswith("copy or pack it again, or set data.skip_corrupt_files to leave it out.")
    saved = workplace / "out" / "checkpoints" / "checkpoint-00000003"
    assert second == f"The steps before, to step 3, are saved as {saved}. The same command resumes from there."
    assert third == "The path is set by paths.train_data_dir; correct it there."
    assert main(["train", str(workplace / "run.yaml"), "--data.skip_corrupt_files", "true"]) == 0
    out = capsys.readouterr().out
    assert "round 0, step 3, 3 updates done." in out
    assert "skipped, 1 of 2 files so far: shard" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train nowhere.yaml", "'nowhere.yaml' does not exist; give the path of a RUN.yaml."),
        ("inspect nowhere.onnx", "nowhere.onnx"),
        ("pack nowhere data", "nowhere"),
        ("create gpt2 --layers 0 -o g.onnx", "layers"),
        ("export mlp.onnx --checkpoint nowhere -o t.onnx", "the checkpoint nowhere does not exist"),
        ("export mlp.onnx --checkpoint train -o t.onnx --quantize int8-static", "needs --calibration-data DIR"),
        ("train run.yaml --seed 3", "'--seed' is not understood; set fields as --section.field value."),
        ("train run.yaml --training.seed", "--training.seed has no value; pass --training.seed VALUE."),
    ],
)
def test_mistakes_of_other_commands(
    workplace: Path, arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"onward {arguments.split()[0]}: ")
    assert words in error


def test_ctrl_c_where_nothing_is_to_be_saved(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onward.lowering.inspection.describe", interrupt)
    assert main(["inspect", str(workplace / "mlp.onnx")]) == 1
    assert capsys.readouterr().err == "onward inspect: interrupted.\n"


def start(folder: Path, *arguments: str) -> ForkedProcess:
    """A run whose stderr is a file in the folder."""
    with (folder / "stderr").open("w") as errors:
        return ForkedProcess(["onward", "train", "run.yaml", *arguments], folder, errors=errors.fileno())


def stop(folder: Path, process: ForkedProcess, signal_number: signal.Signals) -> int:
    """Sends a signal once the process trains; gives the step that it was saved after."""
    with process:
        assert any(line.startswith("train ") for line in process.stdout)
        process.send_signal(signal_number)
        code, _ = process.finish()
    error = (folder / "stderr").read_text()
    assert code == 3, error
    said = re.fullmatch(
        rf"onward train: stopped by {signal_number.name} after step (\d+); saved as (\S+)\. "
        r"The same command resumes from there: onward train run\.yaml .*\n",
        error,
    )
    assert said is not None, error
    assert Path(said[2]).name == f"checkpoint-{int(said[1]):08d}"
    assert Path(said[2], "manifest.json").is_file()
    return int(said[1])


def test_a_signal_is_exit_code_3_and_the_same_command_goes_on(workplace: Path) -> None:
    """SIGTERM, the same again with SIGINT, and a third start that comes to the end."""
    endless = ["--training.num_train_steps", "100000000", "--training.display_loss_steps", "1"]
    first = stop(workplace, start(workplace, *endless), signal.SIGTERM)
    second = stop(workplace, start(workplace, *endless), signal.SIGINT)
    assert second > first
    assert not (workplace / "out" / "mlp_trained.onnx").exists()
    with start(workplace, "--training.num_train_steps", str(second + 4)) as last:
        code, out = last.finish()
    assert code == 0, (workplace / "stderr").read_text()
    assert f"round 0, step {second}, {second} updates done." in out
    assert (workplace / "out" / "mlp_trained.onnx").is_file()


def test_a_mistake_as_a_process(workplace: Path) -> None:
    command = [*COMMAND, "train", "run.yaml", "--training.batchsize", "8"]
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    first, *announced = done.stdout.splitlines()
    assert first.startswith("onward ")
    assert all(line.startswith("note ") and line.endswith(" ...") for line in announced)  # where importing took long
    assert done.stderr.startswith("onward train: training.batchsize is unknown. Did you mean 'batch_size'?")
    assert len(done.stderr.splitlines()) == 1


def test_a_warning_of_onward_is_one_line(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own form would show a line of onward's source."""

    def warn(*_: Any) -> None:
        warnings.warn("the weights were rounded.", NoteWarning, stacklevel=2)

    monkeypatch.setattr("onward.commands.inspect.run", warn)
    assert main(["inspect", str(workplace / "mlp.onnx")]) == 0
    assert capsys.readouterr().err == "note   the weights were rounded.\n"
