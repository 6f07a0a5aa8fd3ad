"""Context parallelism on Gloo ranks: loss, outputs and the mean of the gradients equal one process's, for any model."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import torch.distributed as dist

import onward.parallel.context  # noqa: F401  its operators register themselves
from onward.engine.building.sequences import plan_sequences
from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.building.shapes import ValueFacts, find_value_facts
from onward.lowering.context import ExecutionContext
from onward.lowering.module import OnnxModule, input_types
from onward.plan.context.cutting import ContextPlan
from tests.parallel.context.models import CONTEXT_EXAMPLES
from tests.parallel.horizontal_models import EXAMPLES, Example
from tests.parallel.test_horizontal import BOUND, SMALLEST_SHARE, _share
from tests.ranks import run_on_ranks

ALL = {**EXAMPLES, **CONTEXT_EXAMPLES}


def facts_of(example: Example, graph: TrainingGraph) -> ValueFacts:
    """Of batches of two samples, of the same lengths."""
    names = {str(value.name) for value in graph.model.graph.inputs}
    shapes = {name: (2, *x.shape[1:]) for name, x in example.features().items() if name in names}
    return find_value_facts(graph, shapes)


def planned(example: Example, graph: TrainingGraph, size: int) -> ContextPlan:
    """For batches of any size."""
    _, shapes = input_types(graph)
    pairs = [
        (symbol, size) for n, s in shapes.items() for symbol, size in zip(s, example.features()[n].shape, strict=True)
    ]
    sizes = {symbol: size for symbol, size in pairs if isinstance(symbol, str)}
    return plan_sequences(graph, size, sizes, len(next(iter(example.features().values()))))[0]


def differences(name: str, path: str) -> dict[str, float]:
    """On one rank: how far everything is from what one process computes, as shares of the largest elements."""
    size, rank, example = dist.get_world_size(), dist.get_rank(), ALL[name]
    graph = example.graph(path)
    plan = planned(example, graph, size)
    assert graph.loss_names is not None
    scores = str(graph.model.graph.outputs[0].name)
    names = (graph.loss_names.loss, graph.loss_names.correct, graph.loss_names.counted, scores)
    outputs = tuple(one for one in names if one is not None)
    assert dist.group.WORLD is not None
    context = ExecutionContext(context_group=str(dist.group.WORLD.group_name), context_rank=rank)
    full, local = OnnxModule(graph, outputs), OnnxModule(plan.of(graph), outputs, context=context)
    features, results = example.features(), []
    for net in (full, local):
        net.train()
        results.append(net(*(features[i] for i in net.program.inputs)))
        results[-1][0].backward()
    found = {f"output {o}": _share(a, b) for o, a, b in zip(outputs, results[1], results[0], strict=True)}
    gradients = {w: g for w in graph.weights if (g := full.weights[w].grad) is not None}
    least = SMALLEST_SHARE * max(g.abs().max().item() for g in gradients.values())
    for weight, expected in gradients.items():
        gradient = local.weights[weight].grad
        gradient = torch.zeros_like(expected) if gradient is None else gradient
        dist.all_reduce(gradient)
        found[f"gradient of {weight}"] = _share(gradient / size, expected, max(least, expected.abs().max().item()))
    return found


def check(name: str, size: int, folder: Path) -> None:
    path = folder / f"{name}.onnx"
    ir.save(ALL[name].make(), path)
    for found in run_on_ranks(size, differences, name, str(path)):
        wrong = {what: share for what, share in found.items() if not share <= BOUND}
        assert not wrong
        assert len(found) > 4


FAST = ("gpt2", "merged-samples", "neighbours")
SLOW = (
    "gpt2-even", "gpt2-opset13", "bert-even", "bert-fused", "llama", "llama-fused", "transformers-gpt2", "fused-heads",
    "fused-grouped", "normed-heads",
    *(name for name in CONTEXT_EXAMPLES if name not in ("recurrent", *FAST)),
)  # fmt: skip


@pytest.mark.parametrize("name", FAST)
def test_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_ranks_compute_what_one_does_for_every_kind_of_sequence(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2-even", "bert-even", "llama-even", "llama-fused", "shifted-labels", "mixed", "patches", "neighbours"]
)
def test_four_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    check(name, 4, tmp_path)


@pytest.mark.slow
def test_a_model_of_which_little_can_be_cut_is_refused_with_what_needs_all_tokens() -> None:
    graph = CONTEXT_EXAMPLES["recurrent"].graph()
    with pytest.raises(
        ParametersError,
        match=r"only \d+% of the activations .*need all tokens at once.*: 'lstm' \(LSTM\) 3\d\.\d%\. Set it to 1",
    ):
        planned(CONTEXT_EXAMPLES["recurrent"], graph, 2)
