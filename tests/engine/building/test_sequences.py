"""One plan of sequences serves batches of every size; what it was not made for is refused before it is computed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.data.shard import FeatureSpec
from onward.engine.building.preparation import plan_run
from onward.engine.building.sequences import plan_sequences
from onward.engine.inputs.features import FeatureReader
from onward.errors import DataError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.parameters import Parameters
from onward.plan.topology import Topology
from tests.invariants.cases import CASES
from tests.parallel.context.models import CLASSES, CONTEXT_EXAMPLES, WIDTH


@pytest.fixture(scope="module")
def merged() -> TrainingGraph:
    """A network whose samples are merged with their tokens; all sizes are open."""
    return CONTEXT_EXAMPLES["merged-samples"].graph()


def sizes(graph: TrainingGraph, batch: int, tokens: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in graph.model.graph.inputs:
        for size, number in zip(value.shape or (), (batch, tokens), strict=False):
            if isinstance(size, ir.SymbolicDim):
                found[str(size.value)] = number
    return found


def test_a_plan_does_not_depend_on_the_batch_that_it_is_made_for(merged: TrainingGraph) -> None:
    texts = []
    for batch in (1, 2, 8):
        plan, _, samples = plan_sequences(merged, 2, sizes(merged, batch, 8), batch)
        assert samples == 11, "5 divides the number of classes, 7 is next to the number of tokens"
        assert plan.share == 1.0
        texts.append(ir.to_proto(plan.of(merged).model).SerializeToString(deterministic=True))
    assert texts[0] == texts[1] == texts[2]


def test_the_number_of_samples_divides_no_other_size(merged: TrainingGraph) -> None:
    """Nor one next to it: sequences may lose a token."""
    samples = plan_sequences(merged, 2, sizes(merged, 2, 78), 2)[2]
    assert samples > 11
    assert all(n % samples for n in (77, 78, 79, WIDTH, CLASSES))


def test_data_of_another_length_are_refused_with_both(merged: TrainingGraph) -> None:
    plan = plan_sequences(merged, 2, sizes(merged, 2, 8), 2)[0]
    reader = FeatureReader(plan.of(merged), ("x",), torch.device("cpu"))
    for batch in (1, 2, 5):
        assert reader.to_tensors({"x": np.zeros((batch, 8, WIDTH), np.float32)})["x"].shape[0] == batch
    with pytest.raises(DataError) as caught:
        reader.check_specs({"x": FeatureSpec((16, WIDTH), np.dtype(np.float32))})
    assert "'x' has shape [16, 16] per sample; the model expects [8, 16]" in str(caught.value)
    assert "planned for sequences of 8: pad or cut those of all training and test data" in str(caught.value)


def test_a_pipeline_of_context_ranks_is_planned_with_the_sizes_that_are_open() -> None:
    """Lengths that the plan of sequences fixed are not looked up again: only those of the batch."""
    case = CASES["gpt2"]
    distributed = {"context_parallel_size": 2, "pipeline_parallel_size": 2, "horizontal_parallel_size": 2}
    training = {
        **case.training,
        "batch_size": 4,
        "num_train_steps": 2,
        "gradient_accumulation_steps": 2,
        "mapped_dimensions": {"sequence": 12},
    }
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": "m.onnx"},
            "loss": case.loss,
            "training": training,
            "distributed": distributed,
            "learning_rate": {"initial_lr": 1e-3},
        }
    )
    graph = make_training_graph(case.model(), loss=LossSpec(**case.loss))
    plan = plan_run(parameters, Topology.of_sizes(parameters.distributed), graph, {})
    assert (plan.context.size, plan.stage_count, plan.context.lengths) == (2, 2, (12,))
