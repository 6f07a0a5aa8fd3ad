"""The batch followed through a graph: models that mix samples are refused."""

from __future__ import annotations

import onnx
import pytest
from torch import Tensor, nn

from onward.graph.rebatching.passes import NotRebatched
from onward.lowering.rebatching_proof import prove_rebatching
from tests.lowering.fixed_batches import STEPS, export


class Mixed(nn.Module):
    """Each of these computes one sample with the help of others, or one of them only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.how == "mean":
            return y - y.mean((0, 1), keepdim=True)
        if self.how == "softmax":
            return y.softmax(0)
        if self.how == "cumulated":
            return y.cumsum(0)
        if self.how == "joined":
            return y.reshape(5, 4).softmax(0)
        return y[0]


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("how", ["mean", "softmax", "cumulated", "joined", "first"])
def test_models_that_mix_samples_are_refused(how: str, dynamo: bool) -> None:
    model = export(Mixed(how).eval(), (STEPS,), dynamo)
    with pytest.raises(NotRebatched, match=r"mixes the samples of a batch|its samples are not independent|merged with"):
        prove_rebatching(model)


def test_samples_in_another_axis_of_the_output_are_refused() -> None:
    """A batch of one that is squeezed away, and an axis of one that comes behind the others instead."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[1, 4, 3] x) => (float[1, 3, 4] y)
        <int64[1] first = {0}> { a = Squeeze (x, first) b = Transpose <perm = [1, 0]> (a) y = Unsqueeze (b, first) }"""
    )
    with pytest.raises(NotRebatched, match=r"its output 'y' has the batch in axis 2, merged with other axes"):
        prove_rebatching(model)


def test_graphs_in_a_node_are_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[1, 4] x, bool c) => (float[1, 4] y)
        { y = If (c) <then_branch = a () => (float[1, 4] p) { p = Relu (x) },
                      else_branch = b () => (float[1, 4] q) { q = Neg (x) }> }"""
    )
    with pytest.raises(NotRebatched, match=r"node 'y' \(If\) contains subgraphs"):
        prove_rebatching(model)
