"""Normalizations equal onnxruntime's and torch's; batch normalization keeps its running statistics by ONNX's rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import onward
from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, normal, run, to_array

RANDOM = np.random.default_rng(0)
_draw = normal(RANDOM)
SHAPES = [(4, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 3, 2)]


def _batch_norm(shape: tuple[int, ...], dtype: Any = np.float32, features: tuple[int, ...] | None = None) -> list[Any]:
    """X, scale, B, mean and variance."""
    features = (shape[1],) if features is None else features
    return [
        _draw(*shape, dtype=dtype),
        *(_draw(*features, dtype=dtype) for _ in range(3)),
        RANDOM.random(features).astype(dtype) + 0.5,
    ]


NEW = ("X", "scale", "B", "input_mean", "input_var")
OLD = ("X", "scale", "B", "mean", "var")


def _owned(inputs: list[Any], attributes: dict[str, Any], opset: int = 15, outputs: int = 1) -> onnx.ModelProto:
    """A model whose scale, bias and running statistics are its own tensors."""
    stored = dict(zip(NEW[1:], inputs[1:], strict=True))
    return make_model("BatchNormalization", {"X": inputs[0], **stored}, attributes, opset, outputs, stored)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_inference_equals_onnxruntime(shape: tuple[int, ...], opset: int) -> None:
    inputs = _batch_norm(shape)
    model = make_model("BatchNormalization", dict(zip(NEW, inputs, strict=True)), {"epsilon": 1e-3}, opset)
    check_against_onnxruntime(model, *inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("opset", [14, 15])
def test_training_mode_of_the_node_equals_onnxruntime(shape: tuple[int, ...], opset: int) -> None:
    """Statistics that are inputs of the graph: the attribute decides, outputs 1 and 2 are the updated statistics."""
    inputs = _batch_norm(shape)
    attributes = {"training_mode": 1, "momentum": 0.7}
    model = make_model("BatchNormalization", dict(zip(NEW, inputs, strict=True)), attributes, opset, 3)
    check_against_onnxruntime(model, *inputs, rtol=1e-4, atol=1e-5)


def test_old_training_mode_is_told_by_the_number_of_outputs() -> None:
    """Version 9 with five outputs: batch statistics, their blend with the running ones, and they themselves."""
    X, scale, B, mean, var = inputs = _batch_norm((4, 3, 5))
    for opset in (7, 9):
        model = make_model("BatchNormalization", dict(zip(OLD, inputs, strict=True)), {"momentum": 0.7}, opset, 5)
        Y, new_mean, new_var, saved_mean, saved_var = map(to_array, run(model, *inputs))
        batch_mean, batch_var = X.mean((0, 2)), X.var((0, 2))
        wanted = (X - batch_mean[:, None]) / np.sqrt(batch_var + 1e-5)[:, None] * scale[:, None] + B[:, None]
        np.testing.assert_allclose(Y, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(new_mean, mean * 0.7 + batch_mean * 0.3, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(new_var, var * 0.7 + batch_var * 0.3, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(saved_mean, batch_mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(saved_var, batch_var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [6, 7])
def test_without_spatial_every_element_has_its_statistics(opset: int) -> None:
    X, scale, B, mean, var = inputs = _batch_norm((4, 3, 5), features=(3, 5))
    attributes = {"spatial": 0} | ({"is_test": 1} if opset == 6 else {})
    model = make_model("BatchNormalization", dict(zip(OLD, inputs, strict=True)), attributes, opset)
    wanted = (X - mean) / np.sqrt(var + 1e-5) * scale + B
    np.testing.assert_allclose(to_array(run(model, *inputs)), wanted, rtol=1e-4, atol=1e-5)
    stored = dict(zip(OLD[1:], inputs[1:], strict=True))
    net = onward.to_torch(make_model("BatchNormalization", {"X": X, **stored}, attributes, opset, 1, stored)).train()
    wanted = (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5) * scale + B
    np.testing.assert_allclose(to_array(net(torch.from_numpy(X))), wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(net.mean, torch.from_numpy(mean * 0.9 + X.mean(0) * 0.1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attribute", [0, 1])
@pytest.mark.parametrize("opset", [9, 14, 15])
def test_running_statistics_follow_torch_with_its_momentum_and_variance_converted(opset: int, attribute: int) -> None:
    """Five steps of torch.nn.BatchNorm2d, whose momentum is 1 - ONNX's and whose variance is the unbiased one."""
    inputs = _batch_norm((4, 3, 5, 2))
    attributes = {"momentum": 0.8} | ({"training_mode": attribute} if opset >= 14 else {})
    net = onward.to_torch(_owned(inputs, attributes, opset))
    original = torch.nn.BatchNorm2d(3, momentum=0.2).double()
    with torch.no_grad():
        for place, value in zip(
            (original.weight, original.bias, original.running_mean, original.running_var), inputs[1:], strict=True
        ):
            place.copy_(torch.from_numpy(value))
    net.train()
    count = 4 * 5 * 2
    variance = original.running_var.clone()
    for step in range(5):
        x = torch.from_numpy(_draw(4, 3, 5, 2)) * (step + 1)
        before = original.running_var.clone()
        expected = original(x.double())
        torch.testing.assert_close(net(x), expected.float(), rtol=1e-4, atol=1e-5)
        unbiased = (original.running_var - 0.8 * before) / 0.2
        variance = 0.8 * variance + 0.2 * unbiased * (count - 1) / count
        torch.testing.assert_close(net.input_mean.double(), original.running_mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(net.input_var.double(), variance, rtol=1e-6, atol=1e-6)
    net.eval()
    with torch.no_grad():
        original.running_var.copy_(variance)
    original.eval()
    x = torch.from_numpy(_draw(4, 3, 5, 2))
    torch.testing.assert_close(net(x), original(x.double()).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.input_mean.double(), original.running_mean, rtol=1e-6, atol=1e-6)


def test_eval_mode_uses_running_statistics_whatever_the_attribute_says() -> None:
    inputs = _batch_norm((4, 3, 5))
    trained = _owned(inputs, {"training_mode": 1}, outputs=3)
    plain = _owned(inputs, {})
    Y, mean, var = run(trained, inputs[0])
    torch.testing.assert_close(Y, run(plain, inputs[0]))
    torch.testing.assert_close((mean, var), (torch.from_numpy(inputs[3]), torch.from_numpy(inputs[4])))


def test_training_mode_gives_the_updated_statistics_out() -> None:
    inputs = _batch_norm((4, 3, 5))
    net = onward.to_torch(_owned(inputs, {"training_mode": 1}, outputs=3)).train()
    _, mean, var = net(torch.from_numpy(inputs[0]))
    torch.testing.assert_close(mean, net.input_mean)
    torch.testing.assert_close(var, net.input_var)
    wanted = inputs[4] * 0.9 + inputs[0].var((0, 2)) * 0.1
    np.testing.assert_allclose(to_array(var), wanted, rtol=1e-5)


def test_one_value_per_channel_normalizes_to_the_bias() -> None:
    """torch's kernel refuses it; its variance is zero."""
    inputs = _batch_norm((1, 3, 1))
    net = onward.to_torch(_owned(inputs, {})).train()
    Y = net(torch.from_numpy(inputs[0]))
    np.testing.assert_allclose(to_array(Y)[0, :, 0], inputs[2], atol=1e-6)
    np.testing.assert_allclose(to_array(net.input_var), inputs[4] * 0.9, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_low_precision_input_with_float32_statistics(dtype: torch.dtype, training: bool) -> None:
    inputs = _batch_norm((8, 3, 5))
    low = torch.from_numpy(inputs[0]).to(dtype)
    net = onward.to_torch(_owned([low, *inputs[1:]], {})).train(training)
    wide = onward.to_torch(_owned(inputs, {})).train(training)
    result, expected = net(low), wide(low.float())
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(net.input_var, wide.input_var, rtol=1e-5, atol=1e-6)
    result.float().square().sum().backward()
    assert net.weights["scale"].grad is not None
    assert net.weights["scale"].grad.dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_normalization_gradients(shape: tuple[int, ...]) -> None:
    """By running statistics, by the batch's (fused), and by the batch's with statistics given out (written out)."""
    inputs = _batch_norm(shape, dtype=float)
    named = dict(zip(NEW, inputs, strict=True))
    check_gradients(make_model("BatchNormalization", named, {}, 15), *inputs)
    stored = dict(zip(NEW[3:], inputs[3:], strict=True))
    model = make_model("BatchNormalization", {**named}, {}, 15, 1, stored)
    check_gradients(model, *inputs[:3], training=True)
    model = make_model("BatchNormalization", named, {"training_mode": 1}, 15, 3)
    check_gradients(model, *inputs, outputs=(0, 1, 2))


def test_batch_normalization_traces_whole() -> None:
    """torch.compile without a graph break, running statistics updated as in eager mode."""
    inputs = _batch_norm((4, 3, 5))
    eager = onward.to_torch(_owned(inputs, {})).train()
    compiled = onward.to_torch(_owned(inputs, {})).train()
    step = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.from_numpy(_draw(4, 3, 5))
        torch.testing.assert_close(step(x), eager(x))
    torch.testing.assert_close(compiled.input_mean, eager.input_mean)
    torch.testing.assert_close(compiled.input_var, eager.input_var)


@pytest.mark.parametrize("axis", [-1, 1, 2, -3])
def test_layer_normalization_equals_onnxruntime(axis: int) -> None:
    X = _draw(2, 3, 4)
    rest = X.shape[axis % 3 :]
    for scale, bias in ((_draw(*rest), _draw(*rest)), (_draw(*rest), None), (_draw(4), _draw(4))):
        inputs = {"X": X, "Scale": scale, "B": bias}
        given = [v for v in inputs.values() if v is not None]
        if scale.shape == rest:
            model = make_model("LayerNormalization", inputs, {"axis": axis, "epsilon": 1e-3}, 17, 3)
            check_against_onnxruntime(model, *given, rtol=1e-4, atol=1e-5)
        doubled = {name: None if v is None else v.astype(float) for name, v in inputs.items()}
        model = make_model("LayerNormalization", doubled, {"axis": axis, "stash_type": 11}, 17, 3)
        check_gradients(model, *(v.astype(float) for v in given), outputs=(0, 1, 2))


def test_layer_normalization_broadcasts_its_scale() -> None:
    X, scale, bias = _draw(2, 3, 4), _draw(4), _draw(3, 1)
    model = make_model("LayerNormalization", {"X": X, "Scale": scale, "B": bias}, {"axis": 1}, 17)
    expected = ReferenceEvaluator(model).run(None, {"X": X, "Scale": scale, "B": bias})[0]
    np.testing.assert_allclose(to_array(run(model, X, scale, bias)), expected, rtol=1e-4, atol=1e-5)


def test_layer_normalization_of_low_precision_with_float32_parameters() -> None:
    X, scale, bias = torch.randn(2, 8).to(torch.bfloat16), torch.randn(8), torch.randn(8)
    Y, mean, _ = run(make_model("LayerNormalization", {"X": X, "Scale": scale, "B": bias}, {}, 17, 3), X, scale, bias)
    assert Y.dtype == torch.bfloat16
    assert mean.dtype == torch.float32
    expected = torch.nn.functional.layer_norm(X.float(), (8,), scale, bias)
    torch.testing.assert_close(Y.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("axis", [-1, 1, -3])
def test_rms_normalization_equals_torch_and_has_gradients(axis: int) -> None:
    X = _draw(2, 3, 4)
    rest = X.shape[axis % 3 :]
    scale = _draw(*rest)
    attributes = {"axis": axis, "epsilon": 1e-3}
    model = make_model("RMSNormalization", {"X": X, "scale": scale}, attributes, 23)
    expected = torch.nn.functional.rms_norm(torch.from_numpy(X), rest, torch.from_numpy(scale), 1e-3)
    torch.testing.assert_close(run(model, X, scale), expected)
    check_against_onnxruntime(model, X, scale, rtol=1e-4, atol=1e-5)
    for given in (scale, _draw(4)):
        doubled = [X.astype(float), given.astype(float)]
        check_gradients(
            make_model(
                "RMSNormalization",
                dict(zip(("X", "scale"), doubled, strict=True)),
                {**attributes, "stash_type": 11},
                23,
            ),
            *doubled,
        )


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 5), (2, 4, 3, 2), (1, 4, 1)])
def test_group_normalization_of_both_versions(shape: tuple[int, ...]) -> None:
    """Version 21 has a scale for each channel, version 18 for each group."""
    X = _draw(*shape)
    scale, bias = _draw(4), _draw(4)
    t = torch.from_numpy
    new = make_model("GroupNormalization", {"X": X, "scale": scale, "bias": bias}, {"num_groups": 2}, 21)
    expected = torch.group_norm(t(X), 2, t(scale), t(bias))
    torch.testing.assert_close(run(new, X, scale, bias), expected, rtol=1e-5, atol=1e-6)
    old = make_model("GroupNormalization", {"X": X, "scale": scale[:2], "bias": bias[:2]}, {"num_groups": 2}, 18)
    expected = torch.group_norm(t(X), 2, t(scale[:2].repeat(2)), t(bias[:2].repeat(2)))
    torch.testing.assert_close(run(old, X, scale[:2], bias[:2]), expected, rtol=1e-5, atol=1e-6)
    doubled = [a.astype(float) for a in (X, scale, bias)]
    check_gradients(
        make_model(
            "GroupNormalization", dict(zip(("X", "scale", "bias"), doubled, strict=True)), {"num_groups": 2}, 21
        ),
        *doubled,
    )


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 4, 3, 2)])
def test_instance_normalization_equals_onnxruntime(shape: tuple[int, ...]) -> None:
    X, scale, B = _draw(*shape), _draw(4), _draw(4)
    model = make_model("InstanceNormalization", {"input": X, "scale": scale, "B": B}, {"epsilon": 1e-3}, 22)
    check_against_onnxruntime(model, X, scale, B, rtol=1e-4, atol=1e-5)
    doubled = [a.astype(float) for a in (X, scale, B)]
    names = ("input", "scale", "B")
    check_gradients(make_model("InstanceNormalization", dict(zip(names, doubled, strict=True)), {}, 22), *doubled)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_lrn_is_the_formula_of_the_text(size: int) -> None:
    """Even sizes reach further up than down; onnxruntime has odd sizes only, onnx's reference mixes channels."""
    X = _draw(2, 6, 3, 2)
    attributes = {"size": size, "alpha": 0.3, "beta": 0.6, "bias": 1.5}
    model = make_model("LRN", {"X": X}, attributes, 13)
    sums = np.zeros_like(X)
    for c in range(6):
        low, high = max(0, c - (size - 1) // 2), min(5, c + size // 2)
        sums[:, c] = (X[:, low : high + 1] ** 2).sum(1)
    np.testing.assert_allclose(to_array(run(model, X)), X / (1.5 + 0.3 / size * sums) ** 0.6, rtol=1e-5)
    if size % 2:
        check_against_onnxruntime(model, X, rtol=1e-4, atol=1e-6)
    check_gradients(make_model("LRN", {"X": X.astype(float)}, attributes, 13), X.astype(float))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_lp_normalization_equals_onnxruntime(axis: int, p: int) -> None:
    X = _draw(3, 4, 2)
    model = make_model("LpNormalization", {"input": X}, {"axis": axis, "p": p}, 21)
    check_against_onnxruntime(model, X, rtol=1e-5, atol=1e-6)
    check_gradients(
        make_model("LpNormalization", {"input": X.astype(float)}, {"axis": axis, "p": p}, 22), X.astype(float)
    )


def test_a_vector_of_zeros_stays_zero_and_its_gradient_finite() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    for op_type, name in (("LpNormalization", "input"), ("MeanVarianceNormalization", "X")):
        attributes = {"axes": [1]} if name == "X" else {}
        x.grad = None
        y = run(make_model(op_type, {name: x}, attributes, 22), x)
        y.sum().backward()
        assert not y.any()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("axes", [None, [1], [0, 2]])
def test_mean_variance_normalization_equals_onnxruntime(axes: list[int] | None) -> None:
    X = _draw(2, 3, 4, 2)
    attributes = {} if axes is None else {"axes": axes}
    check_against_onnxruntime(
        make_model("MeanVarianceNormalization", {"X": X}, attributes, 13), X, rtol=1e-4, atol=1e-5
    )
    check_gradients(make_model("MeanVarianceNormalization", {"X": X.astype(float)}, attributes, 13), X.astype(float))


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes", "opset", "message"),
    [
        ("LayerNormalization", [(2, 3), (3,)], {"axis": 2}, 17, "axis is 2; an input of rank 2 takes -2 to 1"),
        (
            "GroupNormalization",
            [(2, 4, 3), (4,), (4,)],
            {"num_groups": 3},
            21,
            "num_groups is 3, which does not divide",
        ),
        ("GroupNormalization", [(2, 4, 3), (2,), (2,)], {"num_groups": 2}, 21, "one per channel"),
        ("GroupNormalization", [(2, 4, 3), (4,), (4,)], {"num_groups": 2}, 18, "one per group"),
        ("LpNormalization", [(2, 3)], {"p": 3}, 22, "p is 3; only 1 and 2"),
        ("LRN", [(2, 3, 2)], {"size": 0}, 13, "size is 0"),
    ],
)
def test_bad_values_are_named(
    op_type: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], opset: int, message: str
) -> None:
    inputs = {f"i{index}": _draw(*shape) for index, shape in enumerate(shapes)}
    with pytest.raises(NodeError, match=message):
        run(make_model(op_type, inputs, attributes, opset), *inputs.values())
