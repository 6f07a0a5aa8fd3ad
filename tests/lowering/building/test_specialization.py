"""A specialized program computes what the general one does, without shape arithmetic; it folds constants only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx

import onward
from onward.lowering.building.specialization import specialize
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program

CPU = torch.device("cpu")


def specialized(net: OnnxModule, *inputs: torch.Tensor) -> Program:
    tensors = net.tensors_by_name()
    constants = frozenset(tensors) - {*net.graph.weights, *net.graph.states}
    return specialize(net.program, CPU, inputs, tensors, constants)


class _Watch(fx.Interpreter):
    """Runs a program and notes every call that gives numbers, not tensors: shape arithmetic."""

    def __init__(self, code: fx.GraphModule) -> None:
        super().__init__(code)
        self.host: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        parts = result if isinstance(result, tuple | list) else (result,)
        if n.op == "call_function" and not any(isinstance(part, torch.Tensor) for part in parts):
            self.host.append(str(n.target))
        return result


def host_calls(program: Program, net: OnnxModule, *inputs: torch.Tensor) -> list[str]:
    watch = _Watch(program.code)
    tensors = net.tensors_by_name()
    watch.run(False, CPU, *inputs, *(program.tensor(name, tensors) for name in program.tensors))
    return watch.host


def run(program: Program, net: OnnxModule, *inputs: torch.Tensor, training: bool = False) -> tuple[Any, ...]:
    return program(training, CPU, inputs, net.tensors_by_name())


def gradients(net: OnnxModule, output: torch.Tensor) -> Mapping[str, torch.Tensor]:
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((output * direction).sum(), list(net.weights.values()))
    return dict(zip(net.weights, found, strict=True))


def graph_of(
    nodes: list[onnx.NodeProto],
    initializers: dict[str, np.ndarray],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, int],
    opset: int = 18,
    frozen: Sequence[str] = (),
) -> OnnxModule:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onward.to_torch(model, weights_not_to_train=frozen)


@pytest.fixture(scope="module")
def gpt2() -> OnnxModule:
    pytest.importorskip("transformers")
    from tests.lowering.test_exports import exported

    return onward.to_torch(exported("gpt2", 18, optimize=True)[1], fuse=False)


@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (3, 5), (1, 16)])
def test_a_dynamic_gpt2_at_several_shapes(gpt2: OnnxModule, shape: tuple[int, int]) -> None:
    """Equal in every bit, outputs and gradients; not one host call is left; the weights are still read."""
    tokens = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0))
    program = specialized(gpt2, tokens)
    assert len(host_calls(gpt2.program, gpt2, tokens)) > 20, "the general program computes with shapes"
    assert host_calls(program, gpt2, tokens) == []
    assert len(program.code.graph.nodes) < len(gpt2.program.code.graph.nodes)
    assert set(gpt2.weights) <= set(program.tensors)
    (expected,), (actual,) = run(gpt2.program, gpt2, tokens), run(program, gpt2, tokens)
    assert torch.equal(actual, expected)
    one, other = gradients(gpt2, expected), gradients(gpt2, actual)
    for name in gpt2.weights:
        assert torch.equal(one[name], other[name]), name


def test_the_causal_mask_of_gpt2_is_computed_once(gpt2: OnnxModule) -> None:
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    program = specialized(gpt2, tokens)
    folded = {name: program.attribute_tensors[name] for name in program.tensors if name.startswith("folded/")}
    assert any(tensor.shape[-2:] == (7, 7) for tensor in folded.values())
    assert all(not tensor.requires_grad for tensor in folded.values())


def test_a_specialized_program_compiles_whole(gpt2: OnnxModule) -> None:
    tokens = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    program = specialized(gpt2, tokens)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    (actual,) = compiled(False, CPU, (tokens,), gpt2.tensors_by_name())
    (expected,) = run(gpt2.program, gpt2, tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div", "Less"])
@pytest.mark.parametrize(
    ("constant", "is_number"),
    [
        (np.float32(3.3), True),
        (np.full((1, 1), -3.3, np.float32), True),
        (np.float32(np.inf), True),
        (np.float32(np.nan), False),
        (np.full((1, 1, 1), 3.3, np.float32), False),
        (np.full(4, 3.3, np.float32), False),
    ],
    ids=["scalar", "one element", "infinity", "not a number", "of higher rank", "several"],
)
def test_a_constant_of_one_element_is_a_number(
    op_type: str, is_first: bool, constant: np.ndarray, is_number: bool
) -> None:
    """The same bits as those of the tensor, which the program no longer reads, where the other operand has the shape of
    the result."""
    operands = ["c", "x"] if is_first else ["x", "c"]
    nodes = [helper.make_node("Erf", ["k"], ["e"]), helper.make_node("Div", ["k", "e"], ["r"])]
    nodes += [helper.make_node("Mul", ["r", "e"], ["c"]), helper.make_node(op_type, operands, ["y"])]
    kind = TensorProto.BOOL if op_type == "Less" else TensorProto.FLOAT
    net = graph_of(nodes, {"k": np.asarray(constant)}, {"x": (TensorProto.FLOAT, ["n", 4])}, {"y": kind}, frozen=["k"])
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    program = specialized(net, x)
    (expected,), (actual,) = run(net.program, net, x), run(program, net, x)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
    assert (program.tensors == ()) == is_number


def test_random_numbers_are_drawn_at_every_call() -> None:
    """Also where all inputs are constants, and dropout of a constant in training mode."""
    nodes = [
        helper.make_node("RandomNormalLike", ["ones"], ["noise"]),
        helper.make_node("Dropout", ["ones", "half", "yes"], ["dropped"]),
        helper.make_node("Bernoulli", ["halves"], ["coin"]),
        helper.make_node("Add", ["noise", "dropped"], ["both"]),
        helper.make_node("Add", ["both", "coin"], ["all"]),
        helper.make_node("Add", ["all", "x"], ["y"]),
    ]
    constants = {
        "ones": np.ones((70, 3), np.float32),
        "halves": np.full((70, 3), 0.5, np.float32),
        "half": np.array(0.5, np.float32),
        "yes": np.array(True),
    }
    net = graph_of(
        nodes, constants, {"x": (FLOAT, ["n", 3])}, {"y": FLOAT, "noise": FLOAT, "dropped": FLOAT, "coin": FLOAT}
    )
    x = torch.zeros(70, 3)
    program = specialized(net, x)
    first, second = (run(program, net, x, training=True) for _ in range(2))
    assert all(not torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_shapes_that_depend_on_data() -> None:
    """NonZero gives another length at each call of the same program."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"]),
        helper.make_node("Shape", ["where"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["count"]),
        helper.make_node("Transpose", ["where"], ["rows"]),
        helper.make_node("Shape", ["x"], ["size"]),
    ]
    net = graph_of(
        nodes,
        {"one": np.array(1)},
        {"x": (FLOAT, ["n"])},
        {"count": INT64, "rows": INT64, "size": INT64},
    )
    program = specialized(net, torch.ones(5))
    for values in ([0.0, 1, 0, 1, 1], [0.0, 0, 0, 0, 0], [1.0, 1, 1, 1, 1]):
        x = torch.tensor(values)
        count, rows, size = run(program, net, x)
        assert int(count) == int(x.count_nonzero())
        assert torch.equal(rows, x.nonzero())
        assert size.tolist() == [5]


