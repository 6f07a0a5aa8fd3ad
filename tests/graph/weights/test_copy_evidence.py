"""A parameter that a module uses more than once is one weight, however often its exporter stored it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.training_graph import make_training_graph
from tests.graph.exported import export
from tests.graph.shared_layers import WAYS, WIDTHS, Shared, random_way, train_both
from tests.initializers import stored_arrays

BOUND = 2e-6
"""Of outputs after three updates, relative; without the ties the smallest difference seen was 1e-2."""


def module_of(width: int, way: str, bias: bool = True) -> tuple[Shared, torch.Tensor]:
    torch.manual_seed(0)
    return Shared(width, WAYS[way], bias), torch.randn(2, 3, width)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_linear_layer_that_is_called_twice(width: int, bias: bool, tmp_path: Path) -> None:
    """On both sides of the exporter's thresholds; its copies end equal in the trained file."""
    module, x = module_of(width, "linear twice", bias)
    net, distance = train_both(module, x, tmp_path)
    assert distance < BOUND
    assert sum(weight.numel() for weight in net.weights.values()) == width * width + bias * width
    stored = stored_arrays(tmp_path / "t.onnx")
    matrices = [array for array in stored.values() if array.shape == (width, width)]
    assert len(matrices) == (2 if 1024 < width * width <= 8192 else 1)
    for matrix in matrices:
        np.testing.assert_array_equal(matrix, matrices[0])


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_use_a_parameter_twice(way: str, tmp_path: Path) -> None:
    _, distance = train_both(*module_of(40, way), tmp_path)
    assert distance < BOUND


@pytest.mark.parametrize("way", ["linear twice", "two linears, twice each", "vector in many shapes", "chunks twice"])
def test_ways_by_the_older_exporter(way: str, tmp_path: Path) -> None:
    _, distance = train_both(*module_of(40, way), tmp_path, dynamo=False)
    assert distance < BOUND


@pytest.mark.parametrize("seed", range(8))
def test_networks_drawn_at_random(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    width = (*WIDTHS, 40, 40, 40)[seed]
    _, distance = train_both(Shared(width, random_way(seed)), torch.randn(2, 3, width), tmp_path)
    assert distance < BOUND


class OfSeveralLayers(nn.Module):
    """A recurrent layer, attention, or an encoder layer, called twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "LSTM":
            self.layer: nn.Module = nn.LSTM(40, 40, batch_first=True)
        elif kind == "attention":
            self.layer = nn.MultiheadAttention(40, 2, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(40, 2, 40, 0.0, batch_first=True)
            self.layer = layer if kind == "encoder" else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for parameter in self.parameters():  # biases of zeros are dropped by the exporter
            nn.init.normal_(parameter, 0.1, 0.2)
        if kind == "copies":
            self.layer.layers[1].load_state_dict(self.layer.layers[0].state_dict())

    def once(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "LSTM":
            return self.layer(x)[0]
        return self.layer(x, x + 1, x, need_weights=False)[0] if self.kind == "attention" else self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(torch.tanh(self.once(x)))


@pytest.mark.parametrize("kind", ["LSTM", "attention", "encoder", "copies"])
def test_layers_of_several_parameters(kind: str, tmp_path: Path) -> None:
    """Among them two layers that start equal, called twice each: copies of one layer are tied, the layers are not."""
    torch.manual_seed(0)
    module = OfSeveralLayers(kind)
    net, distance = train_both(module, torch.randn(2, 3, 40), tmp_path, lr=0.03)  # with 0.3, attention diverges
    assert distance < 1e-5
    both = kind == "LSTM"  # whose biases, of inputs and of states, ONNX joins; trained together they are as one
    assert both or sum(w.numel() for w in net.weights.values()) == sum(p.numel() for p in module.parameters())


class Doubled(nn.Module):
    """Embedding and output layer by one table, which is read a third time in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(width + 3, width), nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.table(tokens))
        h = torch.tanh(nn.functional.linear(h, self.table.weight)) @ self.table.weight
        return nn.functional.linear(h, self.table.weight)


@pytest.mark.parametrize("width", [24, 40, 92])
def test_embeddings(width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Doubled(width)
    nn.init.normal_(module.table.weight, std=width**-0.5)
    _, distance = train_both(module, torch.randint(0, width, (2, 3)), tmp_path)
    assert distance < BOUND


def test_zeros_are_tied_by_the_call_that_reads_them(tmp_path: Path) -> None:
    """Layers that start from zeros hold equal numbers; which copies are of one layer only the exporter's notes say."""
    torch.manual_seed(0)
    module = Shared(40, lambda m, x: x + m.linear(m.other(torch.tanh(x + m.linear(m.other(x) + x)))) + m.vector)
    for layer in (module.linear, module.other):
        nn.init.zeros_(layer.weight)
    net, distance = train_both(module, torch.randn(2, 3, 40), tmp_path)
    assert distance < BOUND
    assert len([weight for weight in net.weights.values() if weight.dim() == 2]) == 2


def without_metadata(path: Path) -> onnx.ModelProto:
    model = onnx.load(path)
    for holder in (model, model.graph, *model.graph.node, *model.graph.initializer):
        del holder.metadata_props[:]
    del model.graph.value_info[:]
    return model


def test_equal_numbers_under_made_up_names_are_evidence(tmp_path: Path) -> None:
    """A tool that dropped the metadata left the names and the bias that both calls add."""
    module, x = module_of(40, "linear twice")
    graph = make_training_graph(without_metadata(export(module, (x,), tmp_path / "m.onnx", 18, True)))
    assert [tie.relation for tie in graph.ties.values()] == ["copied"]
    module, x = module_of(40, "two linears, twice each")
    graph = make_training_graph(without_metadata(export(module, (x,), tmp_path / "m.onnx", 18, True)))
    assert len(graph.ties) == 2
    assert len(graph.weights) == 4


def test_layers_with_a_bias_each_stay_apart_though_their_matrices_are_equal(tmp_path: Path) -> None:
    module, x = module_of(40, "two linears, twice each")
    with torch.no_grad():
        module.other.weight.copy_(module.linear.weight)
    graph = make_training_graph(without_metadata(export(module, (x,), tmp_path / "m.onnx", 18, True)))
    assert len(graph.weights) == 4


@pytest.mark.parametrize("name", ["exp", "mean"])
def test_a_parameter_that_is_stored_computed_with_is_reported(name: str, tmp_path: Path) -> None:
    """What cannot be tied, since training would have to compute it, is not passed over in silence."""

    def way(m: Shared, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ m.matrix) @ m.matrix.exp() if name == "exp" else x @ m.matrix * m.matrix.mean()

    torch.manual_seed(0)
    graph = make_training_graph(export(Shared(40, way), (torch.randn(2, 3, 40),), tmp_path / "m.onnx", 18, True))
    (note,) = [note for note in graph.notes if "is stored 2 times" in note]
    assert note.startswith(
        f"the parameter 'matrix' is stored 2 times ('matrix', '{name}'), folded with constants at export"
    )
    assert "torch.onnx.export(..., optimize=False) to store it once." in note


def test_ties_are_reported(tmp_path: Path) -> None:
    module, x = module_of(40, "linear twice")
    path = export(module, (x,), tmp_path / "m.onnx", 18, True)
    ((copy, tie),) = make_training_graph(path).ties.items()
    assert (
        f"'linear.weight ({tie.weight})' is stored 2 times, once for each call of its layer ({copy!r}); "
        "the copies are tied again and "
        "train as one weight."
    ) in make_training_graph(path).notes
    assert f"{copy}  = linear.weight ({tie.weight}) copied" in render(inspect(path))
