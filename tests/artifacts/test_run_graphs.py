"""Training graphs as a run or the command line asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onward.artifacts.run_graphs import export_graphs
from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import CheckpointError, ParametersError
from tests.artifacts.plain_runtime import autograd_gradients, call, largest_error, open_session
from tests.mlp import data, save_mlp, start, write_adam_run, write_shards


def test_a_run_writes_the_graphs_that_its_paths_name(tmp_path: Path) -> None:
    paths = {
        "model_path": tmp_path / "mlp.onnx",
        "model_with_training_graph_path": tmp_path / "graphs" / "training.onnx",
        "optimizer_graph_path": tmp_path / "graphs" / "optimizer.onnx",
    }
    runner, recorder = start(tmp_path, paths=paths)
    features = {name: torch.from_numpy(array[:4]) for name, array in data(8).items() if name in ("x", "label")}
    gradients = call(open_session(tmp_path / "graphs" / "training.onnx"), features)
    runner.net.train()
    for name, tensor in autograd_gradients(runner.net, features).items():
        assert largest_error(gradients[name], tensor) < 1e-5
    weights = {name: weight.detach().clone() for name, weight in runner.net.weights.items()}
    feeds = {**weights, **{n: g for n, g in gradients.items() if n.endswith("_grad")}}
    feeds |= {"learning_rate": torch.tensor(0.5), "update_count": torch.tensor(0)}
    updated = call(open_session(tmp_path / "graphs" / "optimizer.onnx"), feeds)
    for name, weight in weights.items():
        assert largest_error(updated[f"{name}_new"], weight - 0.5 * gradients[f"{name}_grad"]) < 1e-6
    written = [message for message in recorder.messages if message.startswith("wrote ")]
    assert len(written) == 2


def test_the_command_line_writes_each_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run = save_mlp(tmp_path), write_adam_run(tmp_path)
    names = ("training-graph", "optimizer-graph", "train-step")
    files = [tmp_path / f"{name}.onnx" for name in names]
    options = [text for name, file in zip(names, files, strict=True) for text in (f"--{name}", str(file))]
    assert main(["export", str(model), "--run", str(run), *options]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {file}" for file in files]
    for file in files:
        open_session(file)


def test_the_weights_of_a_checkpoint_become_the_defaults(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, checkpoint={"checkpoints_dir": tmp_path / "checkpoints"})
    features = {name: array for name, array in data(32).items() if name in ("x", "label")}
    runner.run(InMemoryDataLoader(features))
    model, run = tmp_path / "mlp.onnx", write_adam_run(tmp_path)
    export_graphs(model, run, checkpoint=tmp_path / "checkpoints", training_graph=tmp_path / "training.onnx")
    batch = {name: torch.from_numpy(array[:4]) for name, array in features.items()}
    trained = autograd_gradients(runner.net.train(), batch)
    assert float(call(open_session(tmp_path / "training.onnx"), batch)["loss"]) == pytest.approx(
        float(trained["loss"]), rel=1e-5
    )


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, checkpoint={"checkpoints_dir": tmp_path / "checkpoints"})
    runner.run(InMemoryDataLoader({name: a for name, a in data(32).items() if name in ("x", "label")}))
    model = save_mlp(tmp_path, normalized=True)
    with pytest.raises(CheckpointError, match="is of another model: it lacks scale, shift"):
        export_graphs(
            model, write_adam_run(tmp_path), checkpoint=tmp_path / "checkpoints", training_graph=tmp_path / "t.onnx"
        )


def test_a_step_graph_does_not_accumulate_gradients(tmp_path: Path) -> None:
    model, run = save_mlp(tmp_path), write_adam_run(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(ParametersError, match=r"gradient_accumulation_steps is 2; a step graph updates .* Set it to 1"):
        export_graphs(model, run, train_step=tmp_path / "step.onnx")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--training-graph", "t.onnx"], "training graphs need a loss and an optimizer; name them with --run RUN.yaml"),
        (
            ["--run", "r.yaml"],
            "--run goes with --training-graph, --optimizer-graph, --train-step or --training-info FILE; name one",
        ),
        (["-o", "m.onnx"], "Pass -o FILE with --checkpoint DIR for a trained model, or with --optimize or --quantize"),
        (["--train-step", "s.onnx", "--run", "r.yaml", "-o", "m.onnx"], "needs --checkpoint DIR"),
        (["more.onnx", "--train-step", "s.onnx", "--run", "r.yaml"], "training graphs are of one model; 2 are given"),
    ],
)
def test_options_that_do_not_belong_together(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "mlp.onnx"), *options]) == 2
    assert words in capsys.readouterr().err


def test_shards_are_not_needed(tmp_path: Path) -> None:
    """A run names its data; graphs are written without them, and with them the same."""
    model, run = save_mlp(tmp_path), write_adam_run(tmp_path)
    export_graphs(model, run, optimizer_graph=tmp_path / "without.onnx")
    write_shards(tmp_path / "train", data(8))
    export_graphs(model, run, optimizer_graph=tmp_path / "with.onnx")
    assert (tmp_path / "without.onnx").read_bytes() == (tmp_path / "with.onnx").read_bytes()
