"""Training graphs of recurrent networks and loops over an axis of any length, in stock onnxruntime, against torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from onward.artifacts.training_graph import write_training_graph
from onward.errors import ModelError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.kernels.scanning import scan_steps
from onward.lowering.module import OnnxModule
from tests.artifacts.plain_runtime import call, largest_error, open_session

LENGTHS = (1, 4, 9)
BATCH, INPUT, HIDDEN = 3, 2, 4
HEADER = '<ir_version: 8, opset_import: ["": 17]>'
Weights = Mapping[str, Tensor]
_ZEROS = f"""
        shape = Shape<start=1, end=2>(x)
        before = Constant<value_ints=[1]>()
        after = Constant<value_ints=[{HIDDEN}]>()
        sizes = Concat<axis=0>(before, shape, after)
        zeros = ConstantOfShape(sizes)
"""


@dataclass(frozen=True)
class Recurrence:
    """A loss over x [time, batch, INPUT], in ONNX and in torch.

    Attributes:
        text: the ONNX model, whose output is "loss", without its weights.
        shapes: of the weights.
        loss: the same in torch.
        loops: how often each loop operator is in its training graph.
        features: more inputs.
    """

    text: str
    shapes: Mapping[str, tuple[int, ...]]
    loss: Callable[..., Tensor]
    loops: Mapping[str, int]
    features: tuple[str, ...] = ()

    def model(self, weights: Weights) -> onnx.ModelProto:
        found = onnx.parser.parse_model(self.text)
        found.graph.initializer.extend(numpy_helper.from_array(w.numpy(), name) for name, w in weights.items())
        return found


def _node(
    kind: str, gates: int, options: str = "", directions: int = 1, lengths: bool = False, zeros: bool = False
) -> Recurrence:
    """One of ONNX's recurrent operators; its loss is of all outputs and of the last state. With `zeros` two states
    begin as one tensor, as torch's older exporter writes it.
    """
    extra = ", int32[batch] lengths" if lengths else ""
    more = ", lengths" if lengths else ", , zeros, zeros" if zeros else ""
    text = f"""{HEADER} g (float[time, batch, {INPUT}] x{extra}) => (float loss) {{
        {_ZEROS if zeros else ""}
        all, last = {kind}<hidden_size={HIDDEN}{options}>(x, W, R, B{more})
        waves = Sin(all)
        total = ReduceSum<keepdims=0>(waves)
        end = ReduceSum<keepdims=0>(last)
        loss = Add(total, end)
    }}"""
    rows = gates * HIDDEN
    shapes = {"W": (directions, rows, INPUT), "R": (directions, rows, HIDDEN), "B": (directions, 2 * rows)}
    orders = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}

    def loss(x: Tensor, weights: Weights, lengths: Tensor | None = None) -> Tensor:
        module: nn.RNNBase = getattr(nn, kind)(INPUT, HIDDEN, bidirectional=directions == 2)
        given = {}
        for d, suffix in enumerate(("", "_reverse")[:directions]):
            biases = weights["B"][d].chunk(2)
            for name, tensor in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
                                    (weights["W"][d], weights["R"][d], *biases), strict=True):  # fmt: skip
                parts = tensor.chunk(gates)
                given[f"{name}_l0{suffix}"] = torch.cat([parts[gate] for gate in orders[kind]])
        if lengths is not None:
            x = nn.utils.rnn.pack_padded_sequence(x, lengths.long(), enforce_sorted=False)
        outputs, last = torch.func.functional_call(module, given, (x,))
        outputs = outputs.data if lengths is not None else outputs
        return outputs.sin().sum() + (last[0] if isinstance(last, tuple) else last).sum()

    # Each direction has a loop of its own, and one of its backward pass.
    return Recurrence(text, shapes, loss, {"Scan": 2 * directions}, ("lengths",) if lengths else ())


SHAPES = {"W": (INPUT, HIDDEN), "R": (HIDDEN, HIDDEN), "start": (1, HIDDEN)}


def _by_hand(x: Tensor, weights: Weights, backwards: bool = False) -> Tensor:
    """tanh(x W + h R) step by step; every second of what the steps give counts."""
    state, outputs = weights["start"].expand(x.shape[1], HIDDEN), []
    for step in x.flip(0) if backwards else x:
        state = torch.tanh(step @ weights["W"] + state @ weights["R"])
        outputs.append(state * state)
    stacked = torch.stack(outputs[::-1] if backwards else outputs)
    return (stacked * torch.arange(len(x))[:, None, None]).sum() + state.sum()


_START = """
        shape = Shape(x)
        one = Constant<value_ints=[1]>()
        two = Constant<value_ints=[2]>()
        batches = Slice(shape, one, two)
        width = Constant<value_ints=[4]>()
        sizes = Concat<axis=0>(batches, width)
        first = Expand(start, sizes)
        zero = Constant<value_int=0>()
        unit = Constant<value_int=1>()
        time = Gather(shape, zero)
        places = Range(zero, time, unit)
