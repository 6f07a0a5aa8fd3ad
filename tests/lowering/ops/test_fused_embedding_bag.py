"""Bags of embeddings: torch's function, and the standard operators that a training graph has instead of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onward.artifacts.training_graph import write_training_graph
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.kernels import embeddings
from onward.lowering.module import OnnxModule
from onward.lowering.ops import fused_embedding_bag
from tests.artifacts.plain_runtime import autograd_gradients, call, largest_error, open_session
from tests.graph.fusion.test_embedding_bag import export

INDICES = torch.tensor([3, 1, 4, 1, 5, 1, 2, 6, -5, 3])
BOUNDS = {
    "ragged": torch.tensor([0, 3, 3, 8, 10]),
    "empty ones at both ends": torch.tensor([0, 0, 10, 10]),
    "a row each": None,
}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("bags", BOUNDS)
def test_standard_operators_compute_what_torch_does(mode: str, bags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    bounds = BOUNDS[bags]
    table = torch.randn(10, 4, dtype=torch.float64).round(decimals=1).requires_grad_()
    factors = torch.randn(10, dtype=torch.float64, requires_grad=True) if mode == "sum" and bounds is not None else None
    indices = INDICES if bounds is not None else INDICES.reshape(2, 5)
    expected = F.embedding_bag(
        indices % 10, table, bounds, mode=mode, per_sample_weights=factors, include_last_offset=bounds is not None
    )
    monkeypatch.setattr(fused_embedding_bag, "is_traced", lambda: True)
    found = fused_embedding_bag.embedding_bag(table, indices, bounds, factors, mode=mode)
    torch.testing.assert_close(found, expected)
    direction, leaves = torch.randn_like(expected), [table] if factors is None else [table, factors]
    for left, right in zip(
        torch.autograd.grad(found, leaves, direction), torch.autograd.grad(expected, leaves, direction), strict=True
    ):
        torch.testing.assert_close(left, right)


class AllBags(nn.Module):
    """Bags of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(10, 4, mode=mode) for mode in ("sum", "mean", "max"))
        self.head = nn.Linear(12, 3)

    def forward(self, indices: Tensor, starts: Tensor) -> Tensor:
        result: Tensor = self.head(torch.cat([bag(indices, starts) for bag in self.bags], 1))
        return result


def test_a_training_graph_has_them_in_standard_operators(tmp_path: Path) -> None:
    torch.manual_seed(0)
    starts = torch.tensor([0, 3, 3, 8])
    model, _ = export(AllBags(), (INDICES % 10, starts))
    loss = LossSpec(type="softmax_cross_entropy", prediction=model.graph.output[0].name, label="labels")
    graph = make_training_graph(model, loss=loss, fuse=True)
    assert [node.op_type for node in graph.model.graph].count("EmbeddingBag") == 3
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,)).train()
    write_training_graph(net, tmp_path / "bags.onnx")
    names = [value.name for value in model.graph.input]
    features = dict(zip(names, (INDICES % 10, starts), strict=True)) | {"labels": torch.tensor([0, 2, 1, 1])}
    results, expected = call(open_session(tmp_path / "bags.onnx"), features), autograd_gradients(net, features)
    assert results.keys() == expected.keys()
    for output, tensor in expected.items():
        assert largest_error(results[output], tensor) < 2e-6, output


@pytest.mark.parametrize(("width", "mode", "is_own"), [(32, "mean", True), (33, "mean", False), (4, "max", False)])
@pytest.mark.parametrize("bags", BOUNDS)
def test_gradients_of_narrow_tables_need_no_sorted_indices(bags: str, width: int, mode: str, is_own: bool) -> None:
    table, bounds = nn.Parameter(torch.randn(10, width)), BOUNDS[bags]
    indices = INDICES if bounds is not None else INDICES.reshape(2, 5)
    found = fused_embedding_bag.embedding_bag(table, indices, bounds, mode=mode)
    assert (type(found.grad_fn).__name__ == "_BagsBackward") is is_own
    expected = F.embedding_bag(indices % 10, table, bounds, mode=mode, include_last_offset=bounds is not None)
    direction = torch.randn_like(expected)
    gradients = (torch.autograd.grad(result, table, direction)[0] for result in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_many_rows_are_added_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table, found = nn.Parameter(torch.randn(10, 4)), []
    for block_bytes in (1, 2 * 16, 2**20):
        monkeypatch.setattr(embeddings, "BLOCK_BYTES", block_bytes)
        for bounds in BOUNDS.values():
            indices = INDICES if bounds is not None else INDICES.reshape(2, 5)
            total = fused_embedding_bag.embedding_bag(table, indices, bounds, mode="mean").square().sum()
            found.append(torch.autograd.grad(total, table)[0])
    assert all(torch.equal(one, other) for one, other in zip(found, found[3:], strict=False))
