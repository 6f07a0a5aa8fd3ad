"""The limits of a run reach every command that reads a stranger's file: refused with what was exceeded, exit code 2."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.cli import main
from onward.errors import DataError, ModelError, ParametersError
from onward.parameters import Limits
from onward.parameters.limits import DEFAULT_LIMITS, UNLIMITED
from tests.mlp import data, save_mlp
from tests.test_cli import workplace, write_run

__all__ = ["workplace"]

COMMANDS = {
    "inspect": "inspect mlp.onnx --limits.nodes 1",
    "inspect, the option first": "inspect --limits.nodes 1 mlp.onnx",
    "inspect with data": "inspect mlp.onnx train --limits.nodes=1",
    "init": "init mlp.onnx train -o new.yaml --limits.nodes 1",
    "init without data": "init mlp.onnx -o new.yaml --limits.nodes 1",
    "plan": "plan run.yaml --limits.nodes 1",
    "plan, written": "plan run.yaml --write planned.onnx --limits.nodes 1",
    "lr-find": "lr-find run.yaml --limits.nodes 1",
    "train": "train run.yaml --limits.nodes 1",
    "train, tried": "train run.yaml --dry-run --limits.nodes 1",
    "export": "export mlp.onnx --optimize -o new.onnx --limits.nodes 1",
    "export of a checkpoint": "export mlp.onnx --checkpoint out/checkpoints -o new.onnx --limits.nodes 1",
    "export of graphs": "export mlp.onnx --run run.yaml --training-graph new.onnx --limits.nodes 1",
    "export, dequantized": "export mlp.onnx --dequantize qdq -o new.onnx --limits.nodes 1",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, RUN.yaml and a run."""
    folder: Path = workplace.__wrapped__(tmp_path_factory.mktemp("run"))
    assert main(["train", str(folder / "run.yaml"), "--quiet", "--tensorboard.log_dir", str(folder / "out")]) == 0
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_what_exceeds_the_limits(
    command: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(trained)
    assert main(COMMANDS[command].split()) == 2
    said = capsys.readouterr().err
    assert "nodes, functions expanded at every call; at most 1 are allowed" in said
    assert "set limits.nodes higher in RUN.yaml, or pass --limits.nodes" in said
    assert not (trained / "new.yaml").exists()
    assert not (trained / "new.onnx").exists()


def test_limits_of_the_file_count_where_there_is_one(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(trained)
    sections = yaml.safe_load((trained / "run.yaml").read_text()) | {"limits": {"nodes": 1}}
    (trained / "tight.yaml").write_text(yaml.safe_dump(sections))
    for command in (
        "plan tight.yaml",
        "lr-find tight.yaml",
        "export mlp.onnx --run tight.yaml --training-graph t.onnx",
    ):
        assert main(command.split()) == 2
        assert "at most 1 are allowed" in capsys.readouterr().err
    assert main(["plan", "tight.yaml", "--limits.nodes", "100"]) == 0


def test_the_report_leaves_out_a_plan_beyond_the_limits(trained: Path):
    page = trained / "page.html"
    assert main(["report", str(trained / "out"), "-o", str(page), "--limits.nodes", "1"]) == 0
    assert "There is no plan: " in page.read_text()
    assert "at most 1 are allowed" in page.read_text()
    assert main(["report", str(trained / "out"), "-o", str(page)]) == 0
    assert "There is no plan: " not in page.read_text()


def test_init_writes_the_limits_that_it_was_given(trained: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(trained)
    assert main(["init", "mlp.onnx", "train", "-o", "made/run.yaml", "--limits.nodes", "123456", "--no-trial"]) == 0
    text = (trained / "made" / "run.yaml").read_text()
    assert yaml.safe_load(text)["limits"] == {"nodes": 123456}
    assert "--limits.nodes=123456" in text
    assert onward.Parameters.load(trained / "made" / "run.yaml").limits == Limits(nodes=123456)


def test_fit_takes_limits_and_proposes_within_them(tmp_path: Path):
    path, arrays = save_mlp(tmp_path), data(16)
    for loss in ("softmax_cross_entropy", None):
        with pytest.raises(ModelError, match="at most 1 are allowed"):
            onward.fit(path, arrays, loss=loss, parameters={"limits": {"nodes": 1}}, progress=False)
    with pytest.raises(ParametersError, match=r"limits.node is unknown. Did you mean 'nodes'\?"):
        onward.fit(path, arrays, parameters={"limits": {"node": 1}}, progress=False)


def test_a_loss_model_is_within_the_limits(workplace: Path, capsys: pytest.CaptureFixture[str]):
    nodes = [helper.make_node("Identity", ["logits"], ["e0"])]
    nodes += [helper.make_node("Identity", [f"e{number}"], [f"e{number + 1}"]) for number in range(50)]
    nodes += [helper.make_node("ReduceMean", ["e50"], ["loss"], keepdims=0)]
    graph = helper.make_graph(
        nodes,
        "loss",
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), workplace / "l.onnx")
    run = write_run(workplace, loss={"type": "graph", "graph": "l.onnx", "prediction": None, "label": None})
    assert main(["train", str(run), "--limits.nodes", "40"]) == 2
    assert "l.onnx' has 52 nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--limits.node 1", "limits.node is unknown. Did you mean 'nodes'?"),
        ("--limits.nodes 0", "limits.nodes is 0; expected"),
        ("--limits.nodes many", "limits.nodes is 'many'; expected a whole number"),
        ("--limits.nodes", "--limits.nodes has no value"),
        ("--training.batch_size 4", "--training.batch_size is a field of a RUN.yaml, which this command does not read"),
    ],
)
def test_mistakes_in_limits(arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = save_mlp(tmp_path)
    assert main(["inspect", str(path), *arguments.split()]) == 2
    assert words in capsys.readouterr().err


def test_a_command_that_reads_no_file_takes_no_limits(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["doctor", "--limits.nodes", "1"])
    assert "doctor does not take --limits.nodes 1. Run 'onward doctor --help'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ConstantOfShape", "Range"])
