"""Small files that stand for graphs which no machine holds are refused at once, with the field that allows more."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward import to_torch
from onward.errors import ModelError
from onward.graph.nodes.budget import PreparationDeadline
from onward.graph.training_graph import make_training_graph
from onward.parameters.limits import Limits

OWN = helper.make_opsetid("own", 1)
STANDARD = helper.make_opsetid("", 17)


def model(
    nodes: list[onnx.NodeProto], stored: dict[str, object] | None = None, functions: Sequence[onnx.FunctionProto] = ()
) -> onnx.ModelProto:
    """`y` of the input x [N, 4], a weight w [4, 4] and stored whole numbers."""
    tensors = [numpy_helper.from_array(np.ones((4, 4), np.float32), "w")]
    tensors += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (stored or {}).items()]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], tensors
    )
    return helper.make_model(graph, opset_imports=[STANDARD, OWN], functions=list(functions), ir_version=8)


PRODUCT = helper.make_node("MatMul", ["x", "w"], ["m"])


def reshaped_by(node: onnx.NodeProto | list[onnx.NodeProto], shape: str, **stored: object) -> onnx.ModelProto:
    nodes = node if isinstance(node, list) else [node]
    return model([*nodes, PRODUCT, helper.make_node("Reshape", ["m", shape], ["y"])], stored)


def chained_concats(count: int) -> onnx.ModelProto:
    nodes = [helper.make_node("Concat", [f"c{i}"] * 2, [f"c{i + 1}"], axis=0) for i in range(count)]
    return reshaped_by(nodes, f"c{count}", c0=[1, 1])


def functions(depth: int, calls: int) -> onnx.ModelProto:
    """Functions of which each calls the one before it so often."""
    made = []
    for level in range(depth):
        operator, domain = ("Relu", "") if level == 0 else (f"f{level - 1}", "own")
        names = ["a", *(f"v{i}" for i in range(calls - 1)), "b"]
        body = [helper.make_node(operator, [one], [next_], domain=domain) for one, next_ in pairwise(names)]
        made.append(helper.make_function("own", f"f{level}", ["a"], ["b"], body, [STANDARD, OWN]))
    return model([PRODUCT, helper.make_node(f"f{depth - 1}", ["m"], ["y"], domain="own")], functions=made)


def nested(depth: int) -> onnx.ModelProto:
    """Branches in branches."""

    def graph(name: str, node: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(node.output[0], 1, None)])

    inner = graph("innermost", PRODUCT)
    for level in range(depth):
        other = graph(f"else{level}", helper.make_node("Identity", ["x"], [f"e{level}"]))
        output = "y" if level == depth - 1 else f"o{level}"
        node = helper.make_node("If", ["c"], [output], then_branch=inner, else_branch=other)
        inner = graph(f"then{level}", node)
    return model([inner.node[0]])


def many(node: onnx.NodeProto) -> onnx.ModelProto:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])])
    made.graph.node.extend([node] * 600_000)
    return made


def many_axes() -> onnx.ModelProto:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])])
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1] * 100_000))
    return made


def fill(size: int) -> onnx.ModelProto:
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["r"]), PRODUCT, helper.make_node("Add", ["m", "r"], ["y"])]
    return model(nodes, {"s": [size]})


BOMBS: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "concats": (
        lambda: chained_concats(40),
        r"Concat\) computes 2,199,023,255,552 numbers .* set limits.shape_numbers",
    ),
    "functions called twice": (lambda: functions(30, 2), "has 1,073,741,825 nodes.* set limits.nodes"),
    "functions called often": (lambda: functions(25, 500), "nodes, functions expanded.* set limits.nodes"),
    "functions in a row": (lambda: functions(200, 1), "call each other more than 30 deep.* set limits.nesting"),
    "empty nodes": (lambda: many(onnx.NodeProto()), "has 600,001 nodes.* set limits.nodes"),
    "nodes": (lambda: many(onnx.NodeProto(op_type="Identity")), "has 600,001 nodes.* set limits.nodes"),
    "graphs": (lambda: nested(32), "nests graphs more than 30 deep.* set limits.nesting"),
    "axes": (many_axes, "'x' has 100,000 axes.* set limits.tensor_axes"),
    "a range": (
        lambda: reshaped_by(helper.make_node("Range", ["a", "b", "d"], ["r"]), "r", a=0, b=2**40, d=1),
        r"Range\) computes a tensor of 1,099,511,627,776 elements .* set limits.constant_gb",
    ),
    "a fill": (lambda: fill(2**40), "ConstantOfShape.* set limits.constant_gb"),
    "a repetition": (
        lambda: reshaped_by(helper.make_node("Expand", ["one", "s"], ["r"]), "r", one=[1], s=[2**40]),
        "Expand.* set limits.constant_gb",
    ),
    "tiles": (
        lambda: reshaped_by(helper.make_node("Tile", ["one", "s"], ["r"]), "r", one=[1], s=[2**40]),
        "Tile.* set limits.constant_gb",
    ),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    """In seconds, and within half a gigabyte more than before."""
    make, words = BOMBS[kind]
    path = tmp_path / "m.onnx"
    path.write_bytes(make().SerializeToString())
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ModelError, match=words):
        make_training_graph(path)
    assert time.process_time() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000


@pytest.mark.parametrize(
    ("made", "limits", "words"),
    [
        (chained_concats(3), Limits(shape_numbers=10), "limits.shape_numbers"),
        (functions(3, 2), Limits(nodes=5), "limits.nodes"),
        (functions(5, 1), Limits(nesting=4), "limits.nesting"),
        (nested(3), Limits(nesting=3), "limits.nesting"),
        (nested(1), Limits(tensor_axes=1), "limits.tensor_axes"),
        (fill(100), Limits(constant_gb=1e-7), "limits.constant_gb"),
        (nested(1), Limits(model_gb=1e-8), "limits.model_gb"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_each_limit_is_what_its_field_says(made: onnx.ModelProto, limits: Limits, words: str) -> None:
    to_torch(made)
    with pytest.raises(ModelError, match=words):
        to_torch(made, limits=limits)


def test_a_function_that_calls_itself() -> None:
    body = [helper.make_node("f", ["a"], ["b"], domain="own")]
    function = helper.make_function("own", "f", ["a"], ["b"], body, [OWN])
    with pytest.raises(ModelError, match=r"the function own::f calls itself"):
        make_training_graph(model([PRODUCT, helper.make_node("f", ["m"], ["y"], domain="own")], functions=[function]))


def test_the_time_of_a_preparation() -> None:
    deadline = PreparationDeadline(Limits(preparation_seconds=1e-9))
    time.sleep(0.001)
    with pytest.raises(ModelError, match=r"took 0 s up to the fused graph; .* set limits.preparation_seconds"):
        deadline.check("the fused graph")


def test_a_sequence_of_many_parts_stays_one() -> None:
    nodes = [
        helper.make_node("Expand", ["x", "s"], ["big"]),
        helper.make_node("SplitToSequence", ["big"], ["q"], axis=0, keepdims=0),
        helper.make_node("SequenceAt", ["q", "zero"], ["e"]),
        helper.make_node("Add", ["m", "e"], ["y"]),
    ]
    made = model([PRODUCT, *nodes], {"s": [2**24, 4], "zero": 0})
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4]))
    graph = make_training_graph(made).model.graph
    assert max(len(node.outputs) for node in graph) == 1


@pytest.mark.parametrize("suffix", ["onnxtxt", "textproto", "json"])
def test_text_that_is_nested_too_deeply(suffix: str, tmp_path: Path) -> None:
    """onnx's own parser of text calls itself until the process ends."""
    path = tmp_path / f"m.{suffix}"
    path.write_text({"json": '{"graph": ' * 100_000, "textproto": "graph { " * 100_000}.get(suffix, "g (" * 100_000))
    with pytest.raises(ModelError, match="nested more than 200 brackets deep"):
        make_training_graph(path)


def test_messages_nested_in_binary(tmp_path: Path) -> None:
    content = b""
    for number in range(15_001):  # model { graph { node { attribute { graph { ...
        length, size = b"", len(content)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        content = [b"\x32", b"\x2a", b"\x0a"][number % 3] + length + bytes([size]) + content
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x08\x3a" + content[1:])
    with pytest.raises(ModelError, match=r"is not an ONNX file, or is cut off: .*MaxDepth"):
        make_training_graph(path)


def test_a_large_ordinary_model_passes() -> None:
    """The defaults are far above what it takes."""
    nodes = [helper.make_node("Relu", [f"v{i}" if i else "m"], [f"v{i + 1}"]) for i in range(1000)]
    made = model([PRODUCT, *nodes, helper.make_node("Identity", ["v1000"], ["y"])])
    make_training_graph(made)
    assert Limits().nodes >= 200_000
    assert Limits().model_gb >= 100
