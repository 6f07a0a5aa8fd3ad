"""Forecasts of memory and traffic: against torch's own allocator, counted tensors, and the formulas of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast import plan_forecast
from onward.engine.forecast.plan_forecast import forecast
from onward.engine.inputs.features import FeatureReader
from onward.engine.network.forward import Forward
from onward.engine.network.network import LinearOptions, Network
from onward.engine.network.precision import Precision
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.parameters import Parameters
from onward.plan.costs.costs import measure_costs
from onward.plan.costs.segments import plan_segments
from onward.plan.memory import Forecast
from onward.plan.topology import Topology

LAYERS, HEADS, BATCH, TOKENS, WIDTH, CLASSES = 2, 4, 2, 16, 32, 64
ACTIVATION = BATCH * TOKENS * WIDTH * 4
"""Bytes of what travels between layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    made = create_model(
        "gpt2",
        size="tiny",
        layers=LAYERS,
        heads=HEADS,
        width=WIDTH,
        vocab_size=CLASSES,
        context_length=TOKENS,
        dropout=0.0,
    )
    ir.save(made, path)
    return path


def parameters_of(model: Path, **sections: Mapping[str, Any]) -> Parameters:
    training = {"batch_size": BATCH, "num_train_steps": 24, "mapped_dimensions": {"sequence": TOKENS}}
    base: dict[str, Any] = {
        "paths": {"model_path": str(model)},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
        "learning_rate": {"initial_lr": 1e-3},
        "optimizer": {"training_optimizer_name": "AdamW"},
        **sections,
    }
    return Parameters.from_mapping({**base, "training": {**training, **sections.get("training", {})}})


def planned(model: Path, **sections: Mapping[str, Any]) -> Forecast:
    parameters = parameters_of(model, **sections)
    topology = Topology.of_sizes(parameters.distributed)
    graph = read_training_graph(parameters, model)
    return forecast(parameters, graph, plan_run(parameters, topology, graph, {}))


def weight_bytes(model: Path) -> int:
    parameters = parameters_of(model)
    net = OnnxModule(read_training_graph(parameters, model))
    return sum(weight.numel() * 4 for weight in net.weights.values())


def split(data: int = 1, horizontal: int = 1, pipeline: int = 1, **more: Any) -> dict[str, Any]:
    sizes = {"data_parallel_size": data, "horizontal_parallel_size": horizontal, "pipeline_parallel_size": pipeline}
    return {**sizes, **more}


def test_weights_gradients_and_moments_are_counted_exactly(model: Path) -> None:
    whole = weight_bytes(model)
    (rank,) = planned(model).ranks
    assert rank.memory.kinds["weights"] == whole
    assert 2 * whole <= rank.memory.kinds["moments"] <= 2 * whole + 8 * 100, "two slots, and a step each"


@pytest.mark.parametrize("name", ["Lion", "Muon", "Adafactor", "AdamWScheduleFree"])
def test_moments_of_other_optimizers(model: Path, name: str) -> None:
    """Lion has one of a weight, Muon one of a matrix, Adafactor one number for each row and column."""
    optimizer = {"optimizer": {"training_optimizer_name": name}}
    net = OnnxModule(read_training_graph(parameters_of(model), model))
    sizes = {key: 4 * weight.numel() for key, weight in net.weights.items()}
    factors = {key: 4 * (sum(w.shape) if w.dim() > 1 else w.numel()) for key, w in net.weights.items()}
    hidden = {key for key, weight in net.weights.items() if weight.dim() == 2 and key.startswith("h.")}
    expected = {
        "Lion": sum(sizes.values()),
        "Muon": sum(size if key in hidden else 2 * size for key, size in sizes.items()),
        "Adafactor": sum(factors.values()),
        "AdamWScheduleFree": 2 * sum(sizes.values()),
    }
    (rank,) = planned(model, **optimizer).ranks
    assert expected[name] <= rank.memory.kinds["moments"] <= expected[name] + 24 * 100, "and numbers for some"
    assert rank.memory.kinds["moments"] > 0


@pytest.mark.parametrize(("stage", "weights", "moments"), [(1, 4, 4), (2, 4, 4), (3, 4, 4)])
def test_zero_shares_out_what_it_says(model: Path, stage: int, weights: int, moments: int) -> None:
    whole = weight_bytes(model)
    (rank,) = planned(model, distributed=split(data=4, zero_stage=stage)).ranks
    kinds = rank.memory.kinds
    assert kinds["weights"] == pytest.approx(whole / weights, rel=0.01), "torch keeps the masters shared out"
    assert kinds["moments"] == pytest.approx(2 * whole / moments, rel=0.02)
    if stage < 3:
        assert kinds["gathered weights"] == pytest.approx(whole, rel=0.01), "whole weights stay until the update"
    else:
        layer = 4 * (12 * WIDTH**2 + 13 * WIDTH)
        around = whole - LAYERS * layer
        assert kinds["gathered weights"] == around + layer, "of all layers one is whole, and what lies around them"


