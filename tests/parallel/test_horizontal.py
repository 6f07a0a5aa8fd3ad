"""Tensor parallelism on Gloo ranks: loss, gradients and running statistics equal one process's, for any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.distributed as dist

from onward.graph.training_graph import TrainingGraph
from onward.lowering.building.shapes import find_value_facts
from onward.lowering.context import ExecutionContext
from onward.lowering.module import OnnxModule
from onward.parallel.gradients import add_up_copies
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import HorizontalPlan, plan_horizontal
from onward.plan.shards import take_shard
from tests.parallel.horizontal_models import EXAMPLES, Example
from tests.ranks import run_on_ranks

BOUND = 1e-5
"""Largest difference of a tensor, as a share of its largest element: sums of float32 in another order."""

SMALLEST_SHARE = 5e-2
"""A gradient smaller than this share of the model's largest is compared with that: those of a key's bias and of a
bias before batch norm are 0 but for rounding, since softmax and the norm do not see them."""


def planned(example: Example, graph: TrainingGraph, size: int, by_tokens: bool = False) -> HorizontalPlan:
    names = {str(value.name) for value in graph.model.graph.inputs}
    shapes = {name: tuple(x.shape) for name, x in example.planned().items() if name in names}
    facts = find_value_facts(graph, shapes)
    return plan_horizontal(graph, size, facts.shapes, facts.numbers, sequence_parallel=by_tokens)


def differences(name: str, path: str, by_tokens: bool) -> dict[str, float]:
    """On one rank: how far everything is from what one process computes, as shares of the largest elements."""
    size, rank = dist.get_world_size(), dist.get_rank()
    example = EXAMPLES[name]
    graph = example.graph(path)
    plan = planned(example, graph, size, by_tokens)
    assert bool(plan.token_axes) == by_tokens
    assert graph.loss_names is not None
    scores = str(graph.model.graph.outputs[0].name)
    outputs = (graph.loss_names.loss, graph.loss_names.correct, graph.loss_names.counted, scores)
    outputs = tuple(o for o in outputs if o is not None)
    context = ExecutionContext(horizontal_group=str(dist.group.WORLD.group_name))
    whole, local = OnnxModule(graph, outputs), OnnxModule(localize(graph, plan, rank), outputs, context=context)
    features = example.features()
    results = []
    for net in (whole, local):
        net.train()
        results.append(net(*(features[i] for i in net.program.inputs)))
        results[-1][0].backward()
    found = {f"output {o}": _share(a, b) for o, a, b in zip(outputs, results[1], results[0], strict=True)}
    gradients = [g.abs().max().item() for w in graph.weights if (g := whole.weights[w].grad) is not None]
    least = SMALLEST_SHARE * max(gradients)
    full_shapes = {name: tuple(weight.shape) for name, weight in whole.weights.items()}
    shards = {name: cut.shards(full_shapes[name], rank, size) for name, cut in plan.shardings.items() if cut.parts}
    gradients_of_shards = {name: local.weights[name].grad for name in shards}
    add_up_copies(
        dist.group.WORLD,
        gradients_of_shards,
        {n: [s for s in found if s.replica[1] > 1] for n, found in shards.items()},
    )
    for weight in graph.weights:
        gradient, expected = local.weights[weight].grad, whole.weights[weight].grad
        assert gradient is not None, weight
        assert expected is not None, weight
        if weight in plan.partial_gradients:
            dist.all_reduce(gradient)
        part = take_shard(expected.numpy(), plan.shardings.get(weight), rank, size)
        found[f"gradient of {weight}"] = _share(
            gradient, torch.from_numpy(part), max(least, expected.abs().max().item())
        )
    states, expected_states = dict(local.named_buffers()), dict(whole.named_buffers())
    for state in graph.states:
        part = take_shard(expected_states[state].numpy(), plan.shardings.get(state), rank, size)
        found[f"statistic {state}"] = _share(states[state], torch.from_numpy(part))
    return found


def _share(found: Any, expected: Any, largest: float | None = None) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    largest = expected.detach().double().abs().max().item() if largest is None else largest
    difference = (found.detach().double() - expected.detach().double()).abs().max().item()
    return difference / largest if largest > 0 else difference


def check(name: str, size: int, folder: Path, by_tokens: bool = False) -> None:
    path = folder / f"{name}.onnx"
    ir.save(EXAMPLES[name].make(), path)
    for found in run_on_ranks(size, differences, name, str(path), by_tokens):
        wrong = {what: share for what, share in found.items() if not share <= BOUND}
        assert not wrong
        assert len(found) > 4


FAST = ("gpt2", "gpt2-untied", "gpt2-opset13", "bert", "squeezenet", "mnist", "mnist-conv")
EXPORTED = tuple(
    name for name in EXAMPLES if name not in (*FAST, "gpt2-wide") and not name.endswith(("-even", "-fused"))
)


@pytest.mark.parametrize("name", FAST)
def test_two_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EXPORTED)
def test_ranks_compute_what_one_does_for_exports(name: str, size: int, tmp_path: Path) -> None:
    check(name, size, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_four_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    check(name, 4, tmp_path)


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("name", ["gpt2-fused", "bert-fused", pytest.param("llama-fused", marks=pytest.mark.slow)])
def test_two_ranks_compute_what_one_does_after_fusion(name: str, by_tokens: bool, tmp_path: Path) -> None:
    check(name, 2, tmp_path, by_tokens)


def test_norms_over_what_ranks_share_exchange_a_few_numbers_a_row(tmp_path: Path) -> None:
    """And each layer around them one sum forward and one backward, as without a norm."""
    graph = EXAMPLES["inner-norms-fused"].graph()
    plan = planned(EXAMPLES["inner-norms-fused"], graph, 2)
    assert {"wide.0.weight", "layer_norm.weight", "out.0.weight", "rms_norm.weight", "scale", "shift"} <= {
        graph.known_as.paths.get(name, name) for name in plan.shardings
    }
    types = [node.op_type for node in localize(graph, plan, 0).model.graph if node.domain == "onward.parallel"]
    assert [types.count(kind) for kind in ("LayerNormOverRanks", "RMSNormOverRanks")] == [1, 1]
    # Of each MLP, and of the mean of the responses.
    assert types.count("AllReduce") == types.count("Enter") == 4
    check("inner-norms-fused", 2, tmp_path)


BY_TOKENS = ("gpt2", "gpt2-untied", "bert")


@pytest.mark.parametrize("name", BY_TOKENS)
def test_two_ranks_that_share_tokens_compute_what_one_does(name: str, tmp_path: Path) -> None:
    check(f"{name}-even", 2, tmp_path, by_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "normed-heads"])
def test_four_ranks_that_share_tokens_compute_what_one_does(name: str, tmp_path: Path) -> None:
    check(f"{name}-even", 4, tmp_path, by_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("by_tokens", [False, True])
def test_eight_ranks_compute_what_one_does(by_tokens: bool, tmp_path: Path) -> None:
    check("gpt2-wide", 8, tmp_path, by_tokens)