@pytest.mark.parametrize("how", [["--optimize"], ["--quantize", "int8-dynamic"]])
def test_a_tool_does_not_compute_what_exceeds_the_limits(
    kind: str, how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """onnxscript and onnxruntime fold constants: 100 GB of them, were they asked."""
    numbers = {"s": np.array([25 * 10**9])} if kind == "ConstantOfShape" else {}
    numbers |= {"a": np.array(0), "b": np.array(25 * 10**9), "d": np.array(1)} if kind == "Range" else {}
    nodes = [
        helper.make_node(kind, list(numbers), ["r"]),
        helper.make_node("ReduceMax", ["r"], ["m"], keepdims=0),
        helper.make_node("Cast", ["m"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
    ]
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, [4])] for name in "xy")
    tensors = [numpy_helper.from_array(value.astype(np.int64), name) for name, value in numbers.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    assert main(["export", str(tmp_path / "m.onnx"), *how, "-o", str(tmp_path / "new.onnx")]) == 2
    assert "set limits.constant_gb" in capsys.readouterr().err


def _npz(path: Path, shape: tuple[int, ...], fortran: bool = False) -> Path:
    """An archive that says it holds so much, and holds nothing."""
    header = f"{{'descr': '<f4', 'fortran_order': {fortran}, 'shape': {shape}, }}".ljust(117) + "\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.encode())
    return path


@pytest.mark.parametrize(("shape", "fortran"), [((2, 10**10), False), ((10**10, 2), True), ((2, 2**62, 2**62), False)])
def test_archives_that_hold_more_than_memory(
    shape: tuple[int, ...], fortran: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = _npz(tmp_path / "data.npz", shape, fortran)
    assert main(["pack", str(path), str(tmp_path / "shards")]) == 2
    assert "of array 'x'" in (said := capsys.readouterr().err)
    assert "pass --limits.array_gb" in said
    model = save_mlp(tmp_path)
    assert main(["init", str(model), str(path), "-o", str(tmp_path / "run.yaml")]) == 2
    assert "pass --limits.array_gb" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"pass --limits.array_gb"):
        onward.fit(model, path, loss="softmax_cross_entropy", progress=False)


def test_a_limit_on_arrays_is_of_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, x=np.zeros((100, 1000), np.float32))
    assert main(["pack", str(path), str(tmp_path / "a"), "--limits.array_gb", "0.000004"]) == 0
    assert main(["pack", str(path), str(tmp_path / "b"), "--limits.array_gb", "0.0000039"]) == 2
    assert "0.0 GB of array 'x' (float32, [1000]) would be unpacked at once" in capsys.readouterr().err


def test_what_is_changed():
    assert DEFAULT_LIMITS.changed() == {}
    assert set(UNLIMITED.changed()) == set(DEFAULT_LIMITS.__dataclass_fields__)
