"""Valid models broken at random, in their bytes and in their structure."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser


def seed_model() -> onnx.ModelProto:
    """Convolution, batch norm, a branch, a loop over constants, a function, shape arithmetic, stored weights."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        g (float[N, 2, 4, 4] x, bool c) => (float[N, 3] y, float[N] z)
        <float[3] b = {0.1, 0.2, 0.3}, float[3] one = {1.0, 1.0, 1.0}, float[3] mean = {0.0, 0.0, 0.0}>
        {
            h = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w, b)
            n = BatchNormalization<epsilon = 0.001>(h, one, b, mean, one)
            r = own.act(n)
            p = ReduceMean<axes = [2, 3], keepdims = 0>(r)
            s = Shape(p)
            zero = Constant<value_ints = [0]>()
            rows = Gather<axis = 0>(s, zero)
            three = Constant<value = int64[1] {3}>()
            sizes = Concat<axis = 0>(rows, three)
            q = Reshape(p, sizes)
            y = If(c) <
                then_branch = t () => (float[N, 3] a) { a = Gemm<transB = 1>(q, v, b) },
                else_branch = e () => (float[N, 3] d) { k = Constant<value = float[3] {1.0, 2.0, 3.0}>() d = Mul(q, k) }
            >
            m = Softmax<axis = 1>(y)
            z = ReduceSum<keepdims = 0>(m, last)
        }
        <domain: "own", opset_import: ["" : 17]> act (a) => (b) { b = LeakyRelu<alpha = 0.2>(a) }
        """
    )
    rng = np.random.default_rng(0)
    for name, array in {
        "w": rng.normal(size=(3, 2, 3, 3)).astype(np.float32),
        "v": rng.normal(size=(3, 3)).astype(np.float32),
        "last": np.array([1]),
    }.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def mutate_bytes(source: random.Random, data: bytes) -> bytes:
    """Up to four bytes changed, dropped or repeated, or the tail cut off."""
    broken = bytearray(data)
    for _ in range(source.randrange(1, 5)):
        at = source.randrange(len(broken))
        kind = source.randrange(4)
        if kind == 0:
            broken[at] = source.randrange(256)
        elif kind == 1:
            del broken[at : at + source.randrange(1, 8)]
        elif kind == 2:
            broken[at:at] = broken[at : at + source.randrange(1, 8)]
        elif len(broken) > 50:
            del broken[max(at, 50) :]
    return bytes(broken)


def mutate_structure(source: random.Random, model: onnx.ModelProto) -> onnx.ModelProto:
    """One to three nodes, tensors, names, types or attributes changed."""
    broken = onnx.ModelProto()
    broken.CopyFrom(model)
    for _ in range(source.randrange(1, 4)):
        source.choice(_MUTATIONS)(source, broken.graph)
    return broken


def _name(source: random.Random, graph: onnx.GraphProto) -> str:
    names = (
        [v.name for v in graph.input] + [t.name for t in graph.initializer] + [o for n in graph.node for o in n.output]
    )
    return source.choice([*names, "", "unheard of"])


def _drop_node(source: random.Random, graph: onnx.GraphProto) -> None:
    if graph.node:
        del graph.node[source.randrange(len(graph.node))]


def _change_input(source: random.Random, graph: onnx.GraphProto) -> None:
    node = source.choice(graph.node)
    if node.input:
        node.input[source.randrange(len(node.input))] = _name(source, graph)


def _add_input(source: random.Random, graph: onnx.GraphProto) -> None:
    source.choice(graph.node).input.append(_name(source, graph))


def _drop_input(source: random.Random, graph: onnx.GraphProto) -> None:
    node = source.choice(graph.node)
    if node.input:
        del node.input[-1]


def _change_output(source: random.Random, graph: onnx.GraphProto) -> None:
    node = source.choice(graph.node)
    if node.output:
        node.output[0] = _name(source, graph)


def _change_operator(source: random.Random, graph: onnx.GraphProto) -> None:
    source.choice(graph.node).op_type = source.choice(
        ["Add", "Conv", "Reshape", "If", "Loop", "Nothing", "Split", "Cast"]
    )


def _change_attribute(source: random.Random, graph: onnx.GraphProto) -> None:
    node = source.choice(graph.node)
    if node.attribute:
        attribute = source.choice(node.attribute)
        attribute.CopyFrom(helper.make_attribute(attribute.name, source.choice([-7, 2**40, 1.5, "x", [1, -1], [0.5]])))


def _drop_attribute(source: random.Random, graph: onnx.GraphProto) -> None:
    node = source.choice(graph.node)
    if node.attribute:
        del node.attribute[source.randrange(len(node.attribute))]


def _change_tensor(source: random.Random, graph: onnx.GraphProto) -> None:
    tensor = source.choice(graph.initializer)
    kind = source.randrange(4)
    if kind == 0:
        tensor.dims[:] = [source.choice([-1, 0, 1, 3, 2**40]) for _ in range(source.randrange(5))]
    elif kind == 1:
        tensor.data_type = source.choice([0, 1, 6, 7, 8, 10, 16, 23, 77])
    elif kind == 2:
        tensor.raw_data = bytes(source.randrange(64))
    else:
        tensor.name = _name(source, graph)


def _change_io(source: random.Random, graph: onnx.GraphProto) -> None:
    info = source.choice([*graph.input, *graph.output])
    if source.random() < 0.5:
        info.name = _name(source, graph)
    else:
        info.type.tensor_type.elem_type = source.choice([0, TensorProto.INT64, TensorProto.STRING, 99])


_MUTATIONS: list[Callable[[random.Random, onnx.GraphProto], None]] = [
    _drop_node, _change_input, _add_input, _drop_input, _change_output, _change_operator,
    _change_attribute, _drop_attribute, _change_tensor, _change_io,
]  # fmt: skip
