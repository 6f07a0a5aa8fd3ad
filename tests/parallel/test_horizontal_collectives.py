"""Exchanges of a rank's graph are counted against Megatron-LM's formula: two all-reduces a layer and direction."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.lowering.shapes import find_value_facts
from onward.models import create_model
from onward.parallel.horizontal import connect
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import plan_horizontal
from tests.parallel.horizontal_models import CROSS_ENTROPY, GPT2
from tests.ranks import run_on_ranks

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 5, 32, 96

Calls = Counter[tuple[str, int]]
"""(direction, bytes) -> calls."""


def count_calls(layers: int) -> tuple[Calls, float]:
    """All-reduces of one training step of GPT-2 on this rank, and its loss."""
    connect(dist.group.WORLD)
    model = create_model("gpt2", **{**GPT2, "layers": layers})
    graph = make_training_graph(model, loss=CROSS_ENTROPY)
    shape = (BATCH, LENGTH)
    facts = find_value_facts(graph, {"input_ids": shape, "labels": shape})
    plan = plan_horizontal(graph, dist.get_world_size(), facts.shapes, facts.numbers)
    net = OnnxModule(localize(graph, plan, dist.get_rank()), ("loss",)).train()
    calls: Calls = Counter()
    direction = "forward"
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        calls[direction, tensor.numel() * tensor.element_size()] += 1
        return original(tensor, *arguments, **keywords)

    dist.all_reduce = counted
    tokens = torch.arange(BATCH * LENGTH).reshape(shape) % VOCABULARY
    loss = net(tokens, tokens)
    direction = "backward"
    loss.backward()
    dist.all_reduce = original
    return calls, loss.item()


def calls_on_ranks(layers: int, size: int) -> Calls:
    """The calls of every rank, which are the same on all."""
    results = run_on_ranks(size, count_calls, layers)
    assert all(calls == results[0][0] for calls, _ in results)
    assert len({loss for _, loss in results}) == 1
    return results[0][0]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(size: int) -> None:
    """Shoeybi et al., 2019, section 3, figure 4: each of b·s·h elements, and no other exchange in a layer."""
    one, three = calls_on_ranks(1, size), calls_on_ranks(3, size)
    activation = BATCH * LENGTH * WIDTH * 4
    three.subtract(one)
    assert {key: count for key, count in three.items() if count} == {
        ("forward", activation): 2 * 2,
        ("backward", activation): 2 * 2,
    }


def test_the_rest_costs_one_all_reduce_a_table_one_for_the_output_layer_and_two_small_ones_for_the_loss() -> None:
    calls = calls_on_ranks(1, 2)
    activation, row = BATCH * LENGTH * WIDTH * 4, BATCH * LENGTH * 4
    positions = LENGTH * WIDTH * 4
    assert calls == {
        ("forward", activation): 2 + 1,
        ("forward", positions): 1,
        ("forward", row): 1,
        ("forward", 2 * row): 1,
        ("backward", activation): 2 + 1,
    }
