"""Which initializers train and why the others do not: patterns, immutable constants, evidence, gradients' reach."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onward.errors import ModelError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph

RNG = np.random.default_rng(0)


def _model(text: str, producer: str = "", **tensors: np.ndarray) -> onnx.ModelProto:
    """`a__b` stands for the name `a.b`, which the text form cannot hold."""
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g ' + text)
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    for name, array in tensors.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name.replace("__", ".")))
    model.producer_name = producer
    return model


def _normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def _two_layers() -> onnx.ModelProto:
    return _model(
        """(float[N, 4] x) => (float[N, 2] y)
        { a = Gemm(x, first__weight, first__bias) b = Relu(a) c = Mul(b, half)
          y = Gemm(c, second__weight, second__bias) }""",
        first__weight=_normal(4, 3), first__bias=_normal(3), half=np.float32(0.5),
        second__weight=_normal(3, 2), second__bias=_normal(2),
    )  # fmt: skip


def test_all_weights_train_by_default():
    graph = make_training_graph(_two_layers())
    assert graph.weights == ("first.weight", "first.bias", "second.weight", "second.bias")
    assert graph.frozen == {"half": "a rank-0 constant"}


def test_patterns():
    graph = make_training_graph(_two_layers(), weights_to_train=["second.*"], weights_not_to_train=["*.bias"])
    assert graph.weights == ("second.weight",)
    assert graph.frozen == {
        "first.weight": "not listed in weights_to_train",
        "first.bias": "listed in weights_not_to_train",
        "half": "not listed in weights_to_train",
        "second.bias": "listed in weights_not_to_train",
    }
    with pytest.raises(
        ModelError, match=r"weights_to_train: 'secnd\.\*' matches none of the model's 5 float.*mean 'second"
    ):
        make_training_graph(_two_layers(), weights_to_train=["secnd.*"])
    with pytest.raises(ModelError, match=r"weights_not_to_train: 'norm\*' matches none"):
        make_training_graph(_two_layers(), weights_not_to_train=["norm*"])


def test_an_exact_name_overrules_the_evidence():
    """A pattern leaves constants alone; a name that is spelled out means it."""
    assert "half" not in make_training_graph(_two_layers(), weights_to_train=["*"]).weights
    assert make_training_graph(_two_layers(), weights_to_train=["half"]).weights == ("half",)


def test_immutable_weights():
    """The original's rule: a rank-0 constant of this value at this input of this operator."""
    listed = {"Mul": [(1, 0.5)], "Add": [(1, 1e-5)]}
    graph = make_training_graph(_two_layers(), weights_to_train=["half", "first.weight"], immutable_weights=listed)
    assert graph.weights == ("first.weight",)
    assert graph.frozen["half"] == "listed in immutable_weights: Mul, input 1, 0.5"
    other = {"Mul": [(0, 0.5), (1, 0.25)]}
    assert "half" in make_training_graph(_two_layers(), weights_to_train=["half"], immutable_weights=other).weights


