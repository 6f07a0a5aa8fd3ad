"""Why a model has no sequence to cut, by the modules that mix its positions."""

from __future__ import annotations

import pytest

from onward.errors import ParametersError
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.plan.context.cutting import plan_context
from tests.parallel.horizontal_models import EXAMPLES
from tests.plan.horizontal.graphs import parsed_model


def test_a_model_without_sequences_is_refused_with_what_mixes_positions() -> None:
    """A strided convolution, a running sum, and a state that is carried from one position to the next."""
    steps = "".join(f" x{t} = Gather <axis = 2> (a, i{t}) s{t} = Mul (s{t - 1}, x{t})" for t in range(1, 4))
    text = (
        "g (float[B, 4, 12] x, float[4, 4, 2] w) => (float[B, 4] s3)"
        f" <int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{2}}, int64 i3 = {{3}}, int64 two = {{2}},"
        " int64[1] zero = {0}, int64[1] far = {100}, int64[1] one = {1}>"
        " { c = Conv <strides = [2]> (x, w)  sum = CumSum (c, two)  a = Slice (sum, zero, far, one)"
        f"  s0 = Gather <axis = 2> (sum, i0) {steps} }}"
    )
    graph = make_training_graph(parsed_model(text, {"w": (4, 4, 2)}))
    graph.model.graph[0].metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'fewer', 'conv']"
    facts = find_value_facts(graph, {"x": (2, 4, 12)})
    with pytest.raises(ParametersError) as caught:
        plan_context(graph, 2, facts.shapes, facts.numbers)
    assert str(caught.value) == (
        "distributed.context_parallel_size is 2, but the model has neither attention over at least 4 tokens nor a "
        "convolution of stride 1 that keeps their number and reads no further than the next chunk of a rank, by which "
        "sequences are found. It mixes positions by 'fewer' "
        "(Conv), which mixes neighbouring positions; node 'sum' (CumSum), where each step needs the one before it; "
        "node 's0' (Gather) (a loop over positions), where each step needs the one before it. Set it to 1, and use "
        "data, tensor or pipeline parallelism."
    )


def test_a_sequence_that_is_too_short_is_refused_with_the_attention_and_its_length() -> None:
    example = EXAMPLES["gpt2"]
    graph = example.graph()
    facts = find_value_facts(graph, {n: (2, *x.shape[1:]) for n, x in example.features().items()})
    with pytest.raises(ParametersError, match=r"attends to, in '.*', has \d tokens; 9 ranks need at least 18"):
        plan_context(graph, 9, facts.shapes, facts.numbers)
