"""The optimizer's state that a forecast counts: that of torch's own optimizers after an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.building.sizes import input_sizes, known_dimensions
from onward.engine.forecast.footprint import input_shapes_of, measure_kept, measure_stage, optimizer_slots
from onward.engine.forecast.plan_forecast import forecast
from onward.engine.forecast.trial import trial_bytes
from onward.optim.building import with_exact_names
from onward.parallel.launch.process import in_world_of_one
from onward.parameters import Parameters
from onward.plan.rank import plan_rank
from onward.plan.topology import Place, Topology
from tests.mlp import save_mlp


@pytest.mark.parametrize(
    ("name", "rule", "make"),
    [
        ("SGDOptimizer", {}, lambda w: torch.optim.SGD(w, lr=0.1)),
        ("SGDOptimizer", {"momentum": 0.9}, lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9)),
        ("AdamW", {}, torch.optim.AdamW),
        ("Adafactor", {}, torch.optim.Adafactor),
        ("torch.optim.RMSprop", {"options": {"momentum": 0.9, "centered": True}},
         lambda w: torch.optim.RMSprop(w, momentum=0.9, centered=True)),
    ],
    ids=["SGD", "momentum", "AdamW", "Adafactor", "RMSprop"],
)  # fmt: skip
def test_slots_are_those_of_torch(tmp_path: Path, name: str, rule: dict[str, Any], make: Any) -> None:
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": save_mlp(tmp_path)},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {"batch_size": 2, "num_train_steps": 1},
            "learning_rate": {"initial_lr": 0.1},
            "optimizer": {"training_optimizer_name": name, "optimizer_attributes": [{"weights": "*", **rule}]},
        }
    )
    graph = read_training_graph(parameters)
    initializers = graph.model.graph.initializers
    weights = [torch.nn.Parameter(torch.ones(*initializers[one].shape.numpy())) for one in graph.weights]  # type: ignore[union-attr]
    optimizer = make(weights)
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    held = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    expected = sum(one.nbytes for one in held) / sum(one.nbytes for one in weights)
    assert optimizer_slots(with_exact_names(parameters.optimizer, graph), graph) == pytest.approx(expected)


def test_the_forward_pass_alone_keeps_what_the_entire_run_keeps(tmp_path: Path) -> None:
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": save_mlp(tmp_path)},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {"batch_size": 64, "num_train_steps": 1},
            "learning_rate": {"initial_lr": 0.1},
        }
    )
    graph, place = read_training_graph(parameters), Place(0, 0, 0)
    planned = plan_rank(graph, plan_run(parameters, Topology(), graph, {}), place).own[0]
    inputs = input_shapes_of(graph, input_sizes(graph, known_dimensions(parameters.training, graph, {})))
    of_all = measure_stage(planned, parameters, Topology(), place, inputs, 1).footprint
    kept = of_all.kept["activations"] - of_all.held.get("activations", 0.0)
    assert measure_kept(planned, parameters, Topology(), place, inputs) == kept > 0


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_updates_in_the_backward_pass_are_forecast_as_they_are(tmp_path: Path, name: str) -> None:
    """Eight layers of equal weights: the gradients of one or two instead of all, and Lion's moves of one."""
    peaks, size = {}, 128
    layers = [(f"w{number}", np.full((size, size), 0.01, np.float32)) for number in range(8)]
    nodes = [
        helper.make_node("MatMul", ["x" if not number else f"h{number}", one], [f"h{number + 1}"])
        for number, (one, _) in enumerate(layers)
    ]
    ports = [helper.make_tensor_value_info(one, TensorProto.FLOAT, ["batch", size]) for one in ("x", "h8")]
    tensors = [numpy_helper.from_array(array, one) for one, array in layers]
    deep = helper.make_graph(nodes, "deep", ports[:1], ports[1:], tensors)
    onnx.save(helper.make_model(deep, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "d.onnx")
    for is_inside in (False, True):
        parameters = Parameters.from_mapping(
            {
                "paths": {"model_path": tmp_path / "d.onnx"},
                "loss": {"type": "mean_squared_error", "prediction": "h8", "label": "y"},
                "training": {"batch_size": 2, "num_train_steps": 1},
                "learning_rate": {"initial_lr": 0.1},
                "optimizer": {"training_optimizer_name": name},
                "speed": {"update_in_backward": is_inside},
            }
        )
        graph = read_training_graph(parameters)
        said = forecast(parameters, graph, plan_run(parameters, Topology(), graph, {})).ranks[0].memory.total
        taken = trial_bytes(parameters, in_world_of_one(), graph, {})
        assert said == pytest.approx(taken, rel=0.02)
        peaks[is_inside] = said / (4 * size * size)
    assert peaks[False] - peaks[True] > (5.5 if name == "AdamW" else 12)
