"""A loss that applies a softmax or a sigmoid starts before the model's own: gradients are torch's on the logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper

from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.mlp import build_mlp, data, start, weights, weights_of

CE, BCE = "softmax_cross_entropy", "binary_cross_entropy"
SAMPLES, FEATURES, CLASSES = 5, 6, 4
RNG = np.random.default_rng(3)
SCALE = 4.0  # far enough from zero that squashing twice is another gradient by far
TENSORS = {
    "w": (RNG.normal(size=(FEATURES, CLASSES)) * SCALE).astype(np.float32),
    "b": RNG.normal(size=CLASSES).astype(np.float32),
}
X = torch.from_numpy(RNG.normal(size=(SAMPLES, FEATURES)).astype(np.float32))
LABELS = torch.from_numpy(RNG.integers(0, CLASSES, SAMPLES))
YES_OR_NO = torch.from_numpy(RNG.integers(0, 2, (SAMPLES, CLASSES)).astype(np.float32))

SOFTMAX_HEADS = {
    "softmax": (13, "p = Softmax <axis = -1> (z)"),
    "softmax of opset 11": (11, "p = Softmax (z)"),
    "log-softmax": (17, "p = LogSoftmax (z)"),
    "log of a softmax": (17, "s = Softmax <axis = 1> (z) p = Log (s)"),
    "exponential of a log-softmax": (17, "s = LogSoftmax (z) p = Exp (s)"),
    "identity": (17, "s = Softmax (z) i = Identity (s) p = Identity (i)"),
    "reshape": (17, "shape = Constant <value_ints = [-1, 4]> () s = Softmax (z) p = Reshape (s, shape)"),
    "squeeze": (
        17,
        "axes = Constant <value_ints = [2]> () u = Unsqueeze (z, axes) s = Softmax <axis = 1> (u) "
        "p = Squeeze (s, axes)",
    ),
    "squeeze of opset 11": (11, "u = Unsqueeze <axes = [2]> (z) s = Softmax <axis = 1> (u) "
                                "p = Squeeze <axes = [2]> (s)"),
    "flatten": (17, "axes = Constant <value_ints = [2]> () u = Unsqueeze (z, axes) s = Softmax <axis = 1> (u) "
                    "p = Flatten (s)"),
    "transpose": (17, "t = Transpose <perm = [1, 0]> (z) s = Softmax <axis = 0> (t) p = Transpose <perm = [1, 0]> (s)"),
    "casts": (17, "h = Cast <to = 11> (z) s = Softmax (h) p = Cast <to = 1> (s)"),
    "written out": (
        13,
        "axes = Constant <value_ints = [-1]> () m = ReduceMax <axes = [-1]> (z) d = Sub (z, m) e = Exp (d) "
        "total = ReduceSum (e, axes) p = Div (e, total)",
    ),
    # As converters from JAX and TensorFlow write it: the axis is dropped, and comes back by Reshape and Expand.
    "written out without the axis": (
        15,
        "axes = Constant <value_ints = [1]> () m = ReduceMax <axes = [1], keepdims = 0> (z) "
        "low = Constant <value = float {-1e38}> () floor = Max (m, low) shape = Constant <value_ints = [-1, 1]> () "
        "ones = Constant <value_ints = [1, 1]> () r = Reshape (floor, shape) x2 = Expand (r, ones) d = Sub (z, x2) "
        "e = Exp (d) total = ReduceSum <keepdims = 0> (e, axes) t = Reshape (total, shape) x3 = Expand (t, ones) "
        "p = Div (e, x3)",
    ),
    "written out, the axis unsqueezed and expanded": (
        15,
        "axes = Constant <value_ints = [1]> () e = Exp (z) total = ReduceSum <keepdims = 0> (e, axes) "
        "t = Unsqueeze (total, axes) full = Shape (z) x3 = Expand (t, full) p = Div (e, x3)",
    ),
    "quantized and back": (
        17,
        "qs = Constant <value = float {0.00392}> () qz = Constant <value = uint8 {0}> () s = Softmax (z) "
        "q = QuantizeLinear (s, qs, qz) p = DequantizeLinear (q, qs, qz)",
    ),
    "side branch": (17, "p = Softmax (z) top = ArgMax <axis = 1> (p) unused = ReduceMax (p)"),
}  # fmt: skip
SOFTMAX_LOGARITHMS = {
    "clipped": (17, "low = Constant <value = float {1e-30}> () s = Softmax (z) p = Clip (s, low)"),
    "mean of two": (17, "s = Softmax (z) p = Mean (s, s)"),
    "divided by its sum": (
        17, "axes = Constant <value_ints = [1]> () s = Softplus (z) total = ReduceSum (s, axes) p = Div (s, total)"
    ),
    "in an if": (
        17,
        "yes = Constant <value = bool {1}> () p = If (yes) "
        "<then_branch = one () => (float[n, 4] a) { a = Softmax (z) }, "
        "else_branch = two () => (float[n, 4] c) { c = Softmax (z) }>",
    ),
}  # fmt: skip


def _model(head: str, opset: int, output: str = "p", shape: str = "n, 4") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3]> net (float[n, 6] x) => (float[{shape}] '
        f"{output}) {{ z = Gemm (x, w, b) {head} }}".replace(") ", ")\n")
    )
    for number, node in enumerate(model.graph.node):
        node.name = f"node_{number}"
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in TENSORS.items())
    return model


def _gradients(
    model: onnx.ModelProto, spec: LossSpec, labels: torch.Tensor, **options: bool
) -> tuple[float, dict[str, torch.Tensor], tuple[str, ...]]:
    graph = make_training_graph(model, loss=spec, count_correct=True, **options)
    names = graph.loss_names
    assert names is not None
    net = OnnxModule(graph, (names.loss, *(name for name in (names.correct, names.counted) if name)))
    results = net(X, labels)
    loss = results[0] if isinstance(results, tuple) else results
    loss.backward()
    return float(loss.detach()), {name: weight.grad for name, weight in net.weights.items()}, graph.notes


def _reference(loss) -> tuple[float, dict[str, torch.Tensor]]:  # type: ignore[no-untyped-def]
    w, b = (torch.from_numpy(TENSORS[name].copy()).double().requires_grad_() for name in ("w", "b"))
    value = loss(X.double() @ w + b)
    value.backward()
    return float(value.detach()), {"w": w.grad.float(), "b": b.grad.float()}


def _assert_same(actual: tuple, expected: tuple, bound: float = 2e-6) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=bound)
    assert set(actual[1]) == {"w", "b"}
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=bound, atol=bound)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", SOFTMAX_HEADS)
def test_a_cross_entropy_starts_before_the_softmax(name: str, fuse: bool) -> None:
    opset, head = SOFTMAX_HEADS[name]
    spec = LossSpec(type=CE, prediction="p", label="label")
    *actual, notes = _gradients(_model(head, opset), spec, LABELS, fuse=fuse)
    _assert_same(tuple(actual), _reference(lambda z: F.cross_entropy(z, LABELS)))
    (note,) = [note for note in notes if "loss.prediction" in note]
    assert note.startswith("loss.prediction: 'p' is computed by ")
    assert note.endswith("because the loss applies its own softmax. The exported model is unchanged.")


@pytest.mark.parametrize("name", SOFTMAX_LOGARITHMS)
def test_a_cross_entropy_takes_the_logarithm_of_probabilities(name: str) -> None:
    opset, head = SOFTMAX_LOGARITHMS[name]
    *actual, notes = _gradients(_model(head, opset), LossSpec(type=CE, prediction="p", label="label"), LABELS)

    def loss(z: torch.Tensor) -> torch.Tensor:
        positive = F.softplus(z) if name == "divided by its sum" else z.exp()
        return F.nll_loss((positive / positive.sum(1, keepdim=True)).log(), LABELS)

    _assert_same(tuple(actual), _reference(loss), bound=2e-5)
    assert any("is computed from their logarithm. The exported model is unchanged." in note for note in notes)


def test_soft_labels_and_class_weights_start_before_the_softmax() -> None:
    soft = torch.softmax(torch.from_numpy(RNG.normal(size=(SAMPLES, CLASSES)).astype(np.float32)), 1)
    given = [0.5, 1.0, 2.0, 3.0]
    model = _model("p = Softmax (z)", 17)
    spec = LossSpec(type=CE, prediction="p", label="label", dense_labels=True)
    _assert_same(_gradients(model, spec, soft), _reference(lambda z: F.cross_entropy(z, soft.double())))
    spec = LossSpec(type=CE, prediction="p", label="label", class_weights=given)
    wanted = _reference(lambda z: F.cross_entropy(z, LABELS, torch.tensor(given).double()))
    _assert_same(_gradients(model, spec, LABELS), wanted)


@pytest.mark.parametrize("opset", [11, 17])
def test_classes_on_another_axis(opset: int) -> None:
    """A segmentation head: softmax over channels, in opset 11 by turning them to the back and to the front again."""
    sizes = "shape = Constant <value = int64[4] {-1, 2, 2, 1}> () i = Reshape (z, shape)"
    if opset == 11:
        head = (
            "t = Transpose <perm = [0, 2, 3, 1]> (i) s = Softmax <axis = 3> (t) p = Transpose <perm = [0, 3, 1, 2]> (s)"
        )
    else:
        head = "p = Softmax <axis = 1> (i)"
    model = _model(f"{sizes} {head}", opset, shape="n, 2, 2, 1")
    labels = torch.from_numpy(RNG.integers(0, 2, (SAMPLES, 2, 1)))
    actual = _gradients(model, LossSpec(type=CE, prediction="p", label="label", class_axis=1), labels)
    _assert_same(actual, _reference(lambda z: F.cross_entropy(z.reshape(-1, 2, 2, 1), labels)))
    *_, notes = _gradients(model, LossSpec(type=CE, prediction="p", label="label", class_axis=2), labels)
    if opset == 17:
        assert any("over other axes than loss.class_axis (2). Set loss.class_axis" in note for note in notes)


def test_a_softmax_inside_of_the_network_stays() -> None:
    """Attention over the features, not over the classes: the loss is the network's own output's."""
    head = "s = Softmax (z) p = Gemm (s, v)"
    model = _model(head, 17)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32) * 2, "v"))
    loss, gradients, notes = _gradients(model, LossSpec(type=CE, prediction="p", label="label"), LABELS)
    expected, reference = _reference(lambda z: F.cross_entropy(2 * z.softmax(1), LABELS))
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradients["w"], reference["w"], rtol=1e-5, atol=1e-6)
    assert not any("loss.prediction" in note for note in notes)


SIGMOID_HEADS = {
    "sigmoid": "p = Sigmoid (z)",
    "identity": "s = Sigmoid (z) p = Identity (s)",
    "written out": "one = Constant <value = float {1}> () m = Neg (z) e = Exp (m) d = Add (e, one) p = Div (one, d)",
    "reciprocal": "one = Constant <value = float {1}> () m = Neg (z) e = Exp (m) d = Add (one, e) p = Reciprocal (d)",
    "parts": (
        "sizes = Constant <value_ints = [1, 3]> () l, r = Split <axis = 1> (z, sizes) a = Sigmoid (l) c = Sigmoid (r) "
        "p = Concat <axis = 1> (a, c)"
    ),
}


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("name", SIGMOID_HEADS)
def test_a_binary_cross_entropy_starts_before_the_sigmoid(name: str, from_logits: bool) -> None:
    *actual, notes = _gradients(
        _model(SIGMOID_HEADS[name], 17),
        LossSpec(type=BCE, prediction="p", label="label", from_logits=from_logits),
        YES_OR_NO,
    )
    wanted = _reference(lambda z: F.binary_cross_entropy_with_logits(z, YES_OR_NO.double()))
    _assert_same(tuple(actual), wanted)
    why = "because the loss applies its own sigmoid" if from_logits else "because it is more accurate"
    assert any("is computed by " in note and why in note for note in notes)


def test_far_from_zero_a_sigmoid_keeps_its_gradient() -> None:
    """At a logit of 200 the sigmoid is 1, and the gradient through it is 0; before it, it is as it should be."""
    model = _model("k = Constant <value = float {50}> () f = Mul (z, k) p = Sigmoid (f)", 17)
    actual = _gradients(model, LossSpec(type=BCE, prediction="p", label="label"), YES_OR_NO)
    wanted = _reference(lambda z: F.binary_cross_entropy_with_logits(50 * z, YES_OR_NO.double()))
    _assert_same(actual, wanted, bound=1e-5)
    assert wanted[1]["w"].abs().max() > 1


def test_what_is_no_fit_is_said() -> None:
    spec = LossSpec(type=BCE, prediction="p", label="label", from_logits=True)
    *actual, notes = _gradients(_model("p = Softmax (z)", 17), spec, YES_OR_NO)
    expected, _ = _reference(lambda z: F.binary_cross_entropy(z.float().softmax(1), YES_OR_NO))
    assert actual[0] == pytest.approx(expected, rel=1e-5)
    assert any("'p' holds probabilities already, so loss.from_logits is ignored. Set loss.from_logits: false" in n
               for n in notes)  # fmt: skip
    graph = make_training_graph(_model("p = Identity (z)", 17), loss=LossSpec(type=BCE, prediction="p", label="label"))
    assert any("is the output of Gemm 'node_0', which is not limited to 0 to 1" in note for note in graph.notes)
    graph = make_training_graph(_model("p = Sigmoid (z)", 17), loss=LossSpec(type=CE, prediction="p", label="label"))
    assert any("for one class per sample set loss.prediction: z." in note for note in graph.notes)


def test_the_prediction_may_be_an_inner_value() -> None:
    model = _model("p = Relu (z)", 17)
    for type_, labels, reference in (
        (CE, LABELS, F.cross_entropy),
        ("mean_squared_error", YES_OR_NO, lambda z, y: F.mse_loss(z, y.double())),
    ):
        actual = _gradients(model, LossSpec(type=type_, prediction="z", label="label"), labels)  # type: ignore[arg-type]
        _assert_same(actual, _reference(lambda z, f=reference, y=labels: f(z, y)))
    with pytest.raises(
        ModelError, match=r"loss\.prediction is 'zz', which is no output of the model, nor another value"
    ):
        make_training_graph(model, loss=LossSpec(type=CE, prediction="zz", label="label"))


def test_a_map_of_probabilities_stands_for_them() -> None:
    head = "p = Softmax (z) maps = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2, 3]> (p)"
    graph = make_training_graph(_model(head, 17), loss=LossSpec(type=CE, prediction="maps", label="label"))
    assert any("'maps' is computed by Softmax 'node_1'; the loss is computed from" in note for note in graph.notes)
    assert graph.weights == ("w", "b")


def test_a_run_on_a_softmax_is_the_run_on_its_logits(tmp_path: Path) -> None:
    """Loss, weights and accuracy are those of the model without a softmax; the exported model keeps its own."""
    plain, squashed = tmp_path / "plain", tmp_path / "squashed"
    for folder in (plain, squashed):
        folder.mkdir()
        model = build_mlp()
        if folder is squashed:
            model.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["probabilities"], name="squash"))
            model.graph.output[0].name = "probabilities"
        onnx.save(model, folder / "mlp.onnx")
    results = []
    for folder, output in ((plain, "logits"), (squashed, "probabilities")):
        loss = {"type": CE, "prediction": output, "label": "label"}
        runner, _ = start(folder, loss=loss, paths={"output_dir": folder / "out"})
        runner.run(InMemoryDataLoader(data(32)), InMemoryDataLoader(data(11, seed=1)))
        report = runner.end_training(InMemoryDataLoader(data(11, seed=1)))
        assert report is not None
        results.append((weights_of(runner), report.metrics))
    assert results[0][1] == results[1][1]
    assert "accuracy" in results[0][1]
    for name, tensor in results[0][0].items():
        assert torch.equal(tensor, results[1][0][name])
        assert not np.array_equal(tensor.numpy(), weights()[name])
    trained = onnx.load(squashed / "out" / "mlp_trained.onnx")
    assert trained.graph.node[-1].op_type == "Softmax"
    session = onnxruntime.InferenceSession(squashed / "out" / "mlp_trained.onnx")
    np.testing.assert_allclose(session.run(None, {"x": data(11)["x"]})[0].sum(1), 1, rtol=1e-5)


def test_a_division_by_the_sums_of_other_rows_is_no_softmax() -> None:
    """The sum over classes, its axis dropped and not put back, divides class by class in a square of 4 samples."""
    total = "axes = Constant <value_ints = [1]> () e = Exp (z) total = ReduceSum <keepdims = 0> (e, axes)"
    head = f"{total} p = Div (e, total)"
    model = _model(head, 15, shape="4, 4")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    graph = make_training_graph(model, loss=LossSpec(type=CE, prediction="p", label="label"))
    assert not [note for note in graph.notes if "loss.prediction" in note]