"""
_END = """
        numbers = Cast<to=1>(places)
        axes = Constant<value_ints=[1, 2]>()
        column = Unsqueeze(numbers, axes)
        weighed = Mul(squares, column)
        total = ReduceSum<keepdims=0>(weighed)
        last = ReduceSum<keepdims=0>(state)
        loss = Add(total, last)
    }"""
LOOP = f"""{HEADER} g (float[time, batch, {INPUT}] x) => (float loss) {{ {_START}
        going = Constant<value=bool {{1}}>()
        state, squares = Loop<body = steps (int64 i, bool on, float[batch, 4] h) =>
            (bool still, float[batch, 4] next, float[batch, 4] square) {{
            still = Identity(on)
            now = Gather(x, i)
            a = MatMul(now, W)
            b = MatMul(h, R)
            c = Add(a, b)
            next = Tanh(c)
            square = Mul(next, next)
        }}>(time, going, first) {_END}"""
SCAN = f"""{HEADER} g (float[time, batch, {INPUT}] x) => (float loss) {{ {_START}
        state, squares = Scan<num_scan_inputs=1, scan_input_directions=[WAY], scan_output_directions=[WAY],
            body = steps (float[batch, 4] h, float[batch, 2] now) => (float[batch, 4] next, float[batch, 4] square) {{
            a = MatMul(now, W)
            b = MatMul(h, R)
            c = Add(a, b)
            next = Tanh(c)
            square = Mul(next, next)
        }}>(first, x) {_END}"""

RECURRENCES = {
    "lstm": _node("LSTM", 4, zeros=True),
    "lstm_lengths": _node("LSTM", 4, ', direction="bidirectional"', directions=2, lengths=True),
    "gru": _node("GRU", 3, ", linear_before_reset=1"),
    "rnn": _node("RNN", 1),
    "loop": Recurrence(LOOP, SHAPES, _by_hand, {"Scan": 2}),
    "scan": Recurrence(SCAN.replace("WAY", "0"), SHAPES, _by_hand, {"Scan": 2}),
    "scan_backwards": Recurrence(
        SCAN.replace("WAY", "1"), SHAPES, lambda x, weights: _by_hand(x, weights, backwards=True), {"Scan": 2}
    ),
}


def _written(recurrence: Recurrence, weights: Weights, path: Path) -> None:
    graph = make_training_graph(recurrence.model(weights), loss=LossSpec(type="output", prediction="loss"))
    assert graph.loss is not None
    assert set(graph.weights) == set(weights)
    write_training_graph(OnnxModule(graph, (graph.loss,)).train(), path)


SLOW = ("rnn", "scan", "scan_backwards")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RECURRENCES]
)
def test_gradients_equal_those_of_torch_at_any_length(name: str, tmp_path: Path) -> None:
    recurrence = RECURRENCES[name]
    torch.manual_seed(1)
    weights = {weight: torch.randn(shape) * 0.5 for weight, shape in recurrence.shapes.items()}
    _written(recurrence, weights, tmp_path / "training.onnx")
    model = onnx.load(tmp_path / "training.onnx")
    onnx.checker.check_model(model, full_check=True)
    kinds = Counter(node.op_type for node in model.graph.node)
    assert {kind: kinds[kind] for kind in ("Loop", "Scan") if kinds[kind]} == recurrence.loops
    session = open_session(tmp_path / "training.onnx")
    for length in LENGTHS:
        x = torch.randn(length, BATCH, INPUT)
        more = {"lengths": torch.tensor([length, max(length - 2, 1), 1], dtype=torch.int32)}
        more = {feature: more[feature] for feature in recurrence.features}
        leaves = {weight: tensor.clone().requires_grad_() for weight, tensor in weights.items()}
        loss = recurrence.loss(x, leaves, **more)
        loss.backward()
        results = call(session, {"x": x, **more})
        assert float(results["loss"]) == pytest.approx(loss.item(), rel=1e-5)
        for weight, leaf in leaves.items():
            assert leaf.grad is not None
            assert largest_error(results[f"{weight}_grad"], leaf.grad) < 1e-5, (weight, length)


def test_a_loop_that_ends_by_its_data_is_refused(tmp_path: Path) -> None:
    """Its rounds depend on the values: no training graph has a backward pass of as many."""
    text = LOOP.replace("still = Identity(on)", "s = ReduceSum<keepdims=0>(h)\n still = Less(s, limit)")
    text = text.replace("=> (float loss) {", "=> (float loss) { limit = Constant<value_float=9.0>()", 1)
    weights = {weight: torch.randn(shape) for weight, shape in SHAPES.items()}
    with pytest.raises(ModelError, match="computes shapes or control flow from its data"):
        _written(Recurrence(text, SHAPES, _by_hand, {}), weights, tmp_path / "training.onnx")


def test_second_derivatives_are_refused() -> None:
    """The states before each step are kept as numbers, through which none would flow."""
    x, start = torch.randn(5, 2, requires_grad=True), torch.randn(2, requires_grad=True)

    def step(states: tuple[Tensor, ...], now: tuple[Tensor, ...], _: Any) -> tuple[Any, Any]:
        following = torch.tanh(states[0] + now[0])
        return (following,), (following * following,)

    (end,), (outputs,) = scan_steps(step, (start,), (x,), ())
    with pytest.raises(RuntimeError, match="of Scan has no second derivative"):
        torch.autograd.grad(end.sum() + outputs.sum(), start, create_graph=True)
