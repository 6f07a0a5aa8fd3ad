"""What each stage has, receives and relays; and what is no plan at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from onward.errors import ModelError, ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.plan.pipeline.balance import balanced_stages
from onward.plan.pipeline.cut_list import stages_by_name
from onward.plan.pipeline.stages import StagePlan, Transfer, plan_stages
from onward.plan.roles import find_roles
from tests.plan.staged_models import AWKWARD_STAGES, Sketch, graph_of


def by_name(graph: TrainingGraph, stages: dict[str, int], count: int) -> StagePlan:
    roles = find_roles(graph)
    return plan_stages(graph, stages_by_name(graph, roles, stages, count), count, roles)


def balanced(name: str, count: int) -> StagePlan:
    graph = graph_of(name)
    return plan_stages(graph, balanced_stages(graph, count), count)


def names(transfers: tuple[Transfer, ...]) -> list[str]:
    return [transfer.name for transfer in transfers]


@pytest.fixture(scope="module")
def awkward() -> StagePlan:
    return by_name(graph_of("awkward"), AWKWARD_STAGES, 4)


def test_values_travel_through_the_stages_between(awkward: StagePlan) -> None:
    assert [names(stage.received) for stage in awkward.stages] == [
        [],
        ["turned", "flag", "best", "size"],
        ["flag", "size", "sum1", "side_fc"],
        ["size", "side_fc", "fc2"],
    ]
    for before, after in zip(awkward.stages, awkward.stages[1:], strict=False):
        assert before.sent == after.received
    assert [stage.relayed for stage in awkward.stages] == [(), ("flag", "size"), ("size", "side_fc"), ()]


def test_only_floats_on_the_way_from_a_weight_carry_a_gradient(awkward: StagePlan) -> None:
    carry = {t.name: t.with_gradient for stage in awkward.stages for t in stage.received}
    assert carry == {
        "turned": True, "flag": False, "best": False, "size": False, "sum1": True, "side_fc": True, "fc2": True,
    }  # fmt: skip
    assert {t.comes_from for t in awkward.stages[3].received if t.name == "size"} == {0}


def test_masks_are_computed_wherever_they_are_needed(awkward: StagePlan) -> None:
    assert [stage.repeated for stage in awkward.stages[1:3]] == [("above", "mask", "scale")] * 2
    assert awkward.stages[2].inputs == ("x",)
    assert "mask" not in awkward.stage_of_node


def test_a_weight_read_on_two_stages_lies_on_both(awkward: StagePlan) -> None:
    assert awkward.shared_weights == {"w1": (1, 3)}
    assert [stage.index for stage in awkward.stages if "w1" in stage.weights] == [1, 3]
    assert [stage.index for stage in awkward.stages if "b3" in stage.weights] == [3]


def test_a_tied_embedding_is_shared_and_transposed_where_it_is_read() -> None:
    plan = balanced("gpt2", 4)
    assert plan.shared_weights == {"wte.weight": (0, 3)}
    transposed = [name for name in plan.stages[3].repeated if "lm_head" in name or "wte" in name]
    assert transposed or any("Transpose" in name for name in plan.stages[3].repeated)
    for stage in plan.stages[1:]:
        assert len(stage.received) == 1


def test_every_skip_of_a_u_net_is_relayed() -> None:
    graph = graph_of("u_net")
    levels = {"down0": 0, "pool0": 0, "down1": 1, "pool1": 1, "down2": 2, "wide1": 3, "joined1": 3, "up1": 3,
              "wide0": 4, "joined0": 4, "up0": 4, "image": 4}  # fmt: skip
    nodes = [str(node.outputs[0].name) for node in graph.model.graph]
    stages = {node: levels[node.partition(".")[0]] for node in nodes if node.partition(".")[0] in levels}
    plan = by_name(graph, stages, 5)
    assert [stage.relayed for stage in plan.stages] == [(), ("down0",), ("down0", "down1"), ("down0",), ()]
    assert names(plan.stages[4].received) == ["down0", "up1"]


def test_every_node_and_weight_has_its_place() -> None:
    for name in ("gpt2", "bert", "squeezenet", "u_net"):
        graph = graph_of(name)
        plan = balanced(name, 3)
        assert {weight for stage in plan.stages for weight in stage.weights} == set(graph.weights)
        assert sorted(state for stage in plan.stages for state in stage.states) == sorted(graph.states)
        assert {node for stage in plan.stages for node in stage.nodes} == {
            str(node.outputs[0].name) for node in find_roles(graph).nodes
        }
        for node, stage in plan.stage_of_node.items():
            assert [s.index for s in plan.stages if node in s.nodes] == [stage]
        assert [stage.index for stage in plan.stages if str(graph.loss) in stage.outputs] == [2]


def test_outputs_stay_on_the_stage_that_computes_them() -> None:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    early = sketch.node("Gemm", "early", x, sketch.weight("w0", 4, 4))
    late = sketch.node("Gemm", "late", early, sketch.weight("w1", 4, 4))
    for value in (early, late):
        value.shape = ir.Shape(["batch", 4])
    loss = LossSpec(type="mean_squared_error", prediction="late", label="y")
    plan = by_name(make_training_graph(sketch.model(early, late), loss=loss), {"early": 0, "late": 1}, 2)
    assert [stage.outputs for stage in plan.stages] == [("early",), ("late", "loss")]


def refused(graph: TrainingGraph, stages: dict[str, int], count: int, words: str) -> None:
    with pytest.raises(ParametersError, match=words):
        by_name(graph, stages, count)


def test_a_value_that_goes_backward_is_refused() -> None:
    stages = {**AWKWARD_STAGES, "fc0": 1}
    refused(graph_of("awkward"), stages, 4, "the stages go backward: 'fc0', which node 'node_fc0' computes on stage 1, "
            "is read by node 'node_relu0' on stage 0")  # fmt: skip
    early = {**AWKWARD_STAGES, "relu0": 3, "turned": 3, "back": 3, "fc1": 3, "sum1": 3, "gated": 3, "fc2": 3,
             "side_fc": 2, "shaped": 2}  # fmt: skip
    refused(graph_of("awkward"), early, 4, "the stages go backward: 'size'")


def test_a_stage_may_hold_frozen_weights_only() -> None:
    """Gradients travel back through it where there is something to train before it, and from it where there is not."""
    stages = {"fc0": 0, "relu0": 0, "fc1": 1, "relu1": 1, "fc2": 2, "relu2": 2, "logits": 2}
    for frozen, travels in (("fc1", [True, True]), ("fc0", [False, True])):
        graph = graph_of("mlp")
        graph = replace(graph, weights=tuple(name for name in graph.weights if not name.startswith(frozen)))
        plan = by_name(graph, stages, 3)
        assert [bool(stage.weights) for stage in plan.stages] == [not frozen.endswith(str(i)) for i in range(3)]
        assert [stage.received[0].with_gradient for stage in plan.stages[1:]] == travels


def test_a_loss_before_the_last_stage_is_refused() -> None:
    """The loss here is an output of the model's own, and another output comes after it."""
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    first = sketch.node("Gemm", "first", x, sketch.weight("w0", 4, 4))
    loss = sketch.node(
        "ReduceMean", "own_loss", sketch.node("Gemm", "second", first, sketch.weight("w1", 4, 4)), keepdims=0
    )
    loss.shape = ir.Shape([])
    row = sketch.node("Reshape", "row", loss, sketch.weight("one", array=np.array([1, 1])))
    after = sketch.node("Gemm", "after", row, sketch.weight("w2", 1, 4))
    after.shape = ir.Shape([1, 4])
    graph = make_training_graph(
        sketch.model(loss, after), loss=LossSpec(type="output", prediction="own_loss"), weights_to_train=("w0", "w1")
    )
    stages = {"first": 0, "second": 1, "own_loss": 1, "row": 2, "after": 2}
    with pytest.raises(ParametersError, match=r"the loss 'own_loss' is computed on stage 1, but the last stage is 2"):
        by_name(graph, stages, 3)


