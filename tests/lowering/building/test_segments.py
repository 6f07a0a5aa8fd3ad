"""A program cut into segments, anywhere, gives the bits of the full one."""

from __future__ import annotations

import random

import pytest
import torch

from onward.lowering.building.segments import run_segments, split_program
from onward.lowering.building.specialization import specialize
from onward.lowering.module import OnnxModule
from tests.plan.staged_models import batch_of, graph_of


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert", "squeezenet", "u_net", "awkward"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_cut_at_random_places_the_result_is_the_same(name: str, count: int) -> None:
    graph = graph_of(name)
    network = OnnxModule(graph).train(False)
    outputs = (str(graph.loss), *(str(value.name) for value in graph.model.graph.outputs))
    program = network.program_for(tuple(dict.fromkeys(outputs)))
    features, tensors = batch_of(name, 0), network.tensors_by_name()
    inputs = {key: features[key] for key in program.inputs}
    expected = program(False, network.device, tuple(inputs.values()), tensors)
    draw = random.Random(count)
    places = sorted(draw.randrange(count) for _ in graph.model.graph)
    labels = [str(node.name or node.outputs[0].name) for node in graph.model.graph]
    cut = split_program(program, dict(zip(labels, places, strict=True)), count)
    assert len(cut.segments) == count
    found = run_segments(cut, False, network.device, inputs, tensors)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert set(cut.tensors) == set(program.tensors)
    # Numbers, too, are found by the segment that reads them, where tensors alone are handed on.
    alone = split_program(program, dict(zip(labels, places, strict=True)), count, hands_on_tensors_alone=True)
    for segment in alone.segments:
        outputs_of = next(iter(segment.code.graph.find_nodes(op="output"))).args[0]
        assert not any(node.meta.get("is_host") for node in outputs_of)
    found = run_segments(alone, False, network.device, inputs, tensors)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_output_that_follows_from_constants_is_given_out() -> None:
    """It is computed once, when the program is specialized; no segment has it as a result."""
    network = OnnxModule(graph_of("gpt2")).train(False)
    features, tensors = batch_of("gpt2", 0), network.tensors_by_name()
    program = network.program_for(("causal/LessOrEqual_output", "logits"))
    inputs = {key: features[key] for key in program.inputs}
    special = specialize(program, network.device, tuple(inputs.values()), tensors, frozenset())
    expected = program(False, network.device, tuple(inputs.values()), tensors)
    cut = split_program(special, {}, 1)
    assert len(cut.folded) == 1
    found = run_segments(cut, False, network.device, inputs, tensors)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