def test_no_gradient():
    """Indices, comparisons, casts to integers, conditions, unread tensors; asking for one by name is an error."""
    model = _model(
        """(float[N, 4] x, int64[N] i) => (float[N, 4] y, bool[N, 4] z)
        { a = Gather(table, i) b = Add(a, shift) y = Add(b, x) z = Greater(y, limit)
          k = Cast<to = 7>(number) l = Cast<to = 1>(k) }""",
        table=_normal(5, 4), shift=_normal(4), limit=_normal(4), number=_normal(4), alone=_normal(4),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("table", "shift")
    assert graph.frozen == {
        "limit": "no gradient reaches it", "number": "no gradient reaches it", "alone": "no node reads it",
    }  # fmt: skip
    with pytest.raises(ModelError, match="weights_to_train names 'limit', but no gradient of the loss reaches it"):
        make_training_graph(model, weights_to_train=["limit"])


def test_only_what_the_loss_reads_trains():
    """With a loss, a second head is frozen."""
    model = _model(
        "(float[N, 4] x) => (float[N, 2] a, float[N, 2] b) { a = MatMul(x, u) b = MatMul(x, v) }",
        u=_normal(4, 2), v=_normal(4, 2),
    )  # fmt: skip
    graph = make_training_graph(model, loss=LossSpec(type="mean_squared_error", prediction="a", label="t"))
    assert graph.weights == ("u",)
    assert graph.frozen["v"] == "no gradient reaches it"


def test_running_statistics_are_states():
    model = _model(
        "(float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) { y = BatchNormalization(x, s, b, m, v) }",
        s=_normal(3), b=_normal(3), m=_normal(3), v=np.abs(_normal(3)),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("s", "b")
    assert graph.states == ("m", "v")
    assert set(graph.frozen.values()) == {"running statistic of batch normalization"}


def test_constants_by_their_place_and_numbers():
    """Masks, triangles, one-element factors, initial states, tables of angles."""
    causal = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    model = _model(
        """(float[N, 4] x, float[S, B, 4] q) => (float[N, 4] y, float[S, 1, B, 3] r)
        { a = Add(x, mask) b = MatMul(a, triangle) c = Div(b, scale) y = MatMul(c, w)
          r = GRU<hidden_size = 3>(q, gw, gr, gb, , h0) }""",
        mask=causal, triangle=np.tril(np.ones((4, 4), np.float32)), scale=_normal(1), w=_normal(4, 4),
        gw=_normal(1, 9, 4), gr=_normal(1, 9, 3), gb=_normal(1, 18), h0=np.zeros((1, 2, 3), np.float32),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("w", "gw", "gr", "gb")
    assert graph.frozen == {
        "mask": "a mask", "triangle": "a mask", "scale": "a one-element constant of the arithmetic",
        "h0": "an initial state of zeros",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types_train(dtype: type):
    kind = {np.float16: "float16", np.float64: "double"}[dtype]
    model = _model(f"({kind}[N, 4] x) => ({kind}[N, 2] y) {{ y = MatMul(x, w) }}", w=_normal(4, 2, dtype=dtype))
    assert make_training_graph(model).weights == ("w",)


def test_weights_wherever_they_are_stored():
    """As Constant nodes, listed as inputs, in branches, read by loop bodies; none inside of functions."""
    model = parser.parse_model(
        """<ir_version: 3, opset_import: ["" : 17, "own" : 1]>
        g (float[N, 2] x, bool c, float[2, 2] listed) => (float[N, 2] y)
        <float[2, 2] listed = {1.0, 2.0, 3.0, 4.0}, float[2] outer = {5.0, 6.0}, int64 times = {2}>
        {
            k = Constant<value = float[2] {1.5, 2.5}>()
            h = MatMul(x, listed)
            i = If(c) <
                then_branch = t () => (float[N, 2] a)
                { inner = Constant<value = float[2] {7.0, 8.0}>() a = Add(h, inner) },
                else_branch = e () => (float[N, 2] d) <float[2] stored = {9.0, 3.0}> { d = Mul(h, stored) }
            >
            l = Loop(times, c, i) <body = b (int64 step, bool go, float[N, 2] s) => (bool on, float[N, 2] n)
                { on = Identity(go) n = Mul(s, outer) }>
            m = own.f(l)
            y = Add(m, k)
        }
        <domain: "own", opset_import: ["" : 17]> f (a) => (b)
        { w = Constant<value = float[2] {4.0, 1.0}>() b = Mul(a, w) }
        """
    )
    graph = make_training_graph(model)
    assert set(graph.weights) == {"k", "listed", "inner", "stored", "outer"}
    assert list(graph.frozen.values()) == ["a constant inside of an ONNX function"]


def test_equal_names_in_branches_are_not_guessed():
    """Two tensors of one name cannot both be written back under it."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x, bool c) => (float[N, 2] y)
        {
            y = If(c) <
                then_branch = t () => (float[N, 2] a) <float[2] w = {7.0, 1.0}> { a = Add(x, w) },
                else_branch = e () => (float[N, 2] b) <float[2] w = {8.0, 1.0}> { b = Add(x, w) }
            >
        }"""
    )
    graph = make_training_graph(model)
    assert graph.weights == ()
    assert graph.frozen["w"] == "its name stands for several tensors of nested graphs"


def test_old_torch_exports():
    """torch's older exporter keeps names: rank-0 and one-element parameters train, buffers and constants do not."""
    model = _model(
        """(float[N, 4] x) => (float[N, 4] y)
        { k = Constant<value = float[4] {1.0, 2.0, 3.0, 4.0}>()
          a = Mul(x, logit_scale) b = Div(a, temperature) c = Add(b, k) d = Mul(c, attn__mask) y = Sub(d, h0) }""",
        producer="pytorch", logit_scale=np.float32(2.0), temperature=np.float32([3.0]), attn__mask=_normal(4),
        h0=_normal(4),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("logit_scale", "temperature", "h0")
    assert graph.frozen == {"attn.mask": "a buffer by its name", "k": "a Constant node of torch's exporter"}
