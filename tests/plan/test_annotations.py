"""Plans written into models as ONNX's multi-device annotations, and read from them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onward.commands.planning import plan
from onward.errors import ModelError
from onward.models import create_model
from onward.parameters import Parameters
from onward.plan.annotations import METADATA_KEY, annotate, compare_splits, read_requested_sharding
from onward.plan.horizontal.planning import HorizontalPlan
from onward.plan.shards import Sharding
from onward.plan.topology import Topology


def write_run(folder: Path, model: str = "model.onnx", **distributed: Any) -> Path:
    path = folder / "model.onnx"
    if not path.exists():
        ir.save(create_model("gpt2", size="tiny", layers=2, heads=2, width=16, vocab_size=64, context_length=8), path)
    run = folder / "run.yaml"
    run.write_text(
        f"""
paths: {{model_path: {model}}}
loss: {{type: softmax_cross_entropy, prediction: logits, label: labels}}
training: {{batch_size: 2, num_train_steps: 2, gradient_accumulation_steps: 2, mapped_dimensions: {{sequence: 8}}}}
learning_rate: {{initial_lr: 0.001}}
distributed: {json.dumps(distributed)}
"""
    )
    return run


def test_an_annotated_model_says_the_plan_and_still_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path, horizontal_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=3, zero_stage=2)
    target = tmp_path / "annotated.onnx"
    text = plan(run, write=target)
    assert f"wrote {target}: " in text
    onnx.checker.check_model(str(target), full_check=True)
    proto = onnx.load(target)
    assert proto.ir_version >= 11
    assert [(c.name, c.num_devices) for c in proto.configuration] == [("onward_h2_p2", 4)]
    of = {node.output[0]: own for node in proto.graph.node for own in node.device_configurations}
    assert {own.pipeline_stage for own in of.values()} == {0, 1}
    by_weight = {
        spec.tensor_name: (spec.sharded_dim[0].axis, spec.sharded_dim[0].simple_sharding[0].num_shards, *spec.device)
        for own in of.values()
        for spec in own.sharding_spec
    }
    assert by_weight["h.0.mlp.c_fc.weight"] == (1, 2, 0, 1)
    assert by_weight["h.0.mlp.c_proj.weight"] == (0, 2, 0, 1)
    assert by_weight["h.1.mlp.c_proj.weight"] == (0, 2, 2, 3), "the second stage has the last devices"
    facts = json.loads({p.key: p.value for p in proto.metadata_props}[METADATA_KEY])
    assert (facts["data_parallel_size"], facts["zero_stage"], facts["pipeline_schedule"]) == (3, 2, "1F1B")
    assert facts["blocks"]["h.0.attn.c_attn.weight"] == [16, 16, 16]
    inputs = {"input_ids": np.arange(16).reshape(2, 8)}
    results = [
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)[0]
        for path in (tmp_path / "model.onnx", target)
    ]
    np.testing.assert_array_equal(*results)


def test_the_stages_of_an_annotated_model_are_the_requested_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path, pipeline_parallel_size=2)
    annotated = tmp_path / "annotated.onnx"
    plan(run, write=annotated)
    proto = onnx.load(annotated)
    for node in proto.graph.node:  # all of the first layer and half of the second, which no balance would choose
        for own in node.device_configurations:
            own.pipeline_stage = int(any(name.startswith(("h.1.mlp", "h.1/Add_1", "ln_f", "logits")) for name in
                                         (*node.output, *node.input)))  # fmt: skip
    onnx.save(proto, annotated)
    text = plan(write_run(tmp_path, "annotated.onnx", pipeline_parallel_size=2))
    assert "the 2 pipeline stages are those of the model's own annotations ('onward_h1_p2')." in " ".join(text.split())
    assert "h.1" in next(line for line in text.splitlines() if line.split()[:3] == ["0", "rank", "0"])


def test_stages_that_do_not_fit_are_balanced_instead_and_it_is_said(tmp_path: Path) -> None:
    plan(write_run(tmp_path, pipeline_parallel_size=2), write=tmp_path / "annotated.onnx")
    run = write_run(
        tmp_path, "annotated.onnx", pipeline_parallel_size=2, pipeline_schedule="Interleaved1F1B", stages_per_rank=2
    )
    assert (
        "the model's annotations ('onward_h1_p2') name 2 pipeline stages, but pipeline_parallel_size and "
        "stages_per_rank ask for 4; stages are balanced by cost instead."
    ) in " ".join(plan(run).split())


def test_other_splits_than_the_plans_are_named(tmp_path: Path) -> None:
    plan = HorizontalPlan(size=2, shardings={"W": Sharding(0, (2,))})
    model = tiny()
    annotate(model, Topology(horizontal_size=2), plan, {}, {0: 0}, {})
    requested = read_requested_sharding(model, Topology(horizontal_size=2))
    assert requested is not None
    assert requested.splits == {"W": (0, 2)}
    assert compare_splits(requested, plan) == []
    assert compare_splits(requested, HorizontalPlan(size=2, shardings={"W": Sharding(1, (2,))})) == [
        "the model's annotations ('onward_h2_p1') ask for other splits than the plan, which is followed: 'W' "
        "(asked: axis 0 in 2; plan: axis 1 in 2)."
    ]
    assert (
        "plan: unsharded, since there is one tensor-parallel rank)"
        in compare_splits(requested, HorizontalPlan(size=1, reasons={"W": "there is one tensor-parallel rank"}))[0]
    )


def test_annotating_again_replaces_its_own_and_keeps_others() -> None:
    model = tiny()
    model.add_device_configuration("theirs", num_devices=2)
    model.graph[0].set_pipeline_stage(model.device_configurations[0], 1)
    for _ in range(2):
        annotate(
            model,
            Topology(horizontal_size=2),
            HorizontalPlan(size=2, shardings={"W": Sharding(0, (2,))}),
            {},
            {0: 0},
            {},
        )
    assert [one.name for one in model.device_configurations] == ["theirs", "onward_h2_p1"]
    assert [own.configuration.name for own in model.graph[0].device_configurations if own.configuration] == [
        "theirs", "onward_h2_p1",
    ]  # fmt: skip
    assert len(model.graph[0].sharding_of(model.graph.initializers["W"])) == 1


def test_a_model_without_annotations_requests_nothing() -> None:
    assert read_requested_sharding(tiny(), Topology(horizontal_size=2, pipeline_size=2)) is None


def tiny(**broken: Any) -> ir.Model:
    """One product, with an annotation whose parts may be broken."""
    weight = helper.make_tensor("W", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="product")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 2]) for name in "xy"]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [weight])
    proto = helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 20)])
    if broken:
        configuration = proto.configuration.add()
        configuration.name, configuration.num_devices = "mine", 2
        own = proto.graph.node[0].device_configurations.add()
        own.configuration_id = broken.get("configuration", "mine")
        own.pipeline_stage = broken.get("stage", 0)
        spec = own.sharding_spec.add()
        spec.tensor_name = broken.get("tensor", "W")
        spec.device.extend(broken.get("devices", [0, 1]))
        dim = spec.sharded_dim.add()
        dim.axis = broken.get("axis", 0)
        dim.simple_sharding.add().num_shards = broken.get("parts", 2)
    return ir.serde.deserialize_model(proto)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"configuration": "other"}, "node 'product' refers to configuration 'other', which is not declared "
         "(declared: 'mine')"),
        ({"tensor": "V"}, "node 'product' shards 'V', which is neither an input nor an output of it"),
        ({"devices": [0, 5]}, "node 'product' puts 'W' on device 5 of 2, numbered from 0"),
        ({"axis": 2}, "node 'product' shards axis 2 of 'W', which has 2 axes"),
        ({"parts": 0}, "node 'product' shards 'W' into 0 parts"),
        ({"stage": -1}, "node 'product' is in pipeline stage -1; stages are numbered from 0"),
    ],
)  # fmt: skip
def test_broken_annotations_are_refused(broken: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as error:
        read_requested_sharding(tiny(**broken), Topology())
    assert str(error.value) == (
        f"the model's multi-device annotations are broken: {words}. Fix them, or remove them (model.configuration and "
        "the nodes' device_configurations)."
    )
    assert read_requested_sharding(tiny(axis=0), Topology()) is not None


def test_broken_annotations_stop_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    proto = onnx.load(tmp_path / "model.onnx")
    proto.ir_version = 11
    proto.graph.node[0].device_configurations.add().configuration_id = "nobody"
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="'nobody', which is not declared \\(declared: none\\)"):
        plan(run)
    assert Parameters.load(run).paths.model_path == tmp_path / "model.onnx"
