"""Maps as types of values: set aside, restored, and described."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from onward.graph.nodes.map_types import describe_map, holds_map, restore_map_types, without_map_types

INT64, FLOAT, STRING = TensorProto.INT64, TensorProto.FLOAT, TensorProto.STRING


def map_of(key: int, value: int) -> onnx.TypeProto:
    return helper.make_map_type_proto(key, helper.make_tensor_type_proto(value, []))


MAP = map_of(INT64, FLOAT)
SEQUENCE = helper.make_sequence_type_proto(MAP)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MAP, "map int64 -> float32"),
        (SEQUENCE, "sequence of maps int64 -> float32"),
        (helper.make_optional_type_proto(MAP), "optional map int64 -> float32"),
        (helper.make_sequence_type_proto(SEQUENCE), "sequence of sequence of maps int64 -> float32"),
        (map_of(STRING, TensorProto.FLOAT16), "map string -> float16"),
        (map_of(STRING, TensorProto.BFLOAT16), "map string -> bfloat16"),
        (map_of(STRING, TensorProto.DOUBLE), "map string -> double"),
        (onnx.TypeProto(map_type=onnx.TypeProto.Map()), "map ? -> ?"),
    ],
)
def test_types_in_words(kind: onnx.TypeProto, words: str) -> None:
    assert holds_map(kind)
    assert describe_map(kind) == words


def test_tensors_are_no_maps() -> None:
    tensor = helper.make_tensor_type_proto(FLOAT, [2])
    assert not any(holds_map(one) for one in (tensor, helper.make_sequence_type_proto(tensor), onnx.TypeProto()))


def model_of(*kinds: onnx.TypeProto) -> onnx.ModelProto:
    outputs = [helper.make_value_info(f"y{number}", kind) for number, kind in enumerate(kinds)]
    inner = helper.make_graph([], "inner", [], [helper.make_value_info("inside", MAP)])
    branch = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    return helper.make_model(helper.make_graph([branch], "g", [], outputs))


def test_types_are_set_aside_in_nested_graphs_too_and_restored() -> None:
    tensor = helper.make_tensor_type_proto(FLOAT, [2])
    model = model_of(SEQUENCE, tensor)
    before = model.SerializeToString()
    plain, types = without_map_types(model)
    assert model.SerializeToString() == before
    assert set(types) == {"y0", "inside"}
    assert plain.graph.output[0].type.WhichOneof("value") is None
    assert plain.graph.output[1].type == tensor
    restore_map_types(plain, types)
    assert plain.SerializeToString() == before


def test_a_value_that_is_declared_nowhere_is_declared_again() -> None:
    model = helper.make_model(helper.make_graph([], "g", [], []))
    restore_map_types(model, {"m": MAP})
    (declared,) = model.graph.value_info
    assert (declared.name, declared.type) == ("m", MAP)


def test_a_model_without_maps_is_returned_itself() -> None:
    model = helper.make_model(helper.make_graph([], "g", [], []))
    assert without_map_types(model) == (model, {})
    assert without_map_types(model)[0] is model
