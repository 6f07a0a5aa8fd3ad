"""RNN, GRU and LSTM equal torch's modules and onnxruntime in every configuration; gradients by finite differences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
ACTIVATIONS = {"RNN": 1, "GRU": 2, "LSTM": 3}
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
TIME, BATCH, INPUT, HIDDEN = 4, 2, 2, 2


def _inputs(
    kind: str, direction: str, absent: tuple[str, ...] = (), dtype: Any = np.float32, lengths: Any = None
) -> dict[str, Any]:
    """All inputs in layout 0, some left out."""
    random = np.random.default_rng(0)
    d, g = DIRECTIONS[direction], GATES[kind]
    shapes = {
        "X": (TIME, BATCH, INPUT),
        "W": (d, g * HIDDEN, INPUT),
        "R": (d, g * HIDDEN, HIDDEN),
        "B": (d, 2 * g * HIDDEN),
        "sequence_lens": (),
        "initial_h": (d, BATCH, HIDDEN),
    }
    if kind == "LSTM":
        shapes |= {"initial_c": (d, BATCH, HIDDEN), "P": (d, 3 * HIDDEN)}
    values: dict[str, Any] = {name: random.uniform(-0.8, 0.8, shape).astype(dtype) for name, shape in shapes.items()}
    values["sequence_lens"] = None if lengths is None else np.array(lengths, np.int32)
    return {name: None if name in absent else value for name, value in values.items()}


def _model(kind: str, inputs: dict[str, Any], attributes: dict[str, Any], opset: int = 22) -> onnx.ModelProto:
    outputs = 3 if kind == "LSTM" else 2
    return make_model(kind, inputs, {"hidden_size": HIDDEN, **attributes}, opset, outputs)


def _given(inputs: dict[str, Any]) -> list[Any]:
    return [value for value in inputs.values() if value is not None]


def _check(kind: str, inputs: dict[str, Any], attributes: dict[str, Any], opset: int = 22) -> None:
    check_against_onnxruntime(_model(kind, inputs, attributes, opset), *_given(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [None, [4, 2]])
@pytest.mark.parametrize("direction", list(DIRECTIONS))
@pytest.mark.parametrize("kind", list(GATES))
def test_plain_configurations_equal_onnxruntime(kind: str, direction: str, lengths: Any) -> None:
    """With and without biases, initial states and lengths; torch's fused kernels do these."""
    for absent in (("P",), ("P", "B"), ("P", "initial_h"), ("P", "B", "initial_h", "initial_c")):
        inputs = _inputs(kind, direction, absent, lengths=lengths)
        for opset in (7, 14, 22):
            _check(kind, inputs, {"direction": direction}, opset)
        if kind == "GRU":
            _check(kind, inputs, {"direction": direction, "linear_before_reset": 1})


@pytest.mark.parametrize("direction", list(DIRECTIONS))
@pytest.mark.parametrize("kind", list(GATES))
def test_layout_1_is_layout_0_transposed(kind: str, direction: str) -> None:
    """onnxruntime has no layout 1; the standard says only where the batch axis goes."""
    inputs = _inputs(kind, direction, ("P",))
    expected = run(_model(kind, inputs, {"direction": direction}), *_given(inputs))
    turned = {
        name: value.swapaxes(0, 1) if name in ("X", "initial_h", "initial_c") and value is not None else value
        for name, value in inputs.items()
    }
    actual = run(_model(kind, turned, {"direction": direction, "layout": 1}), *_given(turned))
    torch.testing.assert_close(actual[0], expected[0].permute(2, 0, 1, 3))
    for left, right in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(left, right.transpose(0, 1))


@pytest.mark.parametrize(
    ("names", "alpha", "beta"),
    [
        (["Relu", "Tanh", "Sigmoid"], None, None),
        (["LeakyRelu", "Softsign", "Softplus"], [0.2], None),
        (["HardSigmoid", "ScaledTanh", "Affine"], [0.3, 1.2, 0.8], [0.4, 0.7, 0.1]),
        (["HardSigmoid", "Elu", "ThresholdedRelu"], [0.2, 0.9, 0.3], [0.5]),
        (["HardSigmoid", "LeakyRelu", "Elu"], None, None),
    ],
)
@pytest.mark.parametrize("kind", list(GATES))
def test_activations_equal_onnxruntime(kind: str, names: list[str], alpha: Any, beta: Any) -> None:
    for direction, count in DIRECTIONS.items():
        chosen = (names[: ACTIVATIONS[kind]]) * count
        attributes: dict[str, Any] = {"direction": direction, "activations": chosen}
        takes_alpha = ("LeakyRelu", "HardSigmoid", "ScaledTanh", "Affine", "Elu", "ThresholdedRelu")
        takes_beta = ("HardSigmoid", "ScaledTanh", "Affine")
        if alpha:
            attributes["activation_alpha"] = alpha[: sum(n in takes_alpha for n in names[: ACTIVATIONS[kind]])] * count
        if beta:
            attributes["activation_beta"] = beta[: sum(n in takes_beta for n in names[: ACTIVATIONS[kind]])] * count
        attributes = {name: value for name, value in attributes.items() if value}
        _check(kind, _inputs(kind, direction, ("P",)), attributes)


