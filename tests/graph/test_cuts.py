"""Cut points: one activation separates two trained parts; masks, positions and transposed weights do not count."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from onward.graph.cuts import find_cut_points
from onward.graph.training_graph import make_training_graph

RNG = np.random.default_rng(0)


def _model(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g ' + text)
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), name))
    return model


def _residual() -> onnx.ModelProto:
    """Two residual blocks behind an embedding; a mask from the input is read by both, the embedding is the head too."""
    return _model(
        """(int64[N, S] tokens, float[N, S, 1] keep) => (float[N, S, 7] logits)
        {
            head = Transpose<perm = [1, 0]>(table)
            twice = Mul(keep, keep)
            e = Gather(table, tokens)
            n1 = LayerNormalization(e, s1)
            h1 = MatMul(n1, w1)
            m1 = Mul(h1, twice)
            r1 = Add(e, m1)
            n2 = LayerNormalization(r1, s2)
            h2 = MatMul(n2, w2)
            m2 = Mul(h2, twice)
            r2 = Add(r1, m2)
            out = Relu(r2)
            logits = MatMul(out, head)
        }""",
        table=(7, 4), s1=(4,), w1=(4, 4), s2=(4,), w2=(4, 4),
    )  # fmt: skip


def test_residual_blocks():
    graph = make_training_graph(_residual())
    points = find_cut_points(graph.model.graph, graph.weights)
    assert [point.value for point in points] == ["e", "r1"]
    assert [point.weights_before for point in points] == [1, 3]
    assert [point.nodes_before + point.nodes_after for point in points] == [13, 13]
    assert [point.nodes_before for point in points] == [3, 7]


def test_what_follows_a_cut_needs_nothing_else():
    """ONNX's own extraction finds the part after each cut from the cut value and the graph's inputs alone."""
    model = make_training_graph(_residual())
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model.model))
    feeds = {"tokens": RNG.integers(0, 7, (2, 3)), "keep": np.ones((2, 3, 1), np.float32)}
    whole = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0]
    for point in find_cut_points(model.model.graph, model.weights):
        extractor = onnx.utils.Extractor(proto)
        first = onnxruntime.InferenceSession(
            extractor.extract_model(["tokens", "keep"], [point.value]).SerializeToString()
        )
        second = onnxruntime.InferenceSession(
            extractor.extract_model([point.value, "keep"], ["logits"]).SerializeToString()
        )
        names = {value.name for value in first.get_inputs()}
        activation = first.run(None, {name: array for name, array in feeds.items() if name in names})[0]
        names = {value.name for value in second.get_inputs()}
        rest = {name: array for name, array in feeds.items() if name in names}
        np.testing.assert_allclose(second.run(None, {point.value: activation, **rest})[0], whole, rtol=1e-6)


@pytest.mark.parametrize("skip", [False, True])
def test_inside_a_skip_connection_there_is_no_cut(skip: bool):
    """With the skip, the activation it starts from is the only one that separates; without, the last before `v` is."""
    last = "Add(c, a)" if skip else "Neg(c)"
    model = _model(
        f"""(float[N, 4] x) => (float[N, 4] y)
        {{ a = MatMul(x, u) b = Relu(a) c = MatMul(b, v) y = {last} }}""",
        u=(4, 4), v=(4, 4),
    )  # fmt: skip
    graph = make_training_graph(model)
    points = find_cut_points(graph.model.graph, graph.weights)
    assert [point.value for point in points] == (["a"] if skip else ["b"])


def test_nested_graphs_read_too():
    """A branch that reads an early activation keeps it alive."""
    model = _model(
        """(float[N, 4] x, bool c) => (float[N, 4] y)
        { a = MatMul(x, u) b = MatMul(a, v)
          y = If(c) < then_branch = t () => (float[N, 4] p) { p = MatMul(b, w) },
                      else_branch = e () => (float[N, 4] q) { q = Add(b, a) } > }""",
        u=(4, 4), v=(4, 4), w=(4, 4),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert [point.value for point in find_cut_points(graph.model.graph, graph.weights)] == ["a"]
