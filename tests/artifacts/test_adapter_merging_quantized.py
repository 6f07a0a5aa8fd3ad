"""Adapters on quantized files of ONNX Runtime's own quantizers: trained, merged by quantizing again, and run by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.frozen_models import QUANTIZERS, build_quantized, build_stack, sections, stack_data
from tests.initializers import stored_arrays
from tests.mlp import ON_ONE_THREAD
from tests.watching import Recorder


def written(path: Path, name: str) -> Path:
    ir.save(build_quantized(name), path)
    return path


def run(model: Path, adapter: Mapping[str, Any] | None = None, **more: Any) -> tuple[TrainingRunner, Recorder]:
    raw = sections(model, adapter={"rank": 4, "alpha": 8.0, "targets": ["layer*"], **(adapter or {})}, **more)
    raw["training"] |= {"weights_to_train": []}
    raw["learning_rate"] = {"initial_lr": 2e-2}
    raw["optimizer"] = {"training_optimizer_name": "AdamW"}
    raw["paths"]["output_dir"] = str(model.parent)
    few = {name: np.tile(array, (4, 1)) for name, array in stack_data(8).items()}
    recorder, data = Recorder(), InMemoryDataLoader(few)
    runner = TrainingRunner(Parameters.from_mapping(raw), ON_ONE_THREAD, [recorder], progress=False)
    runner.initialize(data.feature_specs())
    runner.run(data)
    return runner, recorder


def outputs(path: Path, ids: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"ids": ids})[0]
    return found


@pytest.mark.parametrize(("name", "dora"), [*((name, False) for name in QUANTIZERS), ("4 bits", True), ("nf4", True)])
def test_a_quantized_file_is_adapted_and_merged(name: str, dora: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "q.onnx", name)
    runner, recorder = run(path, {"dora": dora})
    assert recorder.losses[-1] < recorder.losses[0]
    assert all(".lora_" in weight for weight in runner.state.weights)
    told = (
        r"merged into 4 quantized weights, .* off by .* of the step between two codes, and by .* steps, in .* changed"
    )
    with pytest.warns(UserWarning, match=told):
        runner.end_training()
    ids, net = stack_data(4)["ids"], runner.state.networks[0].net
    program = net.program_for(("logits",))
    given = tuple(torch.from_numpy(ids) if name == "ids" else None for name in program.inputs)
    with torch.no_grad():
        (adapted,) = program(False, net.device, given, net.tensors_by_name())
    before, after = outputs(path, ids), outputs(tmp_path / "q_trained.onnx", ids)
    errors = [np.abs(found - adapted.numpy()).mean() for found in (before, after)]
    assert errors[1] < errors[0] * (0.02 if name == "8 bits" else 0.25)
    sizes = [file.stat().st_size for file in (path, tmp_path / "q_trained.onnx")]
    assert abs(sizes[0] - sizes[1]) < 4096
    nodes = [[node.op_type for node in onnx.load(file).graph.node] for file in (path, tmp_path / "q_trained.onnx")]
    assert nodes[0] == nodes[1]


def test_a_base_quantized_in_memory_is_merged_into_the_floats_of_the_file(tmp_path: Path) -> None:
    ir.save(build_stack(), tmp_path / "m.onnx")
    runner, _ = run(tmp_path / "m.onnx", frozen_weights={"dtype": "nf4"})
    runner.end_training()
    before, after = (stored_arrays(tmp_path / file) for file in ("m.onnx", "m_trained.onnx"))
    tensors = runner.state.networks[0].net.tensors_by_name()
    for layer in range(4):
        name = f"layer{layer}.weight"
        a, b = (tensors[f"{name}.lora_{letter}"].detach().numpy() for letter in "AB")
        product = 2.0 * (b @ a)
        np.testing.assert_allclose(after[name] - before[name], product if layer % 2 else product.T, atol=1e-6)


def test_singular_vectors_of_a_quantized_weight_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "q.onnx", "nf4")
    with pytest.raises(ModelError, match=r"adapter.start is 'pissa', but '.*weight.*' is stored as integers, .* Set"):
        run(path, {"start": "pissa"})


def test_integers_that_cannot_be_written_again_are_refused_before_training(tmp_path: Path) -> None:
    path = written(tmp_path / "q.onnx", "blocked QDQ")
    model = onnx.load(path)
    scale = next(t.name for t in model.graph.initializer if "scale" in t.name)
    for node in model.graph.node:
        node.input[:] = ["computed_scale" if name == scale else name for name in node.input]
    model.graph.node.insert(0, onnx.helper.make_node("Abs", [scale], ["computed_scale"]))
    onnx.save(model, path)
    with pytest.raises(ModelError, match=r"cannot be merged: its integers are read by .* \[peft\] or \[onnx_adapter\]"):
        run(path)
    with pytest.raises(
        ModelError, match=r"adapter\.dora is true, but the integers of .* its norms are not known\. Set"
    ):
        run(path, {"dora": True})
    runner, _ = run(path, {"outputs": ["onnx_adapter"]})
    runner.end_training()
    assert len(list(tmp_path.glob("*.onnx_adapter"))) == 1
