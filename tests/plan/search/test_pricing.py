"""The search counts what the plan of a layout counts: peak memory, bytes sent, the bubble of a pipeline."""

from __future__ import annotations

import dataclasses

import pytest
from benchmarks.layout_agreement import LAYOUTS, Agreement, agreement, parameters_of
from benchmarks.layout_published import Transformer
from benchmarks.quantized_base import Llama, build

from onward.engine.forecast.network_work import count_network, with_context
from onward.models import create_model
from onward.parameters import Parameters
from onward.plan.search.hardware import KNOWN
from onward.plan.search.layout import Layout, Settings, layouts
from onward.plan.search.network import NetworkWork
from onward.plan.search.pricing import SPLIT_BACKWARD, Pricing, limit_bytes
from onward.plan.search.rank_work import RankWork
from tests.invariants.cases import CASES

Counted = tuple[Parameters, tuple[NetworkWork, ...]]
TOKENS = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    sizes = {"layers": 4, "heads": 4, "width": 64, "vocab_size": 512, "context_length": 64}
    model, folder = create_model("gpt2", size="tiny", dropout=0.0, **sizes), tmp_path_factory.mktemp("gpt2")
    parameters = parameters_of(model, folder, TOKENS, mapped_dimensions={"sequence": 64})
    return parameters, with_context(parameters, {}, 4, count_network(parameters, {}, 4))


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    case = CASES["mixtures"]
    parameters = parameters_of(case.model(), tmp_path_factory.mktemp("mixtures"), dict(case.loss), **case.training)
    return parameters, count_network(parameters, {}, 4)


def check(found: Agreement | None, memory: float, sent: float, bubble: float) -> None:
    """Within these shares of the plan's counts, and this difference of the bubble."""
    assert found is not None
    assert found.memory[0] == pytest.approx(found.memory[1], rel=memory)
    assert found.sent[0] == pytest.approx(found.sent[1], rel=sent)
    assert found.bubble[0] == pytest.approx(found.bubble[1], abs=bubble)


