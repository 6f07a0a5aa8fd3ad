"""Dropout over tensor-parallel ranks: parts are dropped differently, full values alike, and generators stay in step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.lowering.context import ExecutionContext
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.parallel.horizontal.random import drop_part, numbers_of_rank
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import plan_horizontal
from tests.parallel.horizontal_models import CROSS_ENTROPY, GPT2
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")


def test_ranks_drop_different_elements_and_their_generators_go_on_alike() -> None:
    kept, states = [], []
    for rank in range(3):
        torch.manual_seed(5)
        kept.append(drop_part(torch.ones(4000), 0.25, rank)[1])
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)
    for left, right in ((0, 1), (0, 2), (1, 2)):
        both = (kept[left] & kept[right]).double().mean().item()
        assert abs(both - 0.75**2) < 5 * (0.5625 * 0.4375 / 4000) ** 0.5  # independent, within 5 deviations
    assert abs(kept[0].double().mean().item() - 0.75) < 5 * (0.75 * 0.25 / 4000) ** 0.5


def test_each_call_draws_other_numbers_and_a_restored_state_the_same() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = (drop_part(torch.ones(100), 0.5, 1)[1] for _ in range(2))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(drop_part(torch.ones(100), 0.5, 1)[1], first)


def test_a_failure_inside_leaves_the_generator_in_step() -> None:
    torch.manual_seed(5)
    with numbers_of_rank(CPU, 0):
        torch.rand(3)
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    try:
        with numbers_of_rank(CPU, 1):
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), expected)


def test_gradients_follow_the_mask_also_when_a_segment_is_repeated() -> None:
    x = torch.randn(50, requires_grad=True)
    torch.manual_seed(5)
    result, mask = drop_part(x, 0.5, 1)
    (plain,) = torch.autograd.grad((result * result).sum(), x)
    torch.testing.assert_close(plain, torch.where(mask, 2 * x * 4, 0).detach())
    torch.manual_seed(5)
    repeated = checkpoint(lambda y: (drop_part(y, 0.5, 1)[0] ** 2).sum(), x, use_reentrant=False)
    (again,) = torch.autograd.grad(repeated, x)
    assert torch.equal(again, plain)


def dropped(_: int) -> dict[str, torch.Tensor]:
    graph = make_training_graph(create_model("gpt2", **{**GPT2, "layers": 1, "dropout": 0.5}), loss=CROSS_ENTROPY)
    facts = find_value_facts(graph, {"input_ids": (3, 5), "labels": (3, 5)})
    plan = plan_horizontal(graph, 2, facts.shapes, facts.numbers)
    part, whole = "h.0.attn/Dropout_output", "h.0.attn/Dropout_2_output"
    assert part in plan.values
    assert whole not in plan.values
    context = ExecutionContext(horizontal_group=str(dist.group.WORLD.group_name))
    net = OnnxModule(localize(graph, plan, dist.get_rank()), ("loss", part, whole), context=context).train()
    torch.manual_seed(3)
    tokens = torch.arange(15).reshape(3, 5)
    return dict(zip(("loss", "part", "whole"), (x.detach() for x in net(tokens, tokens)), strict=True))


def test_dropout_of_a_model_differs_on_parts_and_agrees_on_whole_values() -> None:
    left, right = run_on_ranks(2, dropped, 0)
    assert torch.equal(left["whole"], right["whole"])
    assert torch.equal(left["loss"], right["loss"])
    assert 0.2 < (left["whole"] == 0).double().mean() < 0.8
    assert not torch.equal(left["part"] == 0, right["part"] == 0)
