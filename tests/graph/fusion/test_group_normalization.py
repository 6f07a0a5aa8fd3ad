"""Group normalization between reshapes becomes one node: same values, same gradients, images stay channels-last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.graph.exported import export
from tests.graph.fusion.pairs import assert_fused, kinds, parse

RNG = np.random.default_rng(0)
IMAGE = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
STORED = {
    "groups": np.array([0, 3, -1]), "image": np.array([2, 6, 4, 5]), "one": np.ones(3), "zero": np.zeros(3),
    "scale": RNG.normal(size=(6, 1, 1)), "bias": RNG.normal(size=(1, 6, 1, 1)), "vector": RNG.normal(size=6),
    "axes": np.array([1, 2]),
}  # fmt: skip
NORMALIZED = "r = Reshape(x, groups)\nn = InstanceNormalization<epsilon=1e-3>(r, one, zero)\nu = Reshape(n, image)\n"
SCALED = NORMALIZED + "m = Mul(u, scale)\nz = Add(m, bias)"


def model(body: str, outputs: str = "double[2,6,4,5] z", **stored: np.ndarray) -> onnx.ModelProto:
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    every = {**STORED, **stored}
    return parse("double[2,6,4,5] x", outputs, body, {n: v for n, v in every.items() if n in words})


@pytest.mark.parametrize(
    ("body", "trained"),
    [
        (SCALED, ("scale", "bias")),
        (SCALED.replace("Mul(u, scale)", "Mul(scale, u)"), ("scale", "bias")),
        (NORMALIZED + "v = Unsqueeze(vector, axes)\nm = Mul(u, v)\nz = Add(m, bias)", ("vector", "bias")),
        (NORMALIZED + "z = Mul(u, scale)", ("scale",)),
        (NORMALIZED + "z = Add(u, bias)", ("bias",)),
        (NORMALIZED + "z = Identity(u)", ()),
        (SCALED.replace("Reshape(n, image)", "Reshape(n, s)").replace("u =", "s = Shape(x)\nu ="), ("scale", "bias")),
    ],
    ids=["both", "turned", "a vector", "scale", "bias", "neither", "a shape that is read"],
)
def test_one_node(body: str, trained: tuple[str, ...]) -> None:
    assert_fused(model(body), {"x": IMAGE}, {"group_normalization": 1}, trained)


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        (SCALED, {"one": np.array([1.0, 1.0, 1.1])}),
        (SCALED, {"zero": np.array([0.0, 0.0, 0.1])}),
        (SCALED, {"groups": np.array([4, 3, -1])}),
        (SCALED, {"groups": np.array([0, 4, -1]), "one": np.ones(4), "zero": np.zeros(4)}),
        (SCALED.replace("Reshape(n, image)", "Transpose<perm=[0,2,1]>(n)").replace("m =", "w = Reshape(u, image)\nm =")
         .replace("Mul(u", "Mul(w"), {}),
        (SCALED + "\ny = Neg(n)", {}),
    ],
    ids=["scaled", "shifted", "other samples", "parts of channels", "turned", "read elsewhere"],
)  # fmt: skip
def test_what_is_none_stays(body: str, stored: dict[str, np.ndarray]) -> None:
    outputs = "double[2,6,4,5] z" + (", double[2,3,40] y" if "y = " in body else "")
    assert_fused(model(body, outputs, **stored), {"x": IMAGE}, {}, ("scale", "bias"))


def test_a_factor_of_another_axis_stays_outside() -> None:
    stored = {"scale": RNG.normal(size=(6, 4, 1)), "bias": RNG.normal(size=5)}
    assert_fused(model(SCALED, **stored), {"x": IMAGE}, {"group_normalization": 1}, ("scale", "bias"))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_exports(tmp_path: Path, axes: int, dynamo: bool) -> None:
    """Of torch's module, any number of samples; values and gradients to 1e-10. Exporters unsqueeze scale and bias."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    torch.manual_seed(0)
    norm = nn.GroupNorm(3, 6, eps=2**-10)
    module = nn.Sequential(convolution(3, 6, 3), norm, nn.SiLU(), convolution(6, 4, 1)).double()
    with torch.no_grad():
        for weight in norm.parameters():
            weight += torch.randn_like(weight)
    x = torch.randn(2, 3, *[5] * axes, dtype=torch.float64)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},) if dynamo else None
    more = {"dynamic_shapes": shapes} if dynamo else {"dynamic_axes": {"x": {0: "batch"}}}
    path = export(module, (x,), tmp_path / "m.onnx", 18, dynamo, input_names=["x"], output_names=["y"], **more)
    graph = make_training_graph(path, fuse=True)
    assert kinds(graph)["group_normalization"] == 1
    net = OnnxModule(graph)
    (found, wanted) = (net(x), module(x))
    assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for out in (found, wanted):
        out.square().sum().backward()
    assert len(net.weights) == len(list(module.parameters()))
    for weight in module.parameters():
        alike = [own for own in net.weights.values() if own.numel() == weight.numel()]
        (own,) = (own for own in alike if torch.equal(own.ravel(), weight.ravel()))
        assert own.grad is not None
        assert_close(own.grad.view_as(weight), weight.grad, rtol=1e-10, atol=1e-10)


def test_images_stay_channels_last() -> None:
    net = OnnxModule(make_training_graph(model(SCALED), fuse=True, weights_to_train=["scale", "bias"]))
    assert net(IMAGE.contiguous(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