@pytest.mark.parametrize(
    "name",
    [
        "d4 ZeRO 2, 2 micro-batches", "d4 ZeRO 3 in groups of 2", "t2 sequence parallel", "d2 t2 ZeRO 1", "c2",
        "p2 1F1B", "p2 interleaved", "d2 p2 ZeRO 2", "recompute",
    ],
)  # fmt: skip
def test_a_transformer(gpt2: Counted, name: str) -> None:
    check(agreement(gpt2[0], LAYOUTS[name], gpt2[1]), memory=0.25, sent=0.25, bubble=0.1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Its weights are transposed, as exporters write linear layers, and most of them are those of its vocabulary."""
    size = Llama(layers=2, width=64, heads=4, key_heads=2, inner=128, vocabulary=8192)
    parameters = parameters_of(build(size, 64), tmp_path_factory.mktemp("llama"), TOKENS)
    training = dataclasses.replace(parameters.training, mapped_dimensions={"sequence": 64})
    parameters = dataclasses.replace(parameters, training=training)
    return parameters, count_network(parameters, {}, 4)


@pytest.mark.parametrize("name", ["1", "d4 ZeRO 1", "d4 ZeRO 3"])
def test_weights_of_a_large_vocabulary(llama: Counted, name: str) -> None:
    """Their gradient is kept from the forward pass on, and they are ZeRO's largest unit."""
    (work, *_) = llama[1]
    assert work.kept_once.sum() == 4 * 64 * 8192
    check(agreement(llama[0], LAYOUTS[name], llama[1]), memory=0.1, sent=0.25, bubble=0.0)


@pytest.mark.parametrize("memory", [85e9, 2.6e9, 2.3e9])
def test_the_most_that_fits_is_kept(memory: float) -> None:
    """As trying every share of the activations does, for all layouts; also where plans need more than is counted."""
    work = Transformer(layers=4, width=512, heads=8, vocabulary=8192, tokens=512).work()
    settings = Settings(ranks=4, samples=16, memory_bytes=memory, precision="bf16", schedules=("1F1B", "ZBVZeroBubble"))
    pricing, tried = Pricing(work, KNOWN["h100"], settings), Pricing(work, KNOWN["h100"], settings)
    for factor in (1.0, 1.3):
        for layout in layouts(work, KNOWN["h100"], settings):
            all_ways = [tried.estimate(dataclasses.replace(layout, kept=kept)) for kept in work.kept_shares]
            fitting = [one for one in all_ways if one.total_bytes * factor <= limit_bytes(KNOWN["h100"], settings)]
            best = dataclasses.replace(fitting[0] if fitting else all_ways[-1], fits=bool(fitting))
            assert pricing.least_recompute(layout, factor) == best


@pytest.mark.parametrize("name", ["d4", "experts over 2 of 4", "d4 ZeRO 2, 2 micro-batches", "d4 ZeRO 3"])
def test_mixtures_of_experts(mixtures: Counted, name: str) -> None:
    assert mixtures[1][0].expert_sizes == (2, 4)
    check(agreement(mixtures[0], LAYOUTS[name], mixtures[1]), memory=0.25, sent=0.1, bubble=0.0)


def test_groups_of_zero_gather_inside_a_node_and_hold_more() -> None:
    """16 ranks on two nodes: weights travel inside each, and a sixteenth of the gradients between them."""
    work = Transformer(layers=8, width=1024, heads=8, vocabulary=8192, tokens=512).work()
    settings = Settings(ranks=16, samples=64, memory_bytes=85e9, precision="bf16")
    slow = dataclasses.replace(KNOWN["h100"], between=dataclasses.replace(KNOWN["h100"].between, bytes_per_second=1e9))
    pricing = Pricing(work, slow, settings)
    whole = pricing.estimate(Layout(data=16, batch_size=4, zero_stage=3))
    groups = pricing.estimate(Layout(data=16, batch_size=4, zero_stage=3, zero_group=8))
    assert groups.seconds["replicas"] < 0.6 * whole.seconds["replicas"]
    for kind in ("weights", "moments"):
        assert groups.memory[kind] == pytest.approx(2 * whole.memory[kind])


def test_experts_are_held_by_few_replicas(mixtures: Counted) -> None:
    _, (work, *_) = mixtures
    pricing = Pricing(work, KNOWN["h100"], Settings(ranks=4, samples=64, memory_bytes=85e9))
    alone, shared = (pricing.estimate(Layout(data=4, batch_size=16, experts=size)) for size in (1, 4))
    assert work.of_experts is not None
    assert alone.memory["weights"] - shared.memory["weights"] == pytest.approx(0.75 * 4 * work.of_experts.sum())
    assert shared.seconds["expert parallel"] > 0
    assert "expert parallel" not in alone.seconds


def test_schedules_that_split_the_backward_pass_compute_some_of_it_twice() -> None:
    work = Transformer(layers=8, width=1024, heads=8, vocabulary=8192, tokens=512).work()
    settings = Settings(ranks=2, samples=64, memory_bytes=85e9, schedules=("1F1B", "ZBVZeroBubble"))
    layouts = [
        Layout(pipeline=2, schedule=name, stages_per_rank=stages, batch_size=8, micro_batches=8)
        for name, stages in (("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2))
    ]
    pricing, ranks = Pricing(work, KNOWN["h100"], settings), RankWork(work, KNOWN["h100"], settings)
    whole, split = (pricing.estimate(layout) for layout in layouts)
    assert whole.seconds["split backward"] == 0
    backward = ranks.of(layouts[1]).backward
    assert split.seconds["split backward"] == pytest.approx(8 * SPLIT_BACKWARD * backward.max(), rel=0.05)
    assert split.seconds["pipeline bubble"] < whole.seconds["pipeline bubble"]


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (1, 4), (2, 4), (3, 1)])
def test_gradients_that_are_reduced_unit_by_unit_are_never_there_in_full(stage: int, micro_batches: int) -> None:
    work = Transformer(layers=8, width=1024, heads=8, vocabulary=8192, tokens=16).work()
    pricing = Pricing(work, KNOWN["h100"], Settings(ranks=8, samples=64, memory_bytes=85e9, precision="bf16"))
    found = pricing.estimate(
        Layout(data=8, zero_stage=stage, batch_size=8 // micro_batches, micro_batches=micro_batches)
    )
    full = 4 * work.weights
    assert (found.memory["gradients"] == pytest.approx(full)) is (stage == 1 and micro_batches > 1)
    assert found.memory["gradients"] <= full
