"""Models that were cut before are one network again, and remember their stages."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from onward.errors import ModelError, ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.plan.pipeline.cut_list import stages_by_note
from onward.plan.pipeline.joined_models import join_stage_models
from onward.plan.pipeline.stages import plan_stages
from onward.plan.roles import find_roles
from tests.plan.staged_models import first_stage, second_stage

LOSS = LossSpec(type="mean_squared_error", prediction="logits", label="y")


def test_the_joined_network_computes_what_the_stages_do_one_after_the_other(tmp_path: Path) -> None:
    paths = [tmp_path / "stage0.onnx", tmp_path / "stage1.onnx"]
    for path, model in zip(paths, (first_stage(), second_stage()), strict=True):
        ir.save(model, path)
    x = torch.randn(3, 4)
    with torch.no_grad():
        hidden = OnnxModule(make_training_graph(paths[0]))(x)
        expected = OnnxModule(make_training_graph(paths[1]))(hidden, x)
        found = OnnxModule(make_training_graph(join_stage_models(paths)))(x)
    assert torch.equal(found, expected)


def test_stages_are_remembered_and_equal_weights_are_tied() -> None:
    joined = join_stage_models([first_stage(), second_stage()])
    assert [value.name for value in joined.graph.inputs] == ["x"]
    assert [value.name for value in joined.graph.outputs] == ["logits"]
    assert set(joined.graph.initializers) == {"tied", "constant", "stage1/constant", "last"}
    graph = make_training_graph(joined, loss=LOSS)
    roles = find_roles(graph)
    plan = plan_stages(graph, stages_by_note(graph, roles, 2), 2, roles)
    assert plan.stages[0].weights == ("tied", "constant")
    assert plan.shared_weights == {"tied": (0, 1)}
    assert [transfer.name for transfer in plan.stages[1].received] == ["hidden"]
    assert plan.stages[1].inputs == ("x", "y")


def test_another_number_of_models_than_stages_is_refused() -> None:
    graph = make_training_graph(join_stage_models([first_stage(), second_stage()]), loss=LOSS)
    for stages in (1, 3):
        with pytest.raises(
            ParametersError, match=rf"pipeline_stage_paths names 2 models, but .* ask for {stages} stages"
        ):
            stages_by_note(graph, find_roles(graph), stages)


def test_models_that_do_not_fit_are_refused() -> None:
    other = second_stage()
    other.graph.opset_imports[""] = 17
    with pytest.raises(ModelError, match=r"stage 1 is written for opset 17 of 'ai.onnx', earlier ones for 18"):
        join_stage_models([first_stage(), other])
    wrong = second_stage()
    wrong.graph.inputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
    with pytest.raises(ModelError, match=r"stage 1 reads 'hidden' as DOUBLE; an earlier stage has it as FLOAT"):
        join_stage_models([first_stage(), wrong])
    with pytest.raises(ModelError, match=r"have the output 'hidden'; rename one"):
        join_stage_models([first_stage(), first_stage()])
    with pytest.raises(ModelError, match=r"pipeline_stage_paths is empty"):
        join_stage_models([])


def with_function(model: ir.Model, operator: str) -> ir.Model:
    """The model, and a function `own::act` that it may call."""
    value = ir.Value(name="a")
    node = ir.node(operator, [value], name="inner")
    function = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 18})
    model.functions[("own", "act", "")] = ir.Function("own", "act", graph=function, attributes=[])
    return model


def test_functions_of_one_name_must_be_one_function() -> None:
    joined = join_stage_models([with_function(first_stage(), "Relu"), with_function(second_stage(), "Relu")])
    assert list(joined.functions) == [("own", "act", "")]
    with pytest.raises(ModelError, match="stage 1 defines the function own::act in another way than an earlier one"):
        join_stage_models([with_function(first_stage(), "Relu"), with_function(second_stage(), "Tanh")])
