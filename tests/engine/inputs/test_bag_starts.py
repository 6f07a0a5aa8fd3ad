"""Models with positions of a whole batch are refused by runs; bags in rows, and fixed bags, train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

import onward
from onward.engine.inputs.bag_starts import refuse_bag_starts
from onward.errors import ModelError
from onward.graph.training_graph import make_training_graph
from tests.graph.fusion.test_embedding_bag import BAGS, Bags, export

LABELS = np.array([0, 1, 2, 0])
REFUSED = (
    r"says at which position of a whole batch each bag of ids begins \(EmbeddingBag\), but a run puts batches together "
    r"out of samples, which know no such positions\. Export the module with ids \[batch, ids of a sample\] and without "
    r"offsets, or train it in a loop of your own with onward\.to_torch\."
)


class FixedBags(nn.Module):
    """Bags that begin where the module says."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = Bags("sum")
        self.register_buffer("starts", torch.tensor([0, 4, 5, 8]))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.bags(ids, self.starts)
        return result


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("includes_end", [False, True])
def test_starts_of_bags_are_refused(mode: str, includes_end: bool) -> None:
    starts = torch.tensor([0, 3, 3, 8, 10][: 4 + includes_end])
    for model in export(Bags(mode, includes_end), (BAGS, starts)):
        graph = make_training_graph(ir.from_proto(model), fuse=True)
        with pytest.raises(ModelError, match=f"input {str(graph.model.graph.inputs[1].name)!r} {REFUSED}"):
            refuse_bag_starts(graph.model)


def test_starts_that_the_model_knows_are_none_of_the_data() -> None:
    for model in export(FixedBags(), (BAGS,)):
        graph = make_training_graph(ir.from_proto(model), fuse=True)
        assert "EmbeddingBag" in {node.op_type for node in graph.model.graph}
        refuse_bag_starts(graph.model)


def write(module: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> Path:
    """The module with an open batch."""
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
    program = torch.onnx.export(module.eval(), inputs, dynamic_shapes=(shapes,), dynamo=True, verbose=False)
    assert program is not None
    ir.save(program.model, path)
    return path


def test_a_run_refuses_starts_and_trains_bags_in_rows(tmp_path: Path) -> None:
    rows = BAGS[:8].reshape(4, 2)
    with_starts = write(Bags("mean"), (BAGS, torch.tensor([0, 3, 3, 8])), tmp_path / "starts.onnx")
    ids, starts = (str(value.name) for value in ir.load(with_starts).graph.inputs)
    data = {ids: np.arange(4), starts: np.zeros(4, np.int64), "labels": LABELS}
    with pytest.raises(ModelError, match=f"input {starts!r} {REFUSED}"):
        onward.fit(with_starts, data, epochs=1)
    in_rows = write(Bags("mean"), (rows,), tmp_path / "rows.onnx")
    (ids,) = (str(value.name) for value in ir.load(in_rows).graph.inputs)
    onward.fit(in_rows, {ids: rows.numpy(), "labels": LABELS}, epochs=1)