def test_branches_follow_the_data() -> None:
    def branch(name: str, op_type: str) -> onnx.GraphProto:
        node = helper.make_node(op_type, ["x"], [f"{name}_out"])
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(f"{name}_out", FLOAT, None)])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=branch("a", "Neg"), else_branch=branch("b", "Exp")),
    ]
    net = graph_of(nodes, {"zero": np.array(0, np.float32)}, {"x": (FLOAT, ["n"])}, {"y": FLOAT})
    program = specialized(net, torch.ones(3))
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.equal(run(program, net, x)[0], -x if x[0] > 0 else x.exp())


def test_weights_and_running_statistics_are_never_folded() -> None:
    """Work on weights alone follows the weights; work on constants alone is done once."""
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"]),
        helper.make_node("MatMul", ["x", "wt"], ["h"]),
        helper.make_node("BatchNormalization", ["h", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Mul", ["table", "table"], ["squares"]),
        helper.make_node("Add", ["n", "squares"], ["y"]),
    ]
    table = np.random.default_rng(0).random((80, 4)).astype(np.float32)
    values = {"w": np.eye(4), "s": np.ones(4), "b": np.zeros(4), "m": np.zeros(4), "v": np.ones(4)}
    net = graph_of(
        nodes,
        {**{k: v.astype(np.float32) for k, v in values.items()}, "table": table},
        {"x": (FLOAT, ["n", 4])},
        {"y": FLOAT},
    )
    if "table" in net.weights:
        net = onward.to_torch(net.graph.source, weights_not_to_train=["table"])
    x = torch.randn(80, 4)
    program = specialized(net, x)
    assert set(program.tensors) >= {"w", "s", "b", "m", "v"}
    assert "table" not in program.tensors
    assert sum(name.startswith("folded/") for name in program.tensors) == 1
    with torch.no_grad():
        net.weights["w"].mul_(2)
        net.get_buffer("m").add_(1)
    assert torch.equal(run(program, net, x)[0], run(net.program, net, x)[0])
    run(program, net, x, training=True)
    assert not torch.equal(net.get_buffer("m"), torch.ones(4)), "statistics are updated through the specialized program"


def test_the_general_program_stays_as_it_was(gpt2: OnnxModule) -> None:
    code, tensors = gpt2.program.code.code, gpt2.program.tensors
    specialized(gpt2, torch.zeros(2, 7, dtype=torch.int64))
    assert gpt2.program.code.code == code
    assert gpt2.program.tensors == tensors


@pytest.mark.parametrize(("other", "count"), [(32, 1), (33, 2)], ids=["equal", "of other numbers"])
def test_constants_of_equal_bits_are_one_tensor_that_stores_repetitions_once(other: int, count: int) -> None:
    nodes = [
        node
        for name, size in (("a", 32), ("b", other))
        for node in (
            helper.make_node("Sub", ["table", f"size_{name}"], [f"moved_{name}"]),
            helper.make_node("Expand", [f"moved_{name}", "shape"], [f"wide_{name}"]),
        )
    ]
    nodes += [helper.make_node("Add", ["x", "wide_a"], ["h"]), helper.make_node("Mul", ["h", "wide_b"], ["y"])]
    values: dict[str, Any] = {
        "table": np.arange(32 * 32, dtype=np.float32).reshape(1, 32, 32),
        "size_a": np.float32(32), "size_b": np.float32(other), "shape": np.asarray([4, 32, 32]),
    }  # fmt: skip
    net = graph_of(nodes, values, {"x": (FLOAT, ["n", 32, 32])}, {"y": FLOAT})
    net = onward.to_torch(net.graph.source, weights_not_to_train=["*"]) if net.weights else net
    x = torch.randn(4, 32, 32)
    program = specialized(net, x)
    folded = [program.attribute_tensors[name] for name in program.tensors if name.startswith("folded/")]
    assert [(tuple(t.shape), t.untyped_storage().nbytes()) for t in folded] == count * [((4, 32, 32), 4 * 32 * 32)]
    assert torch.equal(run(program, net, x)[0], run(net.program, net, x)[0])
