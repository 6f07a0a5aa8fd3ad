"""If, Loop and Scan: against Python and onnxruntime, with captured values and gradients through every round."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onward
from onward.errors import NodeError
from tests.one_node import check_gradients, run_onnxruntime, to_array


def parse(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]>\n{text}')


IF = """
choose (bool flag, {real}[n] x, {real}[n] y) => ({real}[m] z)
{{
  z = If (flag) <
    then_branch = yes () => ({real}[a] out) {{ out = Mul (x, y) }},
    else_branch = no () => ({real}[a] out) {{ twice = Add (x, x) out = Concat <axis = 0> (twice, y) }}
  >
}}
"""


@pytest.mark.parametrize("flag", [True, False])
def test_if_takes_one_branch(flag: bool) -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    model = parse(IF.format(real="float"))
    actual = onward.to_torch(model)(torch.tensor(flag), x, y)
    np.testing.assert_array_equal(to_array(actual), run_onnxruntime(model, torch.tensor(flag), x, y)[0])
    check_gradients(parse(IF.format(real="double")), torch.tensor(flag), x.double(), y.double())


def test_if_on_a_shape_compiles_whole() -> None:
    """A condition that comes from a shape is known while tracing: no graph break, one branch in the code."""
    model = parse(
        """
        by_shape (float[n, m] x) => (float[k, l] z)
        {
          shape = Shape <start = 1> (x)
          one = Constant <value_ints = [1]> ()
          equal = Equal (shape, one)
          axes = Constant <value_ints = [0]> ()
          flag = Squeeze (equal, axes)
          z = If (flag) <
            then_branch = yes () => (float[a, b] out) { out = Neg (x) },
            else_branch = no () => (float[a, b] out) { out = Exp (x) }
          >
        }
        """
    )
    net = onward.to_torch(model)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    for x in (torch.randn(2, 1), torch.randn(2, 3)):
        expected = -x if x.shape[1] == 1 else x.exp()
        torch.testing.assert_close(net(x), expected)
        torch.testing.assert_close(compiled(x), expected)


LOOP = """
repeat (int64 count, {real}[2] x, {real}[2] w) => ({real}[2] last, {real}[r, 2] all)
<bool yes = {{1}}>
{{
  last, all = Loop (count, yes, x) <
    body = round (int64 i, bool go, {real}[2] s) => (bool go_on, {real}[2] next, {real}[2] seen)
    {{
      go_on = Identity (go)
      at = Cast <to = {code}> (i)
      shifted = Add (s, at)
      next = Mul (shifted, w)
      seen = Tanh (next)
    }}
  >
}}
"""


@pytest.mark.parametrize("count", [0, 1, 4])
def test_loop_carries_collects_and_captures(count: int) -> None:
    model = parse(LOOP.format(real="float", code=1))
    inputs = (torch.tensor(count), torch.tensor([0.5, -1.0]), torch.tensor([0.9, 1.1]))
    for left, right in zip(onward.to_torch(model)(*inputs), run_onnxruntime(model, *inputs), strict=True):
        np.testing.assert_allclose(to_array(left), right, rtol=1e-6)
        assert to_array(left).shape == right.shape
    if count:
        wide = (inputs[0], inputs[1].double(), inputs[2].double())
        check_gradients(parse(LOOP.format(real="double", code=11)), *wide, outputs=(0, 1))


def test_loop_ends_by_its_own_condition() -> None:
    model = parse(
        """
        halve (float x) => (float y, int64 rounds)
        <bool yes = {1}, int64 none = {0}, int64 step = {1}, float half = {0.5}, float small = {0.1}>
        {
          y, rounds = Loop (, yes, x, none) <
            body = round (int64 i, bool go, float s, int64 n) => (bool go_on, float next, int64 m)
            { next = Mul (s, half) m = Add (n, step) go_on = Greater (next, small) }
          >
        }
        """
    )
    y, rounds = onward.to_torch(model)(torch.tensor(1.0))
    assert (y.item(), rounds.item()) == (0.0625, 4)


def test_loop_carries_a_sequence() -> None:
    model = parse(
        """
        gather (int64 count, double[2] x) => (double[k] y)
        <bool yes = {1}>
        {
          empty = SequenceEmpty <dtype = 11> ()
          seq = Loop (count, yes, empty) <
            body = round (int64 i, bool go, seq(double[2]) s) => (bool go_on, seq(double[2]) t)
            { go_on = Identity (go) at = Cast <to = 11> (i) v = Mul (x, at) t = SequenceInsert (s, v) }
          >
          y = ConcatFromSequence <axis = 0> (seq)
        }
        """
    )
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert onward.to_torch(model)(torch.tensor(3), x).tolist() == [0, 0, 1, 2, 2, 4]
    check_gradients(model, torch.tensor(3), x)


SCAN = """
rnn ({real}[2] h, {real}[{x}] xs, {real}[2, 2] w) => ({real}[2] last, {real}[{y}] ys)
{{
  last, ys = Scan (h, xs) <
    num_scan_inputs = 1, {options}
    body = cell ({real}[2] s, {real}[2] v) => ({real}[2] t, {real}[2] out)
    {{ m = MatMul (s, w) sum = Add (m, v) t = Tanh (sum) out = Mul (t, t) }}
  >
}}
"""
SCANS = {
    "": ("3, 2", "3, 2"),
    "scan_input_directions = [1],": ("3, 2", "3, 2"),
    "scan_output_directions = [1],": ("3, 2", "3, 2"),
    "scan_input_axes = [1], scan_output_axes = [1],": ("2, 3", "2, 3"),
    "scan_input_axes = [-1], scan_output_axes = [-1], scan_input_directions = [1],": ("2, 3", "2, 3"),
}


@pytest.mark.parametrize("options", list(SCANS))
@pytest.mark.parametrize("opset", [9, 11, 16])
def test_scan(options: str, opset: int) -> None:
    if "-1" in options and opset < 11:
        pytest.skip("negative axes from version 11 on")
    x, y = SCANS[options]
    model = parse(SCAN.format(real="float", x=x, y=y, options=options), opset)
    generator = torch.Generator().manual_seed(0)
    shape = tuple(int(size) for size in x.split(","))
    h, xs, w = (torch.randn(s, generator=generator) for s in ((2,), shape, (2, 2)))
    for left, right in zip(onward.to_torch(model)(h, xs, w), run_onnxruntime(model, h, xs, w), strict=True):
        np.testing.assert_allclose(to_array(left), right, rtol=1e-6)
    wide = parse(SCAN.format(real="double", x=x, y=y, options=options), opset)
    check_gradients(wide, h.double(), xs.double(), w.double(), outputs=(0, 1))


def test_scan_of_nothing_keeps_the_state() -> None:
    model = parse(SCAN.format(real="float", x="n, 2", y="n, 2", options=""))
    h = torch.tensor([1.0, 2.0])
    last, ys = onward.to_torch(model)(h, torch.zeros(0, 2), torch.eye(2))
    assert torch.equal(last, h)
    assert ys.shape == (0, 2)


SCAN_8 = """
sums ({first}{real}[2, 1] h, {real}[2, 3, 1] xs) => ({real}[2, 1] last, {real}[2, 3, 1] ys)
{{
  last, ys = Scan ({lengths}, h, xs) <
    num_scan_inputs = 1, directions = [{backwards}],
    body = cell ({real}[1] s, {real}[1] v) => ({real}[1] t, {real}[1] out) {{ t = Add (s, v) out = Mul (t, v) }}
  >
}}
"""


@pytest.mark.parametrize("backwards", [0, 1])
@pytest.mark.parametrize("lengths", [None, [3, 2]])
def test_scan_8_goes_over_a_batch(backwards: int, lengths: list[int] | None) -> None:
    """Each sample scans its own length; what is beyond is zero."""
    text = SCAN_8.format(
        real="double", backwards=backwards, first="int64[2] n, " if lengths else "", lengths="n" if lengths else ""
    )
    model = parse(text, 8)
    h, xs = torch.tensor([[0.5], [1.0]]).double(), torch.tensor([[[1.0], [2], [3]], [[4.0], [5], [6]]]).double()
    given = ([torch.tensor(lengths)] if lengths else []) + [h, xs]
    last, ys = onward.to_torch(model)(*given)
    for sample, length in enumerate(lengths or [3, 3]):
        steps = xs[sample, :length].flip(0) if backwards else xs[sample, :length]
        sums = h[sample] + steps.cumsum(0)
        torch.testing.assert_close(last[sample], sums[-1])
        torch.testing.assert_close(ys[sample, :length], sums * steps)
        assert not ys[sample, length:].any()
    check_gradients(model, *given, outputs=(0, 1))


def test_scanned_axes_of_different_sizes_are_named() -> None:
    model = parse(
        """
        two (float[n, w] x, float[m, w] y) => (float[k, w] z)
        {
          z = Scan <num_scan_inputs = 2, body = add (float[w] a, float[w] b) => (float[w] c) { c = Add (a, b) }> (x, y)
        }
        """
    )
    with pytest.raises(NodeError, match=r"the scanned axes have different sizes: \[2, 3\]"):
        onward.to_torch(model)(torch.zeros(2, 4), torch.zeros(3, 4))
