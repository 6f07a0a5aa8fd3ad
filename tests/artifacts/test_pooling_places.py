"""The places of a pooling's maxima are those that torch's exporter computes, with one pooling less."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_ir import passes

from onward.artifacts.pooling_places import compute_places_directly


class Pool(torch.nn.Module):
    """Maxima and where they are in their planes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten.max_pool2d_with_indices(x, [2, 3], [2, 1], [1, 1])


@pytest.mark.parametrize("is_open", [False, True])
def test_places_are_torchs(is_open: bool) -> None:
    x = torch.randn(3, 4, 8, 9, generator=torch.Generator().manual_seed(0))
    size = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}
    exported = torch.export.export(Pool(), (x,), dynamic_shapes=({**size},) if is_open else None)
    program = torch.onnx.export(exported, dynamo=True, verbose=False)
    assert program is not None
    model = program.model
    assert [node.op_type for node in model.graph].count("MaxPool") == 2
    assert compute_places_directly(model) == 1
    passes.common.RemoveUnusedNodesPass()(model)
    assert [node.op_type for node in model.graph].count("MaxPool") == 1
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for mine, expected in zip(found, Pool()(x), strict=True):
        assert np.array_equal(mine, expected.numpy())
    assert compute_places_directly(model) == 0
