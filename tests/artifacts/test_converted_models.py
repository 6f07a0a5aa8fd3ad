"""Every way of converting models: files that the checker and ONNX Runtime take, close to the original."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.artifacts.trained_model import convert_model
from onward.cli import main
from onward.errors import ModelError, ParametersError
from onward.models import create_model
from tests.artifacts.trained_run import convolutional_model, samples
from tests.mlp import build_mlp, write_shards


def _recurrent() -> onnx.ModelProto:
    draw = np.random.default_rng(0).standard_normal
    weights = {"W": draw((1, 16, 5)) * 0.3, "R": draw((1, 16, 4)) * 0.3, "B": draw((1, 32)) * 0.1}
    graph = helper.make_graph(
        [
            helper.make_node("LSTM", ["x", "W", "R", "B"], ["states"], hidden_size=4),
            helper.make_node("Squeeze", ["states", "one"], ["y"]),
        ],
        "recurrent",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [7, "n", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [7, "n", 4])],
        [
            *(numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()),
            numpy_helper.from_array(np.array([1]), "one"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _branching() -> onnx.ModelProto:
    """Two float inputs, one of them in a branch only; an output that is an input of another node as well."""

    def branch(name: str, op_type: str) -> onnx.GraphProto:
        node = helper.make_node(op_type, ["h", "b"], [name])
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3])])

    nodes = [
        helper.make_node("MatMul", ["a", "w"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["which"]),
        helper.make_node("If", ["which"], ["y"], then_branch=branch("t", "Add"), else_branch=branch("e", "Sub")),
        helper.make_node("Relu", ["y"], ["z"]),
    ]
    draw = np.random.default_rng(0).standard_normal
    graph = helper.make_graph(
        nodes,
        "branching",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in ("a", "b")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in ("y", "z")],
        [
            numpy_helper.from_array(draw((3, 3)).astype(np.float32), "w"),
            numpy_helper.from_array(np.array(0, np.float32), "zero"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _gpt2() -> onnx.ModelProto:
    return ir.to_proto(create_model("gpt2", size="tiny", layers=1, heads=2, width=16, vocab_size=32, context_length=8))


def _squeezenet() -> onnx.ModelProto:
    return ir.to_proto(create_model("squeezenet", classes=5, image_size=32))


def _draw(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).random(shape, dtype=np.float32)


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[], dict[str, np.ndarray[Any, Any]]]]] = {
    "mlp": (build_mlp, lambda: {"x": _draw(8, 6) - 0.5}),
    "convolutional": (convolutional_model, lambda: {"image": samples(8)["image"]}),
    "recurrent": (_recurrent, lambda: {"x": _draw(7, 8, 5) - 0.5}),
    "branching": (_branching, lambda: {"a": _draw(8, 3) - 0.5, "b": _draw(8, 3) - 0.5}),
    "gpt2": (_gpt2, lambda: {"input_ids": np.arange(64).reshape(8, 8) % 32}),
    "squeezenet": (_squeezenet, lambda: {"images": _draw(8, 3, 32, 32)}),
}
# Of the largest output: as in test_quantization, with room for deeper networks.
BOUNDS = {None: 1e-5, "fp16": 1e-2, "int8-dynamic": 0.1, "int8-static": 0.25}
BATCH_IS_SECOND = ("recurrent",)


def outputs(path: Path, feeds: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    onnx.checker.check_model(path, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(None, feeds)]


@pytest.mark.parametrize(
    ("name", "optimize", "kind"),
    [case for case in itertools.product(MODELS, (False, True), BOUNDS) if case[1] or case[2]],
)
def test_what_is_converted_is_sound_and_close(name: str, optimize: bool, kind: str | None, tmp_path: Path) -> None:
    if kind == "int8-static" and name in BATCH_IS_SECOND:
        pytest.skip("shards have the batch axis first")
    make, feed = MODELS[name]
    source, feeds = tmp_path / "model.onnx", feed()
    onnx.save(make(), source)
    data = write_shards(tmp_path / "data", feeds, files=1) if kind == "int8-static" else None
    path = convert_model(source, tmp_path / "small.onnx", optimize=optimize, quantize=kind, calibration_dir=data)
    written = onnx.load(path)
    for before, after in zip(make().graph.input, written.graph.input, strict=True):
        assert (before.name, before.type.tensor_type.elem_type) == (after.name, after.type.tensor_type.elem_type)
    for expected, found in zip(outputs(source, feeds), outputs(path, feeds), strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= BOUNDS[kind] * np.abs(expected).max()
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix) == ["model.onnx", "small.onnx"]


def test_the_command_converts_a_trained_file_without_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(build_mlp(), tmp_path / "mlp_trained.onnx")
    data = write_shards(tmp_path / "data", {"x": _draw(8, 6)}, files=1)
    source, target = str(tmp_path / "mlp_trained.onnx"), tmp_path / "out.onnx"
    static = ("--quantize", "int8-static", "--calibration-data", str(data))
    for options in (("--optimize",), ("--quantize", "fp16"), ("--optimize", "--quantize", "int8-dynamic"), static):
        assert main(["export", source, *options, "-o", str(target)]) == 0
        assert capsys.readouterr().out == f"wrote {target}\n"
        outputs(target, {"x": _draw(8, 6)})
        target.unlink()
    for arguments, words in (
        ((source, "-o", str(target)), "or with --optimize or --quantize to convert MODEL as it is"),
        ((source, "--quantize", "fp16"), "Pass -o FILE"),
        ((source, source, "--optimize", "-o", str(target)), "2 models are given; without --checkpoint DIR, pass one."),
        ((source, "--quantize", "int8-static", "-o", str(target)), "needs --calibration-data DIR"),
        ((source, "--optimize", "--calibration-data", "x", "-o", str(target)), "read by --quantize int8-static only"),
    ):
        assert main(["export", *arguments]) == 2
        assert words in capsys.readouterr().err
        assert not target.exists()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.onnx' does not exist"):
        convert_model(tmp_path / "nothing.onnx", tmp_path / "out.onnx", optimize=True)
    onnx.save(build_mlp(), tmp_path / "mlp.onnx")
    with pytest.raises(ParametersError, match="'int4' is unknown; use fp16"):
        convert_model(tmp_path / "mlp.onnx", tmp_path / "out.onnx", quantize="int4")
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.onnx"]
