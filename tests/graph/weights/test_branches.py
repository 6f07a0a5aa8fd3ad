"""Weights of a branch that is not taken: named from the graph where it shows, and by the first update of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onward.data.in_memory import InMemoryDataLoader
from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.training_graph import make_training_graph
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.watching import Recorder


def branched(condition: str = "wide = Greater(sum, zero)") -> onnx.ModelProto:
    """Two matrices of one branch, one of the other, one of both."""
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 4] y)
        {{ sum = ReduceSum<keepdims = 0>(x)  {condition}
           h = If(wide) <
             then_branch = t () => (float[N, 4] a) {{ p = MatMul(x, first) q = Tanh(p) r = MatMul(q, second)
                                                      a = MatMul(r, shared) }},
             else_branch = e () => (float[N, 4] b) {{ s = MatMul(x, third) b = MatMul(s, shared) }}
           >
           y = Add(h, bias) }}"""
    )
    rng = np.random.default_rng(0)
    for name in ("first", "second", "third", "shared"):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=(4, 4)).astype(np.float32), name))
    model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=4).astype(np.float32), "bias"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0), "zero"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    return model


def test_each_branch_names_its_weights() -> None:
    text = (
        "node 'h' (If) computes one of two branches, depending on 'wide': only its then_branch reads 2 weights "
        "(first, second), only its else_branch reads 1 weight (third). Weights of a branch that your data "
        "never take get no gradient and do not change."
    )
    assert text in make_training_graph(branched()).notes
    assert "only its then_branch reads 2 weights" in " ".join(render(inspect(branched())).split())


def test_a_constant_condition_says_which_stay() -> None:
    notes = make_training_graph(branched("wide = Identity(always)")).notes
    assert any("computes one of two branches" in note for note in notes), "computed, if from a constant"
    model = branched("unused = Identity(zero)")
    model.graph.node[2].input[0] = "always"
    assert (
        "the condition of node 'h' (If) is constant; weights of the other branch get no gradient and do not "
        "change: 1 weight (third)."
    ) in make_training_graph(model).notes


@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_update_names_the_weights_that_got_no_gradient(sign: int, tmp_path: Path) -> None:
    onnx.save(branched(), tmp_path / "m.onnx")
    sections = {
        "paths": {"model_path": str(tmp_path / "m.onnx")},
        "loss": {"type": "mean_squared_error", "prediction": "y", "label": "t"},
        "training": {"num_train_steps": 3, "batch_size": 2},
        "learning_rate": {"initial_lr": 0.01},
    }
    recorder = Recorder()
    runner = TrainingRunner(Parameters.from_mapping(sections), watchers=[recorder])
    runner.initialize()
    rng = np.random.default_rng(0)
    data = {"x": sign * rng.random((6, 4), np.float32), "t": rng.random((6, 4), np.float32)}
    before = {name: weight.detach().clone() for name, weight in runner.net.weights.items()}
    runner.run(InMemoryDataLoader(data))
    names = ["third"] if sign > 0 else ["first", "second"]
    (message,) = [message for message in recorder.messages if "got no gradient in the first update" in message]
    assert message.startswith(
        f"{len(names)} of 5 weights got no gradient in the first update ({', '.join(names)}): no computed node reads "
    )
    still = [name for name, weight in runner.net.weights.items() if bool((weight == before[name]).all())]
    assert still == names


def test_weights_that_are_frozen_are_not_named() -> None:
    graph = make_training_graph(branched(), weights_to_train=["shared", "bias"])
    assert not any("branch" in note for note in graph.notes)
