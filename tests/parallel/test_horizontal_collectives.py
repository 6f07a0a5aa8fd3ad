"""Exchanges of a rank's graph are counted against Megatron-LM's formula: two all-reduces a layer and direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.lowering.context import ExecutionContext
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import plan_horizontal
from tests.parallel.horizontal_models import CROSS_ENTROPY, GPT2
from tests.ranks import run_on_ranks

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 8, 32, 96

Calls = Counter[tuple[str, str, int]]
"""(direction, exchange, bytes of a rank's operand) -> calls."""


def count_calls(layers: int, by_tokens: bool) -> tuple[Calls, float]:
    """Exchanges of one training step of GPT-2 on this rank, and its loss."""
    model = create_model("gpt2", **{**GPT2, "layers": layers})
    graph = make_training_graph(model, loss=CROSS_ENTROPY)
    shape = (BATCH, LENGTH)
    facts = find_value_facts(graph, {"input_ids": shape, "labels": shape})
    plan = plan_horizontal(graph, dist.get_world_size(), facts.shapes, facts.numbers, sequence_parallel=by_tokens)
    context = ExecutionContext(horizontal_group=str(dist.group.WORLD.group_name))
    net = OnnxModule(localize(graph, plan, dist.get_rank()), ("loss",), context=context).train()
    calls: Calls = Counter()
    direction = "forward"

    def counting(exchange: str, place: int) -> Callable[..., Any]:
        original = getattr(dist, exchange)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            operand = arguments[place]
            tensors = operand if isinstance(operand, list) else [operand]
            calls[direction, exchange, sum(x.numel() * x.element_size() for x in tensors)] += 1
            return original(*arguments, **keywords)

        return counted

    dist.all_reduce = counting("all_reduce", 0)
    dist.all_gather = counting("all_gather", 1)
    dist.reduce_scatter = counting("reduce_scatter", 1)
    tokens = torch.arange(BATCH * LENGTH).reshape(shape) % VOCABULARY
    loss = net(tokens, tokens)
    direction = "backward"
    loss.backward()
    return calls, loss.item()


def calls_on_ranks(layers: int, size: int, by_tokens: bool = False) -> Calls:
    """The calls of every rank, which are the same on all."""
    results = run_on_ranks(size, count_calls, layers, by_tokens)
    assert all(calls == results[0][0] for calls, _ in results)
    assert len({loss for _, loss in results}) == 1
    return results[0][0]


def calls_of_two_layers(size: int, by_tokens: bool) -> dict[tuple[str, str, int], int]:
    """What three layers cost more than one."""
    one, three = calls_on_ranks(1, size, by_tokens), calls_on_ranks(3, size, by_tokens)
    three.subtract(one)
    return {key: count for key, count in three.items() if count}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(size: int) -> None:
    """Shoeybi et al., 2019, section 3, figure 4: each of b·s·h elements, and no other exchange in a layer."""
    activation = BATCH * LENGTH * WIDTH * 4
    assert calls_of_two_layers(size, by_tokens=False) == {
        ("forward", "all_reduce", activation): 2 * 2,
        ("backward", "all_reduce", activation): 2 * 2,
    }


def test_a_layer_shared_by_tokens_costs_two_pairs_forward_and_two_backward() -> None:
    """Korthikanti et al., 2022, section 4.2.2: an all-reduce becomes a reduce-scatter and an all-gather."""
    activation = BATCH * LENGTH * WIDTH * 4
    assert calls_of_two_layers(2, by_tokens=True) == {
        ("forward", "reduce_scatter", activation): 2 * 2,
        ("forward", "all_gather", activation // 2): 2 * 2,
        ("backward", "reduce_scatter", activation): 2 * 2,
        ("backward", "all_gather", activation // 2): 2 * 2,
    }


def test_the_rest_costs_one_sum_a_table_one_for_the_output_layer_and_two_small_ones_for_the_loss() -> None:
    activation, row = BATCH * LENGTH * WIDTH * 4, BATCH * LENGTH * 4
    assert calls_on_ranks(1, 2) == {
        ("forward", "all_reduce", activation): 2 + 1,
        ("forward", "all_reduce", row): 1,
        ("forward", "all_reduce", 2 * row): 1,
        ("backward", "all_reduce", activation): 2 + 1,
    }
