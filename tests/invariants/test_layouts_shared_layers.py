"""Copies of one weight in a file are one weight in every layout, and all of them get its trained value."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onward.graph.training_graph import make_training_graph
from tests.graph.exported import export
from tests.graph.shared_layers import Shared
from tests.initializers import stored_arrays
from tests.invariants.cases import SQUARES, Case, random
from tests.invariants.layouts import Layout, assert_follows, train
from tests.invariants.rank_pool import end_ranks

WIDTH = 40


def looped(m: Shared, x: torch.Tensor) -> torch.Tensor:
    """A block of two layers that share their weights over two rounds, another layer between."""
    for _ in range(2):
        x = torch.tanh(m.linear(x)) + x
        x = m.norm(torch.tanh(m.other(x)) @ m.matrix)
    return m.linear(x)


@functools.cache
def looped_model() -> ir.Model:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = export(
            Shared(WIDTH, looped), (torch.randn(2, 3, WIDTH),), Path(folder) / "m.onnx", 18, True,
            dynamic_shapes=({0: torch.export.Dim("batch")},), input_names=["x"], output_names=["image"],
        )  # fmt: skip
        return ir.from_proto(onnx.load(path))


def rows(samples: int) -> dict[str, np.ndarray]:
    return {"x": random((samples, 3, WIDTH)), "target": random((samples, 3, WIDTH), seed=1)}


CASE = Case(looped_model, SQUARES, rows)


class Fresh(nn.Module):
    """Norms, biases of zeros, and a layer with its copy: the older exporter merges their equal parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.target.load_state_dict(self.online.state_dict())
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first_norm(self.target(torch.tanh(self.online(x))) + x)
        return self.second_norm(self.last(torch.tanh(x)))


@functools.cache
def merged_model() -> ir.Model:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = export(
            Fresh(), (torch.randn(2, 3, WIDTH),), Path(folder) / "m.onnx", 17, False, do_constant_folding=False,
            dynamic_axes={"x": {0: "batch"}, "image": {0: "batch"}}, input_names=["x"], output_names=["image"],
        )  # fmt: skip
        return ir.from_proto(onnx.load(path))


@pytest.mark.parametrize("layout", [Layout(2, 1, 1, {"zero_stage": 3}), Layout(1, 2, 1), Layout(1, 1, 2)], ids=str)
def test_merged_parameters_train_apart_in_every_layout(layout: Layout, tmp_path: Path) -> None:
    """Each parameter of the module has its own trained value, in the exported file as well."""
    names = {name for name, _ in Fresh().named_parameters()}
    assert not names <= set(merged_model().graph.initializers)
    outputs = {"paths": {"model_path": str(tmp_path / "model.onnx"), "output_dir": str(tmp_path / "out")}}
    case = Case(merged_model, SQUARES, rows)
    expected = train(case, Layout(), accumulation=2)
    actual = train(case, layout, accumulation=2, sections=outputs, folder=str(tmp_path))
    assert_follows(actual, expected, 1e-6, 5e-6)
    trained = onnx.load(tmp_path / "out" / "model_trained.onnx")
    stored = stored_arrays(trained)
    for name in names:
        np.testing.assert_allclose(stored[name], expected.tensors[f"weights/{name}"], atol=1e-5)
    assert not np.allclose(stored["online.weight"], stored["target.weight"], atol=1e-3)
    assert not np.allclose(stored["first_norm.bias"], stored["last.bias"], atol=1e-3)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


@pytest.mark.parametrize(
    "layout",
    [Layout(2, 1, 1, {"zero_stage": 3}), Layout(1, 2, 1), Layout(1, 1, 2)],
    ids=["data", "tensor", "pipeline"],
)
def test_a_file_with_copies_trains_alike(layout: Layout, tmp_path: Path) -> None:
    ties = make_training_graph(looped_model()).ties
    assert len(ties) == 3, "each of two linear layers is folded for every call: 3 and 2 copies of 2 weights"
    outputs = {"paths": {"model_path": str(tmp_path / "model.onnx"), "output_dir": str(tmp_path / "out")}}
    expected = train(CASE, Layout(), accumulation=2)
    actual = train(CASE, layout, accumulation=2, sections=outputs, folder=str(tmp_path))
    assert_follows(actual, expected, 1e-6, 5e-6)
    trained = onnx.load(tmp_path / "out" / "model_trained.onnx")
    stored = stored_arrays(trained)
    for copy, tie in ties.items():
        np.testing.assert_array_equal(stored[copy], stored[tie.weight])
        np.testing.assert_allclose(stored[copy], expected.tensors[f"weights/{tie.weight}"], atol=1e-5)
