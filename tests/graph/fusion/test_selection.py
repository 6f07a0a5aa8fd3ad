"""Softplus and `nan_to_num` written out as choices become one call with the same values and gradients (1e-10)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.fusion.pairs import assert_fused, both, kinds, parse
from tests.graph.fusion.written_out import SIGNATURE, inputs, used

NUMBERS = {"one": 1.0, "beta": 2.5, "other": 2.0, "threshold": 1.5, "zero": 0.0, "nan": 7.0, "high": 8.0, "low": -9.0}
PLAIN = "s = Softplus(x)\nc = Greater(x, threshold)\ny = Where(c, x, s)"
SCALED = "b = Mul(x, beta)\ns = Softplus(b)\nd = Div(s, beta)\nc = Greater(b, threshold)\ny = Where(c, x, d)"
NAN = "n = IsNaN(x)\n{out} = Where(n, nan, {rest})\n"
LOW = "l = Less(x, zero)\nm = IsInf(x)\nlm = And(l, m)\n{out} = Where(lm, low, {rest})\n"
HIGH = "g = Greater(x, zero)\ni = IsInf(x)\nig = And(i, g)\n{out} = Where(ig, high, {rest})\n"


@pytest.mark.parametrize(("body", "beta"), [(PLAIN, 1.0), (SCALED, 2.5)], ids=["beta of 1", "beta"])
def test_softplus(body: str, beta: float) -> None:
    given = inputs(x=3 * inputs()["x"])
    _, fused = assert_fused(parse(*SIGNATURE, body, used(body, NUMBERS)), given, {"softplus": 1})
    torch.testing.assert_close(fused(**given), F.softplus(given["x"], beta, 1.5), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "body",
    [
        SCALED.replace("Div(s, beta)", "Div(s, other)"),
        SCALED.replace("Mul(x, beta)", "Mul(x, other)"),
        SCALED.replace("Where(c, x, d)", "Where(c, d, x)"),
        SCALED.replace("Greater(b, threshold)", "Greater(x, threshold)"),
        PLAIN.replace("Greater(x", "Less(x"),
        PLAIN.replace("Softplus(x)", "Softplus(y0)").replace("s =", "y0 = Neg(x)\ns ="),
        PLAIN.replace("y = ", "y0 = ") + "\ny = Add(y0, s)",
    ],
    ids=[
        "divided by another",
        "another factor",
        "the other way round",
        "compared unscaled",
        "below",
        "of another",
        "read",
    ],
)
def test_what_is_no_softplus(body: str) -> None:
    plain, fused = both(parse(*SIGNATURE, body, used(body, NUMBERS)))
    assert kinds(fused.graph) == {}
    torch.testing.assert_close(fused(**inputs()), plain(**inputs()), rtol=0, atol=0)


@pytest.mark.parametrize("order", [(NAN, LOW, HIGH), (HIGH, NAN, LOW), (LOW, HIGH, NAN)], ids=["torch's", "2", "3"])
def test_nan_to_num(order: tuple[str, ...]) -> None:
    names = ["x", "v", "w", "y"]
    body = "".join(text.format(rest=names[i], out=names[i + 1]) for i, text in enumerate(order))
    x = inputs()["x"]
    for place, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        x[0, place, :2] = value
    _, fused = assert_fused(parse(*SIGNATURE, body, used(body, NUMBERS)), {"x": x}, {"nan_to_num": 1})
    torch.testing.assert_close(fused(x=x), torch.nan_to_num(x, 7.0, 8.0, -9.0), rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [("Less(x, zero)", "Less(x, one)"), ("IsInf(x)\nlm", "IsInf(x0)\nlm"), ("IsNaN(x)", "IsNaN(x0)")],
    ids=["below one", "infinite elsewhere", "of another value"],
)
def test_what_is_no_nan_to_num(change: tuple[str, str]) -> None:
    chain = NAN.format(rest="x", out="v") + LOW.format(rest="v", out="w") + HIGH.format(rest="w", out="y")
    body = "x0 = Neg(x)\n" + chain.replace(*change)
    assert change[1] in body
    plain, fused = both(parse(*SIGNATURE, body, used(body, NUMBERS)))
    assert kinds(fused.graph) == {}
    torch.testing.assert_close(fused(**inputs()), plain(**inputs()), rtol=0, atol=0)


class _Both(nn.Module):
    """What torch's exporter makes of both functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(F.softplus(self.layer(x), 0.7, 3.0), 0.1)


def test_exports_of_torch() -> None:
    module = _Both()
    x = 4 * torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    program = torch.onnx.export(module.eval(), (x,), dynamo=True, verbose=False)
    assert program is not None
    plain, fused = both(program.model_proto)
    assert kinds(fused.graph) == {"softplus": 1, "nan_to_num": 1}
    for net in (plain, fused):
        net.zero_grad()
        module.zero_grad()
        result, wanted = net(x), module(x)
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
        result.square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(net.weights["layer.weight"].grad, module.layer.weight.grad, rtol=1e-5, atol=1e-5)
