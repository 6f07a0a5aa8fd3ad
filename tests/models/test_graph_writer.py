"""Graphs written node by node: names, seeds, constants that are shared, weights that are made when they are read."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onward.models.graph_writer import GraphWriter, constant, normal, uniform


def writer(seed: int = 0) -> GraphWriter:
    return GraphWriter("g", 18, seed)


def test_values_of_a_weight_depend_on_seed_and_name_alone() -> None:
    def values(seed: int, *names: str) -> list[np.ndarray]:
        one = writer(seed)
        return [one.weight(name, (4, 3), normal(0.5)).const_value.numpy() for name in names]  # type: ignore[union-attr]

    (a, b), (again,) = values(1, "a", "b"), values(1, "b")
    np.testing.assert_array_equal(b, again)
    assert not np.array_equal(a, b)
    assert not np.array_equal(values(2, "a")[0], a)
    assert a.dtype == np.float32


def test_fills() -> None:
    generator = np.random.default_rng(0)
    drawn = uniform(0.25)(generator, (5000,))
    assert -0.25 <= drawn.min() < -0.2
    assert 0.2 < drawn.max() < 0.25
    assert normal(0.1)(generator, (5000,)).std() == pytest.approx(0.1, rel=0.1)
    assert constant(3.0)(generator, (2, 0)).shape == (2, 0)


def test_names_carry_scopes_and_never_repeat() -> None:
    one = writer()
    x = one.input("x", ir.DataType.FLOAT, ["n", 3])
    with one.scope("h"), one.scope("0"):
        weight = one.weight("w", (3,), constant(1.0))
        again = one.weight("w", (3,), constant(1.0))
        first, second = (one.op("Add", x, weight) for _ in range(2))
    assert [weight.name, again.name] == ["h.0.w", "h.0.w_2"]
    assert [first.producer().name, second.producer().name] == ["h.0/Add", "h.0/Add_2"]  # type: ignore[union-attr]
    parts = one.ops("Split", x, output_count=2, axis=1, num_outputs=2)
    assert [value.name for value in parts] == ["Split_output:0", "Split_output:1"]
    assert one.op("Relu", x, name="x").name == "x_2"


def test_equal_constants_are_one_initializer() -> None:
    one = writer()
    assert one.number(0.5) is one.number(0.5)
    assert one.integers(2) is not one.integers([2])
    assert one.number(2.0) is not one.integers(2)
    names = [one.number(0.5).name, one.integers([1, -1]).name, one.integers(3).name]
    assert names == ["number_0p5", "integers_1_-1", "integer_3"]


def test_a_finished_model_is_checked_and_has_every_shape() -> None:
    one = writer()
    x = one.input("x", ir.DataType.FLOAT, ["n", 3])
    y = one.op("MatMul", x, one.weight("w", (3, 2), normal(1.0)))
    z = one.op("Add", y, one.weight("b", (2,), constant(0.0)), name="z")
    model = one.finish([(z, ["n", 2])], {"key": "value"})
    assert list(model.graph.initializers) == ["w", "b"]
    assert [str(size) for size in y.shape or ()] == ["n", "2"]
    assert model.metadata_props["key"] == "value"
    broken = writer()
    with pytest.raises(Exception, match="Relu"):
        broken.finish([(broken.op("Relu"), [1])])
