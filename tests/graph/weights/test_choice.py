"""Which initializers train and why the others do not: patterns, immutable constants, evidence, gradients' reach."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onward.errors import ModelError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from tests.graph.weights.models_in_text import model_of, normal, two_layers


def test_all_weights_train_by_default():
    graph = make_training_graph(two_layers())
    assert graph.weights == ("first.weight", "first.bias", "second.weight", "second.bias")
    assert graph.frozen == {"half": "a rank-0 constant"}


def test_patterns():
    graph = make_training_graph(two_layers(), weights_to_train=["second.*"], weights_not_to_train=["*.bias"])
    assert graph.weights == ("second.weight",)
    assert graph.frozen == {
        "first.weight": "not listed in weights_to_train",
        "first.bias": "listed in weights_not_to_train",
        "half": "not listed in weights_to_train",
        "second.bias": "listed in weights_not_to_train",
    }
    with pytest.raises(
        ModelError, match=r"training.weights_to_train: 'secnd\.\*' matches none of the model's 5 float.*mean 'second"
    ):
        make_training_graph(two_layers(), weights_to_train=["secnd.*"])
    with pytest.raises(ModelError, match=r"'norm\*' matches none .* They are .*first.* `onward inspect` lists them\.$"):
        make_training_graph(two_layers(), weights_not_to_train=["norm*"])


def test_an_exact_name_overrules_the_evidence():
    """A pattern leaves constants alone; a name that is spelled out means it."""
    assert "half" not in make_training_graph(two_layers(), weights_to_train=["*"]).weights
    assert make_training_graph(two_layers(), weights_to_train=["half"]).weights == ("half",)


def test_only_what_the_loss_reads_trains():
    """With a loss, a second head is frozen."""
    model = model_of(
        "(float[N, 4] x) => (float[N, 2] a, float[N, 2] b) { a = MatMul(x, u) b = MatMul(x, v) }",
        u=normal(4, 2), v=normal(4, 2),
    )  # fmt: skip
    graph = make_training_graph(model, loss=LossSpec(type="mean_squared_error", prediction="a", label="t"))
    assert graph.weights == ("u",)
    assert graph.frozen["v"] == "no gradient reaches it"


def test_running_statistics_are_states():
    model = model_of(
        "(float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) { y = BatchNormalization(x, s, b, m, v) }",
        s=normal(3), b=normal(3), m=normal(3), v=np.abs(normal(3)),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("s", "b")
    assert graph.states == ("m", "v")
    assert set(graph.frozen.values()) == {"running statistic of batch normalization"}


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types_train(dtype: type):
    kind = {np.float16: "float16", np.float64: "double"}[dtype]
    model = model_of(f"({kind}[N, 4] x) => ({kind}[N, 2] y) {{ y = MatMul(x, w) }}", w=normal(4, 2, dtype=dtype))
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


def test_weights_of_a_file_full_of_holes_are_not_read_to_choose_them(tmp_path: Path) -> None:
    """4 GiB of zeros, of which a look into each tensor is enough: all of them would take many seconds of CPU time."""
    side = 2**14
    names = ("embed", "a", "b", "head")
    text = f"""<ir_version: 10, opset_import: ["" : 20]> agraph (int64[B] x) => (float[B,{side}] y)
        <float[{side},{side}] embed, float[{side},{side}] a, float[{side},{side}] b, float[{side},{side}] head>
        {{ h = Gather(embed, x) i = MatMul(h, a) j = MatMul(i, b) y = MatMul(j, head) }}"""
    proto = parser.parse_model(text)
    for place, name in enumerate(names):
        tensor = proto.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=[side, side])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "m.data"), ("offset", place * side**2 * 4), ("length", side**2 * 4)):
            tensor.external_data.add(key=key, value=str(value))
    with (tmp_path / "m.data").open("wb") as file:
        file.truncate(len(names) * side**2 * 4)
    onnx.save(proto, tmp_path / "m.onnx")
    begin = time.process_time()
    assert make_training_graph(tmp_path / "m.onnx").weights == names
    assert time.process_time() - begin < 2