@pytest.mark.parametrize(
    "recompute", [{"segments": True}, {"cheap_activations": True}, {"cheap_activations": False}], ids=str
)
def test_the_forecast_is_the_allocators_own_peak(model: Path, recompute: dict[str, Any]) -> None:
    """Forward and backward pass of the real network, heard by torch's profiler."""
    sections = {"recompute": recompute, "training": {"batch_size": 8 * BATCH}}
    parameters = parameters_of(model, **sections)
    graph = read_training_graph(parameters, model)
    cut = plan_segments(graph.model.graph, graph.weights, False, parameters.recompute)
    network = Network(OnnxModule(graph), cut, linear_layers=LinearOptions(parameters.recompute.cheap_activations, True))
    network.train()
    network.net.train()
    forward = Forward(network, [str(graph.loss)], Precision(None))
    batch = {name: torch.zeros(8 * BATCH, TOKENS, dtype=torch.int64) for name in ("input_ids", "labels")}
    forward(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watching:
        forward(batch)[str(graph.loss)].backward()
    assert watching.profiler is not None
    assert watching.profiler.kineto_results is not None
    total = highest = 0
    for event in sorted(watching.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            total += event.nbytes()
            highest = max(highest, total)
    (rank,) = planned(model, **sections).ranks
    of_a_step = rank.memory.total - sum(rank.memory.kinds[kind] for kind in ("weights", "moments", "constants"))
    assert of_a_step == pytest.approx(highest, rel=0.1)


@pytest.mark.parametrize("way", [{"segments": True}, {"attention": True}, {"memory_budget": 0.4}])
def test_recompute_keeps_less_as_counted_in_saved_tensors(model: Path, way: dict[str, Any]) -> None:
    plain, saving = _saved_bytes(model, {}), _saved_bytes(model, way)
    scores = LAYERS * BATCH * HEADS * TOKENS * TOKENS * 4
    assert plain - saving >= scores, "the probabilities of every layer, at least"
    written_out = {"fuse": False}
    kept = [planned(model, speed=written_out, recompute=one).ranks[0].memory.kept[0] for one in (way, {})]
    assert kept[0] / kept[1] == pytest.approx(saving / plain, abs=0.1)
    if "memory_budget" in way:
        assert saving / plain <= 0.45


def _saved_bytes(model: Path, recompute: Mapping[str, Any]) -> int:
    """Bytes that autograd holds after a forward pass, weights and inputs aside."""
    parameters = parameters_of(model, recompute=recompute, speed={"fuse": False})
    graph = read_training_graph(parameters, model)
    costs = measure_costs(graph, {"batch": BATCH, "sequence": TOKENS}).nodes
    cut = plan_segments(graph.model.graph, graph.weights, False, parameters.recompute, costs=costs)
    network = Network(OnnxModule(graph), cut)
    network.train()
    network.net.train()
    forward = Forward(network, [str(graph.loss)], Precision(None))
    batch = {name: torch.zeros(BATCH, TOKENS, dtype=torch.int64) for name in ("input_ids", "labels")}
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *batch.values())}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    # What a checkpointed segment saves it saves under hooks of its own, inside of these: only its inputs come here.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(batch)[str(graph.loss)]
    held = sum(sizes.values())
    loss.backward()
    return held


def test_a_horizontal_layer_costs_megatrons_four_all_reduces(model: Path) -> None:
    """Shoeybi et al., 2019, section 3: two all-reduces forward and two backward per layer, each of one activation.

    The embedding, cut by classes, adds one forward; its use for the logits one backward; the loss exchanges rows.
    """
    (rank,) = planned(model, distributed=split(horizontal=2)).ranks
    (traffic,) = [t for t in rank.traffic if t.what == "tensor-parallel all-reduce"]
    assert traffic.share == 1.0, "2 (n - 1) / n of two ranks"
    activations = traffic.payload / ACTIVATION
    rows = BATCH * TOKENS * 4
    of_loss = traffic.payload - (4 * LAYERS + 2) * ACTIVATION
    assert 4 * LAYERS + 2 <= activations < 4 * LAYERS + 3
    assert 0 < of_loss <= 4 * rows, "a few numbers a row for the loss, never logits"


def test_replicas_exchange_all_gradients_once_for_each_update(model: Path) -> None:
    whole = weight_bytes(model)
    (rank,) = planned(model, distributed=split(data=4), training={"gradient_accumulation_steps": 3}).ranks
    (traffic,) = rank.traffic
    assert (traffic.what, traffic.payload, traffic.sent) == ("gradients over the replicas", whole, whole * 1.5)
    half = planned(model, distributed=split(data=4, reduction_type="bf16")).ranks[0].traffic[0]
    assert half.payload == whole / 2
    in_bf16 = split(data=4, zero_stage=2, reduction_type="bf16")
    same = [planned(model, distributed={**in_bf16, **more}).ranks[0].traffic for more in ({}, {"sum_in_fp32": True})]
    assert same[0] == same[1], "each rank adds what the others send it"


