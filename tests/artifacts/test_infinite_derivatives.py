"""Gradients that are infinite before a clipped activation are zero behind it, as torch's are."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from onward.artifacts.infinite_derivatives import has_infinite_derivatives
from onward.artifacts.training_graph import write_training_graph
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.artifacts.plain_runtime import call, open_session

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
net (float[N, 2] x) => (float loss) <float[2, 3] w = {1.0, -2.0, 0.5, 3.0, 1.5, -1.0}, float two = {2.0}> {
    y = MatMul(x, w)
    clipped = Relu(y)
    %s
    loss = ReduceSum <keepdims = 0> (result)
}"""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("result = Sqrt(clipped)", True),
        ("result = Div(two, clipped)", True),
        ("result = Div(clipped, two)", False),
        ("result = Exp(clipped)", False),
    ],
)
def test_operators_with_infinite_derivatives_are_found(last: str, expected: bool) -> None:
    assert has_infinite_derivatives(ir.from_onnx_text(TEXT % last)) == expected


def test_the_gradient_of_the_root_of_a_relu_is_torchs(tmp_path: Path) -> None:
    model = ir.to_proto(ir.from_onnx_text(TEXT % "result = Sqrt(clipped)"))
    graph = make_training_graph(model, loss=LossSpec(type="output", prediction="loss"))
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,)).train()
    write_training_graph(net, tmp_path / "step.onnx")
    x = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.0, 0.0]])
    found = call(open_session(tmp_path / "step.onnx"), {"x": x})["w_grad"]
    w = net.weights["w"].detach().clone().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.relu(x @ w).sqrt().sum(), w)
    assert wanted.isfinite().all()
    assert torch.allclose(found, wanted, atol=1e-6)
