"""What the ranks of an entire run exchange, counted: Megatron's all-reduces in a layer, one mean of gradients an
update.

Counted are the exchanges that torch's profiler sees on the backend, whoever asked for them: operators of a rank's
graph, DDP's reducer or FSDP2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from tests.invariants import exchanges
from tests.invariants.cases import TOKENS, WORDS
from tests.invariants.exchanges import ACCUMULATION, BATCH, MESSAGE, Calls, counted
from tests.invariants.layouts import Layout
from tests.invariants.rank_pool import call_on_ranks, end_ranks

WIDTH, LAYERS = 32, 2
LAYER = 12 * WIDTH**2 + 13 * WIDTH
"""Elements of the weights of a layer."""
NUMBERS = {("all_reduce", 1): 1, ("all_reduce", 2): 2, ("all_reduce", MESSAGE): 1}
"""The labels of each micro-batch; the norm and the loss, each with what is not finite; how to continue."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def of_one_update(folder: Path, layout: Layout, layers: int = LAYERS) -> tuple[Counter[tuple[str, int]], int]:
    """(exchange, elements) -> calls of rank 0, and how many elements of weights it holds."""
    calls, elements = exchanges.of_one_update(folder, layout, layers)[0]
    found = Counter[tuple[str, int]]()
    for (kind, size, _), count in calls.items():
        found[kind, size] += count
    return found, elements


def test_replicas_of_a_horizontal_pair_exchange_what_megatron_does_and_one_mean_an_update(tmp_path: Path) -> None:
    """Shoeybi et al., 2019, section 3: two sums of b·s·h elements a layer forward, two backward, for every micro-batch.

    Next to them: the embedding's sum and that before the output layer; of each row of logits, whose classes are cut,
    the largest, and two sums; single numbers: the labels of each micro-batch, the norm, the loss; how to continue.
    """
    layers = LAYERS
    calls, elements = of_one_update(tmp_path, Layout(2, 2, 1), layers)
    rows = BATCH // 2 * TOKENS
    assert calls == {
        ("all_reduce", rows * WIDTH): ACCUMULATION * (4 * layers + 2),
        ("all_reduce", rows): ACCUMULATION,
        ("all_reduce", 2 * rows): ACCUMULATION,
        ("all_reduce", elements): 1,
        **NUMBERS,
    }
    assert elements < WORDS * WIDTH + layers * 12 * WIDTH**2, "a rank holds a part of the weights"


def test_replicas_exchange_one_mean_an_update_whatever_the_accumulation(tmp_path: Path) -> None:
    calls, elements = of_one_update(tmp_path, Layout(2, 1, 1))
    assert calls == {("all_reduce", elements): 1, **NUMBERS}
    assert elements > WORDS * WIDTH + 2 * 12 * WIDTH**2


def test_a_layer_more_costs_a_horizontal_pair_four_sums_a_micro_batch(tmp_path: Path) -> None:
    fewer, _ = of_one_update(tmp_path / "fewer", Layout(1, 2, 1), 1)
    more, _ = of_one_update(tmp_path / "more", Layout(1, 2, 1), 2)
    activation = ("all_reduce", BATCH * TOKENS * WIDTH)
    assert more[activation] - fewer[activation] == 4 * ACCUMULATION
    assert sum(more.values()) - sum(fewer.values()) == 4 * ACCUMULATION


@pytest.mark.parametrize(
    ("stage", "gathers", "reductions"), [(1, 1, 1), (2, 1, ACCUMULATION), (3, 2 * ACCUMULATION, ACCUMULATION)]
)
def test_replicas_with_zero_exchange_a_layer_at_once(tmp_path: Path, stage: int, gathers: int, reductions: int) -> None:
    """Every layer is gathered and its gradients are sharded by one exchange; so is all that lies around the layers.

    Stage 3 gathers layers for either pass, what lies around them for both. Gloo shares out by adding up everything.
    """
    calls, elements = of_one_update(tmp_path, Layout(2, 1, 1, {"zero_stage": stage}))
    around = elements - LAYERS * LAYER // 2
    assert calls == {
        ("all_gather", LAYER // 2): LAYERS * gathers,
        ("all_gather", around): max(1, gathers // 2),
        ("all_reduce", LAYER): LAYERS * reductions,
        ("all_reduce", 2 * around): reductions,
        **NUMBERS,
    }


def count_by_hand() -> Calls:
    """Exchanges of the second micro-batch of `transformers`' GPT-2 in torch's own wrapping, a layer at once."""
    network = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_head=4, n_embd=WIDTH, vocab_size=WORDS, n_positions=TOKENS))
    for block in network.transformer.h:
        fully_shard(block)
    fully_shard(network)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    network(ids, labels=ids).loss.backward()
    with counted() as calls:
        network(ids, labels=ids).loss.backward()
    return calls


def test_zero_3_exchanges_for_a_micro_batch_what_layers_wrapped_by_hand_do(tmp_path: Path) -> None:
    by_hand = call_on_ranks(2, count_by_hand)[0]
    ours, _ = of_one_update(tmp_path, Layout(2, 1, 1, {"zero_stage": 3}))
    assert len(by_hand) == 4
    assert {call: count for call, count in ours.items() if call not in NUMBERS} == {
        (kind, size): ACCUMULATION * count for (kind, size, _), count in by_hand.items()
    }
