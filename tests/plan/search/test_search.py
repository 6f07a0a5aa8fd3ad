"""The search of a layout: what it counts of a network, what it prices, and what it says where nothing fits."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx_ir as ir
import pytest
from benchmarks.layout_published import Transformer

from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast.network_work import count_network, search_settings, with_context
from onward.engine.forecast.plan_forecast import forecast
from onward.errors import ParametersError
from onward.models import create_model
from onward.parameters import Parameters
from onward.plan.pipeline.balance import balanced_stages
from onward.plan.search.choosing import choose_layout
from onward.plan.search.hardware import KNOWN, Cluster, Group, Link, cluster_of, gpu_of, known_cluster
from onward.plan.search.layout import Layout, Settings, layouts
from onward.plan.search.network import NetworkWork
from onward.plan.search.partition import best_cuts
from onward.plan.search.pricing import UNIT_OPERATORS, Pricing
from onward.plan.topology import Topology

SMALL = Transformer(layers=8, width=1024, heads=8, vocabulary=8192, tokens=512)
H100 = KNOWN["h100"]


def settings(**changes: object) -> Settings:
    return dataclasses.replace(Settings(ranks=8, samples=64, memory_bytes=85e9, precision="bf16"), **changes)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    folder = tmp_path_factory.mktemp("gpt2")
    # Logits of 2 MB: the loss takes smaller ones at once, which the search does not count.
    sizes = {"layers": 2, "heads": 2, "width": 64, "vocab_size": 1024, "context_length": 64}
    ir.save(create_model("gpt2", size="tiny", dropout=0.0, **sizes), folder / "model.onnx")
    return Parameters.from_mapping(
        {
            "paths": {"model_path": folder / "model.onnx"},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {"batch_size": 8, "num_train_steps": 4, "mapped_dimensions": {"sequence": 64}},
            "learning_rate": {"initial_lr": 0.1},
            "optimizer": {"training_optimizer_name": "AdamW"},
        }
    )


@pytest.fixture(scope="module")
def works(gpt2: Parameters) -> tuple[NetworkWork, ...]:
    return count_network(gpt2, {}, 8)


def planned(gpt2: Parameters, layout: Layout) -> Parameters:
    """The run in a layout, as `onward plan` takes it."""
    return dataclasses.replace(
        gpt2,
        **{name: dataclasses.replace(getattr(gpt2, name), **fields) for name, fields in layout.sections().items()},
    )


def test_the_network_is_counted_as_the_plan_has_it(gpt2: Parameters, works: tuple[NetworkWork, ...]) -> None:
    """Elements of the weights, and bytes that two tensor-parallel ranks all-reduce for a sample."""
    alone, shared = works
    graph = read_training_graph(gpt2)
    elements = {name: int(graph.model.graph.initializers[name].const_value.size) for name in graph.weights}  # type: ignore[union-attr]
    assert alone.weights == shared.weights == sum(elements.values())
    assert shared.tensor_sizes == (2,)
    assert shared.token_size == 64
    parameters = planned(gpt2, Layout(horizontal=2, batch_size=8))
    graph = read_training_graph(parameters)
    plan = plan_run(parameters, Topology(horizontal_size=2), graph, {})
    assert shared.trained_split.sum() == sum(elements[name] for name in plan.horizontal.shardings if name in elements)
    (rank,) = forecast(parameters, graph, plan).ranks
    reduced = sum(one.payload for one in rank.traffic if one.what == "tensor-parallel all-reduce")
    counted = 8 * float(shared.reduced_forward.sum() + shared.reduced_backward.sum())
    assert counted == pytest.approx(reduced, rel=0.02)  # the loss reduces a few numbers of each token, too


@pytest.mark.parametrize(
    "layout",
    [
        Layout(batch_size=8),
        Layout(data=4, zero_stage=1, batch_size=8),
        Layout(data=4, zero_stage=3, batch_size=8),
        Layout(pipeline=2, batch_size=8, micro_batches=4),
        Layout(horizontal=2, batch_size=8),
        Layout(batch_size=8, kept=0.0),
        Layout(context=2, batch_size=8, zero_stage=1),
    ],
    ids=str,
)
def test_memory_is_what_the_program_needs_on_fake_tensors(
    gpt2: Parameters, works: tuple[NetworkWork, ...], layout: Layout
) -> None:
    parameters = planned(gpt2, layout)
    graph = read_training_graph(parameters)
    topology = Topology.of_sizes(parameters.distributed)
    expected = max(
        one.memory.total for one in forecast(parameters, graph, plan_run(parameters, topology, graph, {})).ranks
    )
    if layout.context > 1:
        works = with_context(gpt2, {}, 4, works)
        assert (works[0].context_sizes, works[0].attentions) == ((2, 4), 2)
        assert works[0].gathered == 2 * 2 * 64 * 64 * 4, "keys and values of two layers, 64 tokens of 64 features"
    asked = search_settings(gpt2, graph, layout.ranks, 1e9, "2.13.0")
    pricing = Pricing(works[layout.horizontal > 1], H100, asked)
    assert pricing.estimate(layout).total_bytes == pytest.approx(expected, rel=0.3)


def test_a_pipeline_has_at_most_the_stages_that_can_be_planned(gpt2: Parameters) -> None:
    """Each has a weight to train: frozen ones and constants make no place to cut."""
    frozen = dataclasses.replace(gpt2, training=dataclasses.replace(gpt2.training, weights_not_to_train=("*ln*",)))
    most = []
    for run in (gpt2, frozen):
        work, graph = count_network(run, {}, 1)[0], read_training_graph(run)
        with pytest.raises(ParametersError, match=f"can be cut into {work.blocks} stages at most"):
            balanced_stages(graph, 1000)
        most.append(work.blocks)
    assert most[1] < most[0]


def slowest_stage(cost: np.ndarray, sent: np.ndarray, ends: tuple[int, ...]) -> float:
    crossing = [0.0, *sent[:-1], 0.0]
    return float(max(cost[a:b].sum() + crossing[a] + crossing[b] for a, b in itertools.pairwise((0, *ends, len(cost)))))


def test_stages_are_cut_as_trying_all_ways_does() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        cost, sent = random.random(7), random.random(7)
        for stages, cuts in enumerate(best_cuts(cost, sent, 4)[1:], 1):
            best = min(slowest_stage(cost, sent, ends) for ends in itertools.combinations(range(1, 7), stages - 1))
            assert slowest_stage(cost, sent, tuple(cuts[1:-1].tolist())) == pytest.approx(best)


def test_collectives_take_the_time_of_rings_and_of_the_slowest_link() -> None:
    inside, across = H100.group(8, 1), H100.group(16, 8)
    assert (inside, across) == (Group(8, 8), Group(16, 1))
    rate = H100.inside.bytes_per_second
    assert H100.gather(1e9, inside) == pytest.approx(1e9 * 7 / 8 / rate + 7 * H100.inside.latency_seconds)
    assert H100.all_reduce(1e9, inside) == pytest.approx(2e9 * 7 / 8 / rate + 6 * H100.inside.latency_seconds)
    assert H100.gather(1e9, across) == pytest.approx(1e9 * 15 / 16 / 37.5e9 + 15 * 12e-6)
    assert H100.gather(1e9, Group(1, 1)) == H100.all_reduce(1e9, Group(1, 1)) == 0.0
    assert H100.scatter(1e9, inside) == H100.gather(1e9, inside)
    assert H100.share_tokens(1e9, inside) == H100.all_reduce(1e9, inside)
    reduces = dataclasses.replace(H100, scatter_is_reduce=True)
    assert reduces.scatter(1e9, inside) == H100.all_reduce(1e9, inside)
    assert reduces.share_tokens(1e9, inside) == H100.all_reduce(1e9, inside) + H100.gather(1e9, inside)


def test_gathers_that_are_slower_than_reductions_are_also_slower_between_nodes() -> None:
    link = Link(8e9, 1e-4, 2e9, 4e9)
    gloo = dataclasses.replace(H100, inside=link, between=link, ranks_of_node=2, scatter_is_reduce=True)
    near, far = gloo.group(2, 1), gloo.group(2, 2)
    assert gloo.all_reduce(1e9, near) == pytest.approx(1e9 / 8e9 + 2e-4)
    for group in (near, far):
        assert gloo.gather(1e9, group) == pytest.approx(0.5e9 / 2e9 + 1e-4)
        assert gloo.scatter(1e9, group) == pytest.approx(0.5e9 / 4e9 + 1e-4)
    slow = dataclasses.replace(gloo, between=link.at(1e9, 2e-4))
    assert slow.gather(1e9, far) == pytest.approx(0.5e9 / 0.25e9 + 2e-4)


def test_cores_that_ranks_share_carry_what_they_send_too() -> None:
    """Four ranks on two cores take twice as long for all of it, unless links were measured with as many ranks.

    A little longer, since neither the cores nor the ranks can wait for each other then.
    """
    work, asked, layout = SMALL.work(), settings(ranks=4), Layout(data=4, batch_size=16)
    device = dataclasses.replace(H100.device, is_asynchronous=False)
    alone = dataclasses.replace(H100, device=device, overlap=0.0)
    shared = dataclasses.replace(alone, cores=2.0)
    free = Pricing(work, alone, asked).estimate(layout)
    assert free.seconds["replicas"] > 0
    assert Pricing(work, shared, asked).estimate(layout).total_seconds == pytest.approx(
        2 * free.total_seconds, rel=0.02
    )
    crowded = Pricing(work, dataclasses.replace(shared, is_crowded=True), asked).estimate(layout)
    assert crowded.total_seconds == pytest.approx(2 * free.total_seconds - free.seconds["replicas"], rel=0.05)


def test_units_of_zero_take_the_host_of_a_cpu() -> None:
    work, asked = SMALL.work(), settings(ranks=4)
    device = dataclasses.replace(H100.device, is_asynchronous=False)
    times = []
    for seconds in (0.0, 1e-3):
        slow = dataclasses.replace(H100, device=dataclasses.replace(device, operator_seconds=seconds))
        one = Pricing(work, slow, asked).estimate(Layout(data=4, batch_size=8, micro_batches=2, zero_stage=3))
        times.append(one.seconds["replicas"])
    units = times[1] / (2 * UNIT_OPERATORS * 1e-3)
    assert units == pytest.approx(SMALL.layers + 2, abs=2)


def test_every_layout_has_the_ranks_and_samples_that_were_asked_for() -> None:
    asked = settings(ranks=16, samples=48, schedules=("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"))
    found = list(layouts(SMALL.work(), H100, asked))
    assert len(set(found)) == len(found) > 100
    for one in found:
        assert one.ranks == 16
        assert one.data * one.batch_size * one.micro_batches == 48
    assert {one.horizontal for one in found} == {1, 2, 4, 8}
    assert {one.zero_stage for one in found} == {0, 1, 2, 3}
    assert {one.schedule for one in found} == set(asked.schedules)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_chosen_layout_is_as_fast_as_any_that_fits(precision: str) -> None:
    asked, work = settings(memory_bytes=8e9, precision=precision), SMALL.work()
    choice = choose_layout([work], H100, asked)
    assert choice.chosen.fits
    assert choice.chosen.total_bytes <= choice.limit_bytes
    pricing = Pricing(work, H100, asked)
    fitting = [one for one in map(pricing.estimate, layouts(work, H100, asked)) if one.fits]
    assert choice.chosen.total_seconds <= 1.01 * min(one.total_seconds for one in fitting)
    assert [one.total_seconds for one in choice.ranked] == sorted(one.total_seconds for one in choice.ranked)


def test_less_memory_shards_and_recomputes_more() -> None:
    """With plenty of it replicas are best; with less, what they hold is sharded, then activations go."""
    work, found = SMALL.work(), []
    for memory in (85e9, 4e9, 2.7e9):
        found.append(choose_layout([work], H100, settings(memory_bytes=memory)).chosen)
    assert (found[0].layout.data, found[0].layout.kept) == (8, 1.0)
    assert found[0].total_bytes > found[1].total_bytes > found[2].total_bytes
    assert found[0].total_seconds <= found[1].total_seconds <= found[2].total_seconds


def test_a_slow_network_makes_replicas_costly() -> None:
    """Of two nodes that hardly reach each other a pipeline over both sends least."""
    slow = dataclasses.replace(H100, between=dataclasses.replace(H100.between, bytes_per_second=2e7))
    chosen = choose_layout([SMALL.work()], slow, settings(ranks=16, samples=64)).chosen.layout
    assert chosen.pipeline > 1
    assert choose_layout([SMALL.work()], H100, settings(ranks=16, samples=64)).chosen.layout.pipeline == 1


def test_sequences_are_shared_where_a_sample_fits_no_rank_otherwise() -> None:
    """One sample on eight ranks that can neither be cut by layers nor by heads; its keys and values travel."""
    work, is_narrow = dataclasses.replace(SMALL, tokens=8192).work(), np.zeros(1, dtype=bool)
    work = dataclasses.replace(work, tensor_sizes=(1,), sent=np.zeros(1), is_narrow=is_narrow, kept_shares=(1.0,))
    work = dataclasses.replace(work, block=np.zeros_like(work.block))
    with pytest.raises(ParametersError, match="no layout of 8 ranks can share the 1 samples of an update"):
        choose_layout([work], H100, settings(samples=1))
    shared = dataclasses.replace(work, context_sizes=(2, 4, 8), context_share=1.0, gathered=1e6, attentions=8)
    chosen = choose_layout([shared], H100, settings(samples=1)).chosen
    assert (chosen.layout.context, chosen.layout.ranks) == (8, 8)
    alone = Pricing(shared, H100, settings(ranks=1, samples=1)).estimate(Layout())
    assert chosen.seconds["compute"] < alone.seconds["compute"] / 2
    assert chosen.seconds["tensor and context parallel"] > 0
    assert chosen.memory["activations"] == pytest.approx(alone.memory["activations"] / 8 + 1e6 * 7 / 8)


def test_what_cannot_be() -> None:
    with pytest.raises(
        ParametersError,
        match=r"fits 0\.024 GB for tensors \(2\.2 GB of a rank, less 0\.18 GB \(8%\) for what allocators round up and "
        r"2 GB for the driver and the libraries of collectives\): the smallest, .*, needs",
    ):
        choose_layout([SMALL.work()], H100, settings(memory_bytes=2.2e9))
    alone = dataclasses.replace(SMALL.work(), tensor_sizes=(1,), sent=np.zeros(1), is_narrow=np.zeros(1, dtype=bool))
    alone = dataclasses.replace(alone, block=np.zeros_like(alone.block))
    with pytest.raises(
        ParametersError, match=r"no layout of 8 ranks can share the 12 samples of an update\. Make them"
    ):
        choose_layout([alone], H100, settings(samples=12))
    with pytest.raises(
        ParametersError, match=r"--gpu 'h10' is not listed. Did you mean 'h100'\? Pass one of v100, a100"
    ):
        known_cluster("h10")
    with pytest.raises(ParametersError, match=r"cannot be read\. Measure them again with `onward plan --calibrate`"):
        cluster_of({"device": {}})


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_gpus_are_known_by_what_their_driver_calls_them(driver: str, name: str | None) -> None:
    assert gpu_of(driver) == name


def test_cores_that_ranks_share_bound_the_time_from_below() -> None:
    """Four ranks on two cores take at least as long as their work on two."""
    cluster: Cluster = dataclasses.replace(H100, cores=2.0)
    pricing = Pricing(SMALL.work(), cluster, settings(ranks=4))
    layout = Layout(data=4, batch_size=16)
    free, shared = Pricing(SMALL.work(), H100, settings(ranks=4)).estimate(layout), pricing.estimate(layout)
    assert shared.total_seconds >= 2 * free.seconds["compute"]
    assert shared.seconds["shared cores"] > 0


def test_published_networks_are_counted_as_their_papers_do() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh) operations, a fourth of which recompute (arXiv 2104.04473, eq. 3)."""
    s, n, h, v = SMALL.tokens, SMALL.layers, SMALL.width, SMALL.vocabulary
    expected = 72 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    assert SMALL.work().operations(1) == pytest.approx(expected, rel=1e-6)