@pytest.mark.parametrize("direction", list(DIRECTIONS))
def test_peepholes_clip_and_coupled_gates_equal_onnxruntime(direction: str) -> None:
    for clip, coupled, lengths in itertools.product((None, 0.3), (0, 1), (None, [4, 2])):
        attributes = {"direction": direction, "input_forget": coupled} | ({"clip": clip} if clip else {})
        _check("LSTM", _inputs("LSTM", direction, lengths=lengths), attributes)
        without = _inputs("LSTM", direction, ("P",), lengths=lengths)
        _check("LSTM", without, attributes)


@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_clip_equals_onnxruntime(kind: str) -> None:
    for direction, lbr in itertools.product(DIRECTIONS, (0, 1)):
        attributes = {"direction": direction, "clip": 0.3} | ({"linear_before_reset": lbr} if kind == "GRU" else {})
        _check(kind, _inputs(kind, direction), attributes)


@pytest.mark.parametrize("direction", list(DIRECTIONS))
@pytest.mark.parametrize("kind", list(GATES))
def test_gradients(kind: str, direction: str) -> None:
    """Fused and written out, with lengths and without, through every output."""
    configurations: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"absent": ("P",)}, {}),
        ({"absent": ("P",), "lengths": [4, 2]}, {"layout": 0}),
        ({}, {"clip": 5.0}),
    ]
    if kind == "GRU":
        configurations.append(({"lengths": [4, 2]}, {"linear_before_reset": 1}))
    for chosen, attributes in configurations:
        inputs = _inputs(kind, direction, dtype=float, **chosen)
        model = _model(kind, inputs, {"direction": direction, **attributes})
        check_gradients(model, *_given(inputs), outputs=range(len(model.graph.output)))


@pytest.mark.parametrize("kind", list(GATES))
def test_fused_and_written_out_agree(kind: str) -> None:
    """A clip beyond every value forces the loop; the results are those of torch's kernel."""
    inputs = _inputs(kind, "bidirectional", ("P",), dtype=float)
    attributes = {"direction": "bidirectional"} | ({"linear_before_reset": 1} if kind == "GRU" else {})
    fused = run(_model(kind, inputs, attributes), *_given(inputs))
    loop = run(_model(kind, inputs, attributes | {"clip": 100.0}), *_given(inputs))
    for left, right in zip(fused, loop, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("kind", list(GATES))
def test_an_ended_sequence_gives_zeros_and_keeps_its_state(kind: str) -> None:
    """Cutting the input at the length gives the same outputs and states."""
    inputs = _inputs(kind, "bidirectional", ("P",), lengths=[4, 2])
    whole = run(_model(kind, inputs, {"direction": "bidirectional"}), *_given(inputs))
    cut = inputs | {"X": inputs["X"][:2], "sequence_lens": np.array([2, 2], np.int32)}
    short = run(_model(kind, cut, {"direction": "bidirectional"}), *_given(cut))
    torch.testing.assert_close(whole[0][:2, :, 1:], short[0][:, :, 1:])
    assert not whole[0][2:, :, 1:].any()
    torch.testing.assert_close(whole[1][:, 1:], short[1][:, 1:])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"direction": "backward"}, "direction is 'backward'"),
        ({"activations": ["Tanh"]}, "activations has 1 entries; 3 for each of 1 direction"),
        ({"activations": ["Sigmoid", "Tanh", "Swish"]}, "activation 'swish' is not one of the standard's"),
        ({"hidden_size": 7}, "hidden_size is 7, but R of shape"),
        ({"direction": "bidirectional"}, r"W has shape \[1, 8, 2\]"),
    ],
)
def test_bad_values_are_named(attributes: dict[str, Any], message: str) -> None:
    inputs = _inputs("LSTM", "forward", ("P",))
    with pytest.raises(NodeError, match=message):
        run(_model("LSTM", inputs, attributes), *_given(inputs))
