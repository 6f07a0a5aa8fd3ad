"""Costs counted from shapes, against what torch counts while it computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import onward.graph.shared_inputs as shared_inputs
import onward.lowering.kernels.rematerialize as rematerialize
from onward.errors import ModelError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.plan.costs.costs import DEFAULT_SIZE, measure_costs
from tests.graph.fusion.pairs import parse
from tests.plan.staged_models import GPT2, Sketch, batch_of, graph_of

SIZES = {
    "mlp": {"batch": 2},
    "gpt2": {"batch": 2, "sequence": 9},
    "bert": {"batch": 2, "sequence": 10, "masked": 3},
    "squeezenet": {"batch": 2},
    "u_net": {"batch": 2},
}


@pytest.mark.parametrize("name", SIZES)
def test_operations_of_products_are_those_that_torch_counts(name: str) -> None:
    graph = graph_of(name)
    features = batch_of(name, 1)
    total = measure_costs(graph, SIZES[name]).total(measure_costs(graph, SIZES[name]).nodes)
    network = OnnxModule(graph, (str(graph.loss),))
    inputs = {name: features[name] for name in network.program.inputs}
    with FlopCounterMode(display=False) as forward:
        loss = network(**inputs)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert total.forward == forward.get_total_flops()
    assert total.backward_input + total.backward_weight == backward.get_total_flops()


@pytest.mark.parametrize("name", SIZES)
def test_kept_bytes_are_near_what_autograd_saves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations that torch saves, each memory once, weights and inputs left out: within a tenth."""
    monkeypatch.setattr(rematerialize, "LEAST_BYTES", 0)
    graph = graph_of(name)
    features = batch_of(name, 1)
    costs = measure_costs(graph, SIZES[name])
    network = OnnxModule(graph, (str(graph.loss),)).train()
    network.program = rematerialize.with_rematerialization(network.program)
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers(), *features.values())}
    saved: dict[int, int] = {}
    held = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(**{name: features[name] for name in network.program.inputs})
    assert costs.total(costs.nodes).kept_bytes == pytest.approx(sum(saved.values()), rel=0.1)


def test_a_linear_layer_fused_costs_what_its_product_does() -> None:
    model = create_model("gpt2", **GPT2)
    off = ("attention", "normalization", "gelu", "cross_entropy")
    totals = []
    for fuse in (False, True):
        graph = make_training_graph(
            model,
            loss=LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels"),
            fuse=fuse,
            fusions_off=off,
        )
        costs = measure_costs(graph, SIZES["gpt2"])
        totals.append(costs.total(costs.nodes))
        assert ("linear" in {fusion.kind for fusion in graph.fusions}) is fuse
    written, fused = totals
    assert fused.forward == written.forward
    assert (fused.backward_input, fused.backward_weight) == (written.backward_input, written.backward_weight)
    assert fused.kept_bytes == written.kept_bytes
    assert fused.moved_bytes < written.moved_bytes


