"""Gradients of cross-entropies with one scattering into the probabilities are torch's."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onward.artifacts.label_gradients import write_label_gradients_directly


class LabelGradient(torch.nn.Module):
    """The gradient of weighed cross-entropies, as torch's decompositions write it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, y: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logs = torch.log_softmax(y, 1)
        places = labels.unsqueeze(1)
        gradient = torch.zeros_like(logs).scatter(1, places, -1.0) * weights.unsqueeze(1)
        if self.factor != 1:
            gradient = gradient + self.factor * gradient  # not such a form
        return gradient - logs.exp() * gradient.sum(1, keepdim=True)


@pytest.mark.parametrize(("factor", "expected_count"), [(1.0, 1), (2.0, 0)])
@pytest.mark.parametrize("places", [(), (3,)])
def test_gradients_are_torchs(factor: float, expected_count: int, places: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(5, 7, *places, generator=generator, requires_grad=True)
    labels = torch.randint(0, 7, (5, *places), generator=generator)
    weights = torch.rand(5, *places, generator=generator) * (labels > 1)  # labels that do not count
    program = torch.onnx.export(LabelGradient(factor).eval(), (y, labels, weights), dynamo=True, verbose=False)
    assert program is not None
    model = program.model
    assert write_label_gradients_directly(model) == expected_count
    if expected_count:
        ir.passes.common.RemoveUnusedNodesPass()(model)
        assert [node.op_type for node in model.graph].count("ReduceSum") == 0
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    feeds = [value.detach().numpy() for value in (y, labels, weights)]
    (found,) = session.run(None, dict(zip([one.name for one in session.get_inputs()], feeds, strict=True)))
    loss = (torch.nn.functional.cross_entropy(y, labels, reduction="none") * weights).sum()
    (wanted,) = torch.autograd.grad(loss, y)
    share = 1 if factor == 1 else 1 + factor
    assert np.abs(found - share * wanted.numpy()).max() < 1e-6
