"""The table of operators against the ONNX standard's own schemas."""

from __future__ import annotations

import onnx
import pytest
from onnx import defs

from onward.graph.operators import OPERATORS, Fact, operator, operators_with

SCHEMAS = {schema.name: schema for schema in defs.get_all_schemas() if schema.domain in ("", "ai.onnx.ml")}

MULTIPLIES_INTEGERS = {"ConvInteger", "MatMulInteger"}
"""A gradient flows through integers that a quantized network multiplies, by what they stand for."""

OF_OTHERS = {
    "ConstantFill", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "Experts", "FusedConv", "Linear", "Lookup",
    "MatMulIntegerToFloat", "MatMulNBits", "NhwcConv", "OneHotCategories", "QGemm", "QLinearAdd",
    "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid",
    "QLinearSoftmax", "TreeClassifier", "TreeRegressor", "DequantizeBnb4", "DequantizeNBits", "GatherBlockQuantized",
    "EmbeddingBag", "GroupQueryAttention", "MatMulBnb4", "NanToNum", "StopGradient",
}  # fmt: skip
"""Of onnxruntime, of onward, and one that the standard dropped."""

NOT_RANDOM = {"If", "Loop", "Scan", "SequenceMap", "AffineGrid"}
"""As random as what they run, and one that the standard does not mark though it is an expression."""

STANDARD_NAMES = {
    "weight": {"W", "B", "A", "scale", "Scale", "slope"},
    "bias": {"B", "C", "bias"},
    "weight_ih": {"W"},
    "weight_hh": {"R"},
    "peephole": {"P"},
    "running_mean": {"input_mean"},
    "running_var": {"input_var"},
    "state": {"initial_h", "initial_c"},
    "table": {"cos_cache", "sin_cache"},
}


def test_every_row_is_of_an_operator_that_exists() -> None:
    assert set(OPERATORS) - set(SCHEMAS) == OF_OTHERS


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_inputs_that_hold_no_floats_have_no_gradient(name: str) -> None:
    """The standard lists the types of an input; what cannot be a float is an index, a size, an axis or a text."""
    if name in MULTIPLIES_INTEGERS:
        return
    for index, given in enumerate(SCHEMAS[name].inputs):
        if not any("float" in kind or "double" in kind for kind in given.types):
            assert operator(name).blocks_gradient(index), f"{name} reads {given.name!r}, of {sorted(given.types)}"


@pytest.mark.parametrize("name", sorted(set(OPERATORS) & set(SCHEMAS)))
def test_rows_fit_the_inputs_of_the_standard(name: str) -> None:
    row, inputs = OPERATORS[name], SCHEMAS[name].inputs
    assert len(row.inputs) <= len(inputs)
    for role, given in zip(row.inputs, inputs, strict=False):
        assert role.endswith("?") or given.name in STANDARD_NAMES.get(role, {given.name})
        assert role != "scale" or given.name.endswith("scale")


def test_random_operators_are_those_that_the_standard_calls_non_deterministic() -> None:
    kind = defs.OpSchema.NodeDeterminism.NonDeterministic
    random = {name for name, schema in SCHEMAS.items() if schema.node_determinism == kind}
    assert operators_with(Fact.RANDOM) == random - NOT_RANDOM, onnx.__version__


def test_what_is_not_listed_is_data() -> None:
    assert not operator("NoSuchOperator").blocks_gradient(0)
    assert not operator("NoSuchOperator").is_parameter(1)
    assert operator("Conv").is_parameter(2)
    assert not operator("Add").is_parameter(1)
    assert operator("Add").parameter_name(1) == "bias"
    assert operator("BatchNormalization").is_running_statistic(3)