@pytest.mark.parametrize(("stage", "gathers", "scatters"), [(1, 1, 1), (2, 1, 3), (3, 6, 3)])
def test_zero_exchanges_as_its_paper_says(model: Path, stage: int, gathers: int, scatters: int) -> None:
    """Rajbhandari et al., 2020, section 7: stage 3 gathers the weights for each pass, here of three micro-batches."""
    whole = weight_bytes(model)
    distributed, training = split(data=4, zero_stage=stage), {"gradient_accumulation_steps": 3}
    (rank,) = planned(model, distributed=distributed, training=training).ranks
    by_kind = {t.what: t for t in rank.traffic}
    assert by_kind["gradients, reduce-scattered"].payload == pytest.approx(scatters * whole, rel=0.01)
    gathered = by_kind["weights gathered (ZeRO)"].payload / whole
    if stage == 3:
        assert gathers / 2 < gathered <= gathers, "the last segment and shared weights stay between the passes"
    else:
        assert gathered == pytest.approx(gathers, rel=0.01)


@pytest.mark.parametrize(("every", "calls"), [(4, 6 / 24), (9, 3 / 24), (500, 1 / 24)])
def test_local_sgd_synchronizes_at_the_last_update_too(model: Path, every: int, calls: float) -> None:
    """Of 24 updates: also where they are fewer than a period, or no multiple of one."""
    split = {"data_parallel_size": 2, "sync_every_updates": every}
    (found,) = [t for t in planned(model, distributed=split).ranks[0].traffic if t.what == "weights over the workers"]
    assert found.calls == pytest.approx(calls)


def test_zero_in_groups_holds_and_exchanges_as_in_a_group_and_averages_over_the_groups(model: Path) -> None:
    whole, training = weight_bytes(model), {"gradient_accumulation_steps": 3}
    in_groups = split(data=8, zero_stage=3, zero_group_size=2)
    (rank,), (group,) = (
        planned(model, distributed=one, training=training).ranks for one in (in_groups, split(data=2, zero_stage=3))
    )
    for kind in ("weights", "gathered weights", "moments"):
        assert rank.memory.kinds[kind] == group.memory.kinds[kind]
    traffic = {t.what: t for t in rank.traffic}
    over_groups = traffic.pop("gradients over the groups of ZeRO")
    assert over_groups.payload == pytest.approx(whole / 2, rel=0.01), "once per update, a rank's shards"
    assert over_groups.sent == over_groups.payload * 2 * 3 / 4
    assert traffic == {t.what: t for t in group.traffic}


def test_stages_send_activations_once_for_each_micro_batch(model: Path) -> None:
    found = planned(model, distributed=split(pipeline=2), training={"gradient_accumulation_steps": 4})
    first, last = ({t.what: t for t in rank.traffic} for rank in found.ranks)
    sent, back = first["activations to the next stage"], last["gradients to the previous stage"]
    assert sent.calls == back.calls == 4
    assert sent.payload == back.payload
    assert sent.payload % (4 * ACTIVATION) == 0
    assert first["gradients of tied weights"].payload == CLASSES * WIDTH * 4, "the embedding is also the last layer"
    assert found.stages is not None
    assert found.ranks[0].memory.kinds["activations"] == pytest.approx(2 * found.ranks[0].memory.kept[0])


def test_a_forecast_reads_no_weight_and_takes_any_number_of_ranks(model: Path) -> None:
    found = planned(model, distributed=split(data=512, horizontal=4, pipeline=2, zero_stage=1),
                    training={"gradient_accumulation_steps": 8})  # fmt: skip
    assert len(found.ranks) == 2
    assert not any(one.problem for one in found.footprints.values())


def test_the_reader_and_the_forecast_agree_on_inputs(model: Path) -> None:
    graph = read_training_graph(parameters_of(model), model)
    reader = FeatureReader(graph, ("input_ids", "labels"), torch.device("cpu"))
    assert planned(model).inputs == dict.fromkeys(reader.inputs, f"{BATCH} x {TOKENS} int64")


def test_traffic_of_what_cannot_be_measured_is_counted_from_the_graph(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two towers one of which selects by its data: the table of communication was empty."""
    sections = {"distributed": split(horizontal=2), "training": {"gradient_accumulation_steps": 3}}
    (measured,) = (rank.traffic for rank in planned(model, **sections).ranks)

    def fail(*_: object) -> None:
        raise RuntimeError("a shape depends on data")

    monkeypatch.setattr(plan_forecast, "measure_stage", fail)
    found = planned(model, **sections)
    assert found.footprints[0].problem
    counted, expected = ({t.what: t for t in traffic} for traffic in (found.ranks[0].traffic, measured))
    assert counted.keys() == expected.keys() == {"tensor-parallel all-reduce"}
    assert counted["tensor-parallel all-reduce"].calls == expected["tensor-parallel all-reduce"].calls
    # Of each layer, of the embedding and the last layer, and of the loss.
    assert expected["tensor-parallel all-reduce"].calls == 3 * (4 * LAYERS + 2 + 2)
    for what, traffic in counted.items():
        assert traffic.payload == pytest.approx(expected[what].payload, rel=0.05)
        assert traffic.share == expected[what].share
