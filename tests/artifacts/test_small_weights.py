"""Small weights that are updated together change as each of them alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onward.artifacts import small_weights
from onward.artifacts.optimizer_graph import add_input, append_update, empty_model
from onward.parameters import AttributeRule, Optimizer

SHAPES = {"scale": (5,), "shift": (5,), "kernel": (5, 1, 3, 3), "matrix": (80, 80), "number": (), "decayed": (4,)}


def updates_of(optimizer: Optimizer) -> tuple[dict[str, np.ndarray], int]:
    """The outputs of two updates of random weights, and how many nodes the graph has."""
    model, generator = empty_model("update"), np.random.default_rng(0)
    weights = {name: add_input(model, name, ir.DataType.FLOAT, shape) for name, shape in SHAPES.items()}
    gradients = {name: add_input(model, f"{name}_grad", ir.DataType.FLOAT, shape) for name, shape in SHAPES.items()}
    append_update(model, optimizer, weights, gradients)
    proto = ir.to_proto(model)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    given = {"learning_rate": np.array(0.1, np.float32), "update_count": np.array(3)}
    for one in session.get_inputs():
        if one.name not in given:
            given[one.name] = np.asarray(np.abs(generator.standard_normal(one.shape)), np.float32)
    found = dict(zip([one.name for one in session.get_outputs()], session.run(None, given), strict=True))
    branches = [part.g.node for node in proto.graph.node for part in node.attribute if part.name == "then_branch"]
    return found, len(proto.graph.node) + sum(map(len, branches))


@pytest.mark.parametrize("name", ["SGDOptimizer", "Adam", "AdamW", "Lion", "AdamWScheduleFree", "Lamb"])
def test_updates_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (AttributeRule(weights="decayed", lambda_=0.5),) if name != "Lamb" else ()
    optimizer = Optimizer(training_optimizer_name=name, max_norm_clip=1.0, optimizer_attributes=rules)
    together, nodes = updates_of(optimizer)
    monkeypatch.setattr(small_weights, "_MOST_ELEMENTS", -1)
    alone, nodes_alone = updates_of(optimizer)
    assert together.keys() == alone.keys()
    for label, array in alone.items():
        assert together[label].shape == array.shape
        assert together[label].tobytes() == array.tobytes(), label
    assert (nodes < nodes_alone) == (name not in ("Lamb",))