def test_a_stage_that_receives_nothing_is_refused() -> None:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    aside = sketch.node("Gemm", "aside", x, sketch.weight("w0", 4, 4))
    main = sketch.node("Gemm", "main", x, sketch.weight("w1", 4, 4))
    for value in (aside, main):
        value.shape = ir.Shape(["batch", 4])
    loss = LossSpec(type="mean_squared_error", prediction="main", label="y")
    graph = replace(make_training_graph(sketch.model(aside, main), loss=loss), weights=("w0", "w1"))
    refused(graph, {"aside": 0, "main": 1}, 2, "stage 1 of 2 receives nothing")


def test_a_graph_without_loss_and_values_that_are_no_tensors_are_refused() -> None:
    graph = graph_of("mlp")
    with pytest.raises(ModelError, match="has no loss"):
        by_name(replace(graph, loss_names=None), {**dict.fromkeys(("fc0", "relu0", "fc1", "relu1"), 0),
                                                  **dict.fromkeys(("fc2", "relu2", "logits"), 1)}, 2)  # fmt: skip
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    first = sketch.node("Gemm", "first", x, sketch.weight("w0", 4, 4))
    both = sketch.node("SequenceConstruct", "both", first, first)
    both.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    at = sketch.node("SequenceAt", "at", both, sketch.weight("index", array=np.array(1)))
    last = sketch.node("Gemm", "last", at, sketch.weight("w1", 4, 4))
    last.shape = ir.Shape(["batch", 4])
    loss = LossSpec(type="mean_squared_error", prediction="last", label="y")
    with pytest.raises(ModelError, match=r"'both' is a Sequence\(.*not a tensor, and would have to be sent from"):
        by_name(make_training_graph(sketch.model(last), loss=loss), {"first": 0, "both": 0, "at": 1, "last": 1}, 2)


def test_running_statistics_of_two_stages_are_refused() -> None:
    graph = graph_of("u_net")
    norms = [node for node in graph.model.graph if node.op_type == "BatchNormalization"]
    norms[-1].replace_input_with(3, norms[0].inputs[3])
    graph = replace(graph, states=("down0.mean", *(s for s in graph.states if not s.endswith("up0.mean"))))
    with pytest.raises(ModelError, match=r"the running statistic 'down0.mean' is updated on stages 0, 1"):
        plan_stages(graph, balanced_stages(graph, 2), 2)


def test_a_stage_without_nodes_is_refused() -> None:
    graph = graph_of("mlp")
    stages = {node: 2 * stage for node, stage in balanced_stages(graph, 2).items()}
    with pytest.raises(ParametersError, match=r"stage 1 of 3 computes nothing\. Give it nodes, or use fewer stages"):
        plan_stages(graph, stages, 3)
