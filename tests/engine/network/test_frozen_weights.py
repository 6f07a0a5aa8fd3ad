"""Frozen weights take the memory of what is stored, once: no copies, no gradients, no moments, no fp32 masters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast.plan_forecast import forecast
from onward.engine.forecast.trial import trial_bytes
from onward.graph.writing.model_saving import save_model
from onward.parallel.launch.process import Mesh
from onward.parameters import Parameters
from onward.plan.topology import Topology
from onward.runner import TrainingRunner
from tests.frozen_models import CLASSES, ELEMENTS, LAYERS, WIDTH, WORDS, build_stack, sections, stack_data
from tests.mlp import ON_ONE_THREAD
from tests.watching import Recorder

BF16 = {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}}
TABLES = WORDS * WIDTH + WIDTH * CLASSES
PER_LAYER = {
    "as_stored": 4.0 * ELEMENTS,
    "bf16": 2.0 * ELEMENTS,
    "int8": ELEMENTS + 4 * ELEMENTS / 64,
    "int4": ELEMENTS / 2 + 4 * ELEMENTS / 64,
    "nf4": ELEMENTS / 2 + 4 * ELEMENTS / 64,
}
"""Bytes of a layer's weight: codes, and an fp32 scale for 64 of them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stack") / "stack.onnx"
    save_model(build_stack(), path)
    return path


def run(model: Path, **more: Mapping[str, Any]) -> tuple[TrainingRunner, Recorder]:
    recorder, data = Recorder(), InMemoryDataLoader(stack_data(32))
    parameters = Parameters.from_mapping(sections(model, **more))
    runner = TrainingRunner(parameters, ON_ONE_THREAD, [recorder], progress=False)
    runner.initialize(data.feature_specs())
    runner.run(data, data)
    return runner, recorder


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [*((dtype, {}) for dtype in PER_LAYER), ("as_stored", BF16), ("nf4", BF16)],
    ids=lambda one: one if isinstance(one, str) else "bf16" if one else "fp32",
)
def test_bytes_held_while_training_and_evaluating(model: Path, dtype: str, precision: dict[str, Any]) -> None:
    runner, recorder = run(model, frozen_weights={"dtype": dtype}, **precision)
    net = runner.state.networks[0].net
    held = sum(tensor.numel() * tensor.element_size() for tensor in net.buffers())
    width = 2 if precision or dtype == "bf16" else 4
    expected = LAYERS * min(PER_LAYER[dtype], width * ELEMENTS) + width * TABLES
    assert expected <= held <= expected + 64  # constants of the loss
    assert set(runner.state.weights) == {f"layer{layer}.bias" for layer in range(LAYERS)}
    slots = [slot for state in runner.state.optimizer.state.values() for slot in state.values()]
    assert sum(slot.numel() for slot in slots) <= 2 * LAYERS * WIDTH + LAYERS
    assert recorder.losses[-1] < recorder.losses[0]


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [*((dtype, {}) for dtype in PER_LAYER), ("as_stored", BF16), ("nf4", BF16)],
    ids=lambda one: one if isinstance(one, str) else "bf16" if one else "fp32",
)
def test_peak_of_an_update_has_no_second_copy_and_is_forecast(
    model: Path, dtype: str, precision: dict[str, Any]
) -> None:
    batch = 64
    raw = sections(model, frozen_weights={"dtype": dtype}, **precision)
    raw["training"] |= {"batch_size": batch}
    parameters = Parameters.from_mapping(raw)
    graph, specs = read_training_graph(parameters), InMemoryDataLoader(stack_data(8)).feature_specs()
    measured = trial_bytes(parameters, Mesh(topology=Topology(), rank=0, device=torch.device("cpu")), graph, specs)
    plan = plan_run(parameters, Topology(), graph, specs)
    memory = forecast(parameters, graph, plan, specs).ranks[0].memory
    assert memory.total == pytest.approx(measured, rel=0.1)
    assert measured is not None
    width = 2 if precision or dtype == "bf16" else 4
    stored = LAYERS * min(PER_LAYER[dtype], width * ELEMENTS) + width * TABLES
    assert memory.kinds["frozen weights"] == stored
    # Next to what is stored: activations, and one layer's weight in at most three forms at a time.
    activations = 4 * batch * (4 * LAYERS * WIDTH * 4 + 6 * CLASSES * 4)
    assert measured < stored + activations + 3 * 4 * ELEMENTS + 2**15


@pytest.mark.parametrize(("dtype", "recompute"), [("int8", False), ("int4", True), ("nf4", False), ("nf4", True)])
def test_losses_and_gradients_are_bit_for_bit_those_of_the_dequantized_model(
    model: Path, tmp_path: Path, dtype: str, recompute: bool
) -> None:
    settings = {"recompute": {"segments": recompute}}
    quantized, found = run(model, frozen_weights={"dtype": dtype}, **settings)
    net = quantized.state.networks[0].net
    names = [f"layer{layer}.weight" for layer in range(LAYERS)]
    program = net.program_for([_dequantized(net, name) for name in names])
    given = (None,) * len(program.inputs)
    made = program(False, torch.device("cpu"), given, net.tensors_by_name())
    values = dict(zip(names, made, strict=True))
    plain = build_stack()
    for name, value in values.items():
        initializer = plain.graph.initializers[name]
        initializer.const_value = ir.Tensor(np.ascontiguousarray(value.numpy()), name=name)
    save_model(plain, tmp_path / "plain.onnx")
    other, expected = run(tmp_path / "plain.onnx", **settings)
    assert found.losses == expected.losses
    for name, weight in quantized.state.weights.items():
        assert torch.equal(weight.parameter, other.state.weights[name].parameter)


def _dequantized(net: Any, name: str) -> str:
    """The value that the pass computes instead of a weight: the last of its nodes."""
    return [str(node.outputs[0].name) for node in net.graph.model.graph if str(node.name).startswith(f"{name}/")][-1]


def test_a_forecast_reads_no_frozen_weight(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = Parameters.from_mapping(sections(model, frozen_weights={"dtype": "nf4"}))
    graph, specs = read_training_graph(parameters), InMemoryDataLoader(stack_data(8)).feature_specs()
    plan = plan_run(parameters, Topology(), graph, specs)

    def refuse(*_: object) -> None:
        raise AssertionError("a weight was quantized")

    monkeypatch.setattr("onward.graph.quantized_base.passes.quantize_nf4", refuse)
    assert forecast(parameters, graph, dataclasses.replace(plan), specs).ranks[0].memory.total > 0
