"""Cut lists in the original's format, stages by name, and what is wrong with them."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onward.errors import ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from onward.plan.pipeline.cut_list import CutEdge, parse_cut_list, stages_by_cut_list, stages_by_name
from onward.plan.pipeline.stages import StagePlan, plan_stages
from onward.plan.roles import find_roles
from tests.plan.staged_models import AWKWARD_STAGES, GPT2, graph_of


def cut(name: str, cuts: str | tuple[str, ...], count: int) -> StagePlan:
    graph = graph_of(name)
    roles = find_roles(graph)
    return plan_stages(graph, stages_by_cut_list(graph, roles, cuts, count), count, roles)


def refused(name: str, cuts: str | tuple[str, ...], count: int, words: str) -> None:
    with pytest.raises(ParametersError, match=words):
        cut(name, cuts, count)


def test_the_originals_format_is_read() -> None:
    tensors = {"1393", "407", "2369"}
    consumers = {"1463", "1585", "1707", "2439", "2561", "2683"}
    text = "1393:407-1463/1585/1707,2369:407-2439/2561/2683"
    expected = (
        (CutEdge("1393"), CutEdge("407", ("1463", "1585", "1707"))),
        (CutEdge("2369"), CutEdge("407", ("2439", "2561", "2683"))),
    )
    assert parse_cut_list(text, tensors, consumers) == expected
    assert parse_cut_list(text.split(","), tensors, consumers) == expected


def test_names_may_hold_the_separators() -> None:
    tensors = {"/a/Add:0", "/a-b/Mul", "x"}
    consumers = {"/a/MatMul", "/b/c-d", "y"}
    assert parse_cut_list(["/a/Add:0:x-/a/MatMul//b/c-d/y"], tensors, consumers) == (
        (CutEdge("/a/Add:0"), CutEdge("x", ("/a/MatMul", "/b/c-d", "y"))),
    )
    assert parse_cut_list(["/a-b/Mul-y"], tensors, consumers) == ((CutEdge("/a-b/Mul", ("y",)),),)


def test_a_chain_is_cut_where_it_is_asked() -> None:
    plan = cut("mlp", "relu0,relu2", 3)
    assert [stage.weights for stage in plan.stages] == [
        ("fc0.weight", "fc0.bias"),
        ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"),
        ("fc3.weight", "fc3.bias"),
    ]
    assert [[t.name for t in stage.received] for stage in plan.stages] == [[], ["relu0"], ["relu2"]]


def test_consumers_are_named_by_node_or_output_and_skips_in_each_cut_they_cross() -> None:
    for consumer in ("joined0", "node_joined0"):
        plan = cut("u_net", f"down0,down0-{consumer}:up1", 3)
        assert [stage.relayed for stage in plan.stages] == [(), ("down0",), ()]
        assert plan.stage_of_node["joined1"] == 1
        assert plan.stage_of_node["joined0"] == 2


def test_edges_of_masks_may_be_named_and_cut_nothing() -> None:
    plan = cut("awkward", "turned:flag:best:scale-sum1,fc2:side_fc:size", 3)
    assert [stage.repeated for stage in plan.stages[1:2]] == [("above", "mask", "scale")]


def test_one_cut_too_few_is_refused() -> None:
    refused("mlp", "relu0", 3, "holds 1 cuts, which make 2 stages; .* ask for 3, which takes 2 cuts")


def test_unknown_names_are_refused_with_near_ones() -> None:
    refused("mlp", "rely0", 2, "cut 0 .'rely0'. names the tensor 'rely0', which the model does not have; did you mean")
    refused("mlp", "relu0-fc9", 2, "cut 0 .* names the consumer 'fc9', which is no node of the model")
    refused(
        "mlp", "relu0,zzzzzz", 3, "cut 1 .'zzzzzz'. names the tensor 'zzzzzz', .*; `onward inspect` lists the names"
    )
    refused("mlp", "relu0-fc3", 2, r"names the consumer 'fc3'")
    refused("mlp", "relu0-logits", 2, "names 'logits' as a consumer of 'relu0', but that node does not read it; "
            "its consumers are 'node_fc1'")  # fmt: skip


def test_a_cut_that_does_not_separate_names_what_goes_around_it() -> None:
    words = "cut 0 cuts 'pool0', but its two sides are still connected through 'down0' .read by 'node_joined0'.. Add"
    refused("u_net", "pool0", 2, words)
    refused("u_net", "pool1", 2, "through 'down1' .read by 'node_joined1'., 'down0' .read by 'node_joined0'.. Add")


def test_a_cut_list_that_goes_backward_is_refused() -> None:
    refused("mlp", "relu2,relu0", 3, "goes backward: cut 1 puts the readers of 'relu0' on stage 2 or later, but "
            "'relu2', which is computed with them, is cut by cut 0 and so belongs to stage 0 or before")  # fmt: skip


def test_nodes_that_no_cut_reaches_are_refused() -> None:
    refused("two_towers", "a0", 2, "leaves node 'node_b0' and 1 more out: no cut leads to them")


def test_a_cut_without_effect_is_refused() -> None:
    refused("awkward", "scale", 2, "cuts nothing: every tensor it names depends on the network's inputs alone")


def test_a_stage_between_two_equal_cuts_is_refused() -> None:
    refused("mlp", "relu0,relu0", 3, "leaves stage 1 of 3 without nodes")


def test_stages_by_name_take_nodes_and_outputs() -> None:
    graph = graph_of("awkward")
    roles = find_roles(graph)
    by_output = stages_by_name(graph, roles, AWKWARD_STAGES, 4)
    assert by_output == stages_by_name(graph, roles, {f"node_{n}": s for n, s in AWKWARD_STAGES.items()}, 4)
    assert {node.name: stage for node, stage in by_output.items() if str(node.name).startswith("loss")} == {
        str(node.name): 3 for node in by_output if str(node.name).startswith("loss")
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc7": 1}, "names 'fc7', which is no node of the model; did you mean"),
        ({"fc0": 4}, "puts 'fc0' on stage 4; .* make 4 stages, numbered from 0"),
        ({"node_fc0": 1}, "puts node 'node_fc0' on stage 1 and on stage 0; choose one"),
        ({"fc0": None}, "leaves 1 nodes out: 'node_fc0'. Give each of them a stage"),
    ],
)
def test_stages_by_name_that_do_not_fit_are_refused(change: dict[str, int | None], words: str) -> None:
    graph = graph_of("awkward")
    asked = {name: stage for name, stage in {**AWKWARD_STAGES, **change}.items() if stage is not None}
    with pytest.raises(ParametersError, match=words):
        stages_by_name(graph, find_roles(graph), asked, 4)


def test_a_stage_that_no_name_is_put_on_is_refused() -> None:
    graph = graph_of("awkward")
    with pytest.raises(ParametersError, match="puts no node on stage 1 of 4"):
        stages_by_name(graph, find_roles(graph), dict.fromkeys(AWKWARD_STAGES, 0), 4)


def test_naming_all_nodes_of_ones_own_is_enough_where_passes_added_others() -> None:
    """The last layer and its loss become one node, which the file does not have; an Identity is gone."""
    model = create_model("gpt2", **{**GPT2, "layers": 2, "vocab_size": 288})
    model.graph.append(ir.node("Identity", [model.graph.outputs[0]], name="unread"))
    names = [str(node.name) for node in model.graph]
    asked = {name: int(place >= len(names) // 2) for place, name in enumerate(names)}
    loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    graph = make_training_graph(model, loss=loss, keep=tuple(asked), fuse=True)
    fused = [node for node in graph.model.graph if str(node.name).startswith("fused/")]
    assert fused
    found = stages_by_name(graph, find_roles(graph), asked, 2)
    assert [found[node] for node in fused if node in found] == [1]
    by_name = {str(node.name): stage for node, stage in found.items()}
    assert {name: stage for name, stage in by_name.items() if name in asked} == {
        name: asked[name] for name in by_name if name in asked
    }
