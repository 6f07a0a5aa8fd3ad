"""Sizes of inputs before there is a batch: those that are set, then those of the data, then the batch's."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onward.data.shard import FeatureSpec
from onward.engine.building.sizes import input_sizes, known_dimensions
from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.parameters import Training
from tests.plan.staged_models import Sketch


def network() -> TrainingGraph:
    sketch = Sketch(seed=1)
    x = sketch.input("x", ["batch", "time", 4], ir.DataType.FLOAT)
    return make_training_graph(sketch.model(sketch.node("MatMul", "y", x, sketch.weight("weight", 4, 4))))


def test_sizes_are_set_or_those_of_the_data() -> None:
    graph, specs = network(), {"x": FeatureSpec((7, 4), np.dtype(np.float32))}
    found = known_dimensions(Training(batch_size=3), graph, specs)
    assert found == {"batch": 3, "time": 7}
    assert input_sizes(graph, found) == {"x": (3, 7, 4)}
    assert known_dimensions(Training(batch_size=3, mapped_dimensions={"time": 9}), graph, specs)["time"] == 9


def test_a_size_that_nothing_says_is_asked_for() -> None:
    graph = network()
    with pytest.raises(ParametersError, match=r"the sizes of 'time' of 'x' are symbolic .* training.mapped_dimensions"):
        input_sizes(graph, known_dimensions(Training(batch_size=3), graph, {}))