@pytest.mark.parametrize(("least", "is_kept"), [(8, False), (9, True)])
def test_what_narrow_layers_read_is_kept(least: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GELU before a layer of 8 outputs: recomputed, unless that is too few."""
    body = "h = MatMul(x, w)\ng = Gelu(h)\nz = MatMul(g, w)"
    model = parse("float[5,8] x", "float[5,8] z", body, {"w": np.zeros((8, 8), np.float32)}, 20)
    monkeypatch.setattr(shared_inputs, "LEAST_OUTPUTS", {"Gelu": least})
    costs = measure_costs(make_training_graph(model), {})
    # What goes into the GELU is kept anyway.
    assert costs.total(costs.nodes).kept_bytes == 4 * 5 * 8 * (1 + is_kept)


def test_weights_count_as_they_are_stored() -> None:
    costs = measure_costs(graph_of("mlp"), {"batch": 2})
    assert costs.weight_bytes["fc0.weight"] == 8 * 8 * 4
    assert costs.weight_bytes["fc0.bias"] == 8 * 4
    assert costs.value_bytes["relu0"] == 2 * 8 * 4


def test_a_lookup_does_not_read_its_whole_table() -> None:
    graph = graph_of("gpt2")
    costs = measure_costs(graph, SIZES["gpt2"])
    lookup = next(
        node for node in graph.model.graph if node.op_type == "Gather" and node.inputs[0].name == "wte.weight"
    )
    assert costs.nodes[str(lookup.outputs[0].name)].moved_bytes == 2 * 9 * (16 * 4 + 8)


def test_an_unknown_dimension_is_refused() -> None:
    with pytest.raises(ModelError, match="names 'bach'"):
        measure_costs(graph_of("mlp"), {"bach": 2})


def test_only_sizes_that_were_given_may_contradict_the_model() -> None:
    """An exporter that traces one batch of 3 writes it into the graph, and still calls the axis `batch`."""
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    rows = sketch.weight("rows", array=np.ones((3, 4), np.float32))
    added = sketch.node("Add", "added", sketch.node("Gemm", "first", x, sketch.weight("w", 4, 4)), rows)
    loss = LossSpec(type="mean_squared_error", prediction="added", label="y")
    graph = make_training_graph(sketch.model(added), loss=loss)
    assert measure_costs(graph, {"batch": 3}).nodes["first"].forward == 2 * 3 * 4 * 4
    assert measure_costs(graph, {}).nodes["first"].forward == 2 * DEFAULT_SIZE * 4 * 4
    with pytest.raises(ModelError, match="contradict a size that the model fixes"):
        measure_costs(graph, {"batch": 5})


@pytest.mark.parametrize("activation", ["Gelu", "Relu"])
def test_what_is_cheap_is_not_kept_for_a_weight(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x, its norm, h and its activation, all [B, W], those that nothing but a product reads are recomputed."""
    monkeypatch.setattr(shared_inputs, "LEAST_OUTPUTS", {})
    body = f"n = LayerNormalization<axis=-1>(y, s)\nh = MatMul(n, w)\na = {activation}(h)\nz = MatMul(a, w)"
    stored = {"w": np.ones((16, 16), np.float32), "s": np.ones(16, np.float32)}
    model = parse("float[8,16] x", "float[8,16] z", f"y = MatMul(x, w)\n{body}", stored, 20)
    graph = make_training_graph(model, loss=LossSpec(type="mean_squared_error", prediction="z", label="labels"))
    costs, tensor = measure_costs(graph, {}), 4 * 8 * 16
    kept = {name: cost.kept_bytes for name, cost in costs.nodes.items()}
    relu = activation == "Relu"
    assert [kept[name] for name in "ynha"] == [tensor, 0, 0 if relu else tensor, tensor if relu else 0]


@pytest.mark.parametrize(("reader", "keeps"), [("Conv", False), ("MaxPool<kernel_shape=[1,1]>", False), ("Exp", True)])
def test_what_follows_a_batch_normalization_is_not_kept_for_those_who_know(reader: str, keeps: bool) -> None:
    """Of h and what is made of it, all alike, the normalization keeps h; of a sum it keeps both parts' inputs."""
    weights = ", w" if reader == "Conv" else ""
    body = (
        f"h = Conv(x, w)\nn = BatchNormalization(h, s, s, s, s)\nr = Relu(n)\nt = Add(r, n)\ny = Relu(t)\n"
        f"q = {reader}(y{weights})\nz = ReduceSum(q)"
    )
    stored = {"w": np.ones((2, 2, 1, 1), np.float32), "s": np.ones(2, np.float32)}
    model = parse("float[8,2,4,4] x", "float[a,b,c,d] z", body, stored, 18)
    graph = make_training_graph(model, loss=LossSpec(type="mean_squared_error", prediction="z", label="labels"))
    costs, tensor = measure_costs(graph, {}), 4 * 8 * 2 * 16
    kept = {name: cost.kept_bytes for name, cost in costs.nodes.items()}
    assert [kept[name] for name in "hnrtyq"] == [tensor, 0, 0, 0, 0, tensor if keeps else 0]
