"""What a rank is put together of: alone, and as one of two stages."""

from __future__ import annotations

from typing import Any

import torch

from onward.engine.building.assembly import Assembly, assemble
from onward.engine.building.pipelined import PipelinedForward
from onward.engine.building.preparation import plan_run
from onward.engine.inputs.loss_normalization import LossNormalization
from onward.engine.micro_batches import PipelinedMicroBatches, SequentialMicroBatches
from onward.engine.network.forward import Forward
from onward.parallel.launch.process import in_world_of_one, start
from onward.parameters import Parameters
from tests.plan.staged_models import batch_of, graph_of
from tests.ranks import run_on_ranks


def assembly(parameters: Parameters, name: str) -> Assembly:
    distributed = parameters.distributed
    mesh = start(distributed, "cpu") if distributed.pipeline_parallel_size > 1 else in_world_of_one()
    graph = graph_of(name)
    return assemble(parameters, mesh, graph, plan_run(parameters, mesh.topology, graph, {}), [].append, {})


def parameters_of(**distributed: Any) -> Parameters:
    return Parameters.from_mapping(
        {
            "paths": {"model_path": "model.onnx"},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {
                "batch_size": 2,
                "num_train_steps": 2,
                "gradient_accumulation_steps": 2,
                "mapped_dimensions": {"batch": 2, "sequence": 5},
            },
            "learning_rate": {"initial_lr": 1e-3},
            "distributed": distributed,
            "speed": {"compile": False},
        }
    )


def micro_batches(found: Assembly, values: tuple[str, ...] = ()) -> Any:
    assert found.graph.loss_names is not None
    asked = parameters_of()
    shares = LossNormalization(found.state.mesh, asked.loss, found.graph.loss_names, asked.training, False)
    return found.micro_batches(shares, values, {}, {}, None)


def test_alone_there_is_one_network_and_no_stage() -> None:
    found = assembly(parameters_of(zero_stage=1, zero_offload_to_cpu=True), "gpt2")
    assert (found.stages, found.pipeline, list(found.computes)) == (None, None, [])
    assert list(found.modules) == list(found.networks)
    assert len(found.networks) == 1
    assert set(found.state.weights) == set(found.graph.weights)
    assert "distributed.zero_offload_to_cpu changes nothing: this run is in host memory already." in found.notes
    assert isinstance(micro_batches(found), SequentialMicroBatches)
    assert isinstance(found.evaluation(("logits",), {}), Forward)


def two_stages() -> dict[str, Any]:
    parameters = parameters_of(pipeline_parallel_size=2)
    found = assembly(parameters, "gpt2")
    assert found.stages is not None
    evaluation = found.evaluation(("logits",), {})
    assert isinstance(evaluation, PipelinedForward)
    assert isinstance(micro_batches(found), PipelinedMicroBatches)
    for module in found.modules:
        module.eval()
    return {
        "weights": set(found.state.weights),
        "inputs": set(found.reader({}, {}).to_tensors(batch_of("gpt2", 0))),
        "copies": found.state.weights["wte.weight"].copies,
        "written": found.state.weights["wte.weight"].is_written,
        "values": evaluation(batch_of("gpt2", 0))["logits"],
    }


def test_two_stages_share_the_network_and_read_the_whole_batch() -> None:
    first, last = run_on_ranks(2, two_stages)
    whole = assembly(parameters_of(), "gpt2")
    assert first["weights"] | last["weights"] == set(whole.graph.weights)
    assert first["weights"] & last["weights"] == {"wte.weight"}
    assert first["inputs"] == last["inputs"] == {"input_ids", "labels"}
    assert (first["copies"], last["copies"]) == (2, 2)
    assert (first["written"], last["written"]) == (True, False)
    whole.networks[0].eval()
    with torch.no_grad():
        expected = whole.evaluation(("logits",), {})(batch_of("gpt2", 0))["logits"]
    for rank in (first, last):
        torch.testing.assert_close(rank["values"], expected, rtol=1e-6, atol=1e-6)
