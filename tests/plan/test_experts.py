"""Expert parallelism on paper: which rank holds which experts, what travels, and what is refused."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import yaml

from onward.commands import training
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast.plan_forecast import forecast
from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.parameters import Parameters
from onward.plan.decision import Plan, graph_of_rank
from onward.plan.experts import plan_experts
from onward.plan.report.text import render
from onward.plan.topology import Place, Topology
from tests.graph.fusion.test_expert_slots import RESULT, ROWS, STACK
from tests.graph.fusion.test_experts import model as slots_of
from tests.invariants.cases import CASES, EXPERTS, HIDDEN, TOKENS, WORDS

CASE, WIDTH = CASES["mixtures"], 16


def parameters(tmp_path: Any, name: str = "mixtures", **sections: Any) -> Parameters:
    path = tmp_path / "m.onnx"
    ir.save(CASES[name].model(), path)
    distributed = {"data_parallel_size": 2, "expert_parallel_size": 2, **sections.pop("distributed", {})}
    return Parameters.from_mapping(
        {
            "paths": {"model_path": str(path)}, "loss": dict(CASE.loss), "learning_rate": {"initial_lr": 0.1},
            "training": {"batch_size": 4, "num_train_steps": 2, **CASES[name].training}, "distributed": distributed,
            **sections,
        }
    )  # fmt: skip


def planned(of: Parameters) -> tuple[TrainingGraph, Plan]:
    graph = read_training_graph(of, of.paths.model_path)
    specs = InMemoryDataLoader(CASE.data(4)).feature_specs()
    return graph, plan_run(of, Topology.of_sizes(of.distributed), graph, specs)


def test_every_rank_holds_its_experts(tmp_path: Any) -> None:
    graph, plan = planned(parameters(tmp_path))
    for rank in range(2):
        local = graph_of_rank(graph, plan, Place(rank, 0, 0))
        stored = local.model.graph.initializers
        assert [int(n) for n in stored["stack_up"].const_value.shape.numpy()] == [EXPERTS // 2, WIDTH, HIDDEN]  # type: ignore[union-attr]
        full = graph.model.graph.initializers["stack_up"].const_value.numpy()  # type: ignore[union-attr]
        part = stored["stack_up"].const_value.numpy()  # type: ignore[union-attr]
        assert (part == full[2 * rank : 2 * rank + 2]).all()
        assert {name for name in local.weights if name.startswith("up")} == {
            f"{kind}{expert}" for kind in ("up", "upbias") for expert in (2 * rank, 2 * rank + 1)
        }
        assert "router1" in local.weights


def test_the_plan_counts_what_travels(tmp_path: Any) -> None:
    found = parameters(tmp_path, distributed={"data_parallel_size": 4})
    graph, plan = planned(found)
    counted = forecast(found, graph, plan, InMemoryDataLoader(CASE.data(4)).feature_specs())
    (rank,) = counted.ranks
    traffic = {one.what: one for one in rank.traffic}
    tokens = traffic["expert all-to-all"]
    # There and back, in two layers and both directions; each token has two choices.
    assert (tokens.calls, tokens.ranks, tokens.payload) == (8, 2, 8 * 4 * TOKENS * 2 * WIDTH * 4)
    of_stack, of_loop = 2 * 2 * WIDTH * HIDDEN, 2 * (2 * WIDTH * HIDDEN + HIDDEN + WIDTH)
    experts = traffic["gradients of experts"]
    assert (experts.ranks, experts.payload) == (2, 4.0 * (of_stack + of_loop))
    text = render(found, graph, plan, counted)
    assert "4 = 4 data x 1 tensor x 1 pipeline; 1 micro-batch per update; experts over 2 replicas" in text
    dense = 2 * WORDS * WIDTH + 2 * WIDTH * EXPERTS  # the table and the last layer, and two routers
    assert traffic["gradients over the replicas"].payload == 4.0 * dense


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mixture": ({"name": "tied_words"}, "expert_parallel_size is 2, but no mixture of experts was recognized"),
    "experts": ({"distributed": {"data_parallel_size": 3, "expert_parallel_size": 3}},
                "is 3, which does not divide the 4 experts of 'stack_up'. Set it to a divisor of 4"),
    "replicas": ({"distributed": {"data_parallel_size": 3}}, "of which there are 3 .* Set it to a divisor of 3"),
    "sharded gradients": ({"distributed": {"data_parallel_size": 4, "zero_stage": 2}}, "an expert is on 2 of them."),
    "Adasum": ({"distributed": {"enable_adasum": True}}, "these hold different experts. Leave one of the two out"),
    "without fusion": ({"speed": {"fusions_off": ["experts"]}}, "`experts`, which section speed must leave on"),
    "no mixture to drop tokens of": (
        {"name": "tied_words", "distributed": {"expert_parallel_size": 1, "expert_capacity_factor": 1.5}},
        "expert_capacity_factor is 1.5, but no mixture",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED, ids=list(REFUSED))
def test_refused(tmp_path: Any, name: str) -> None:
    sections, words = REFUSED[name]
    with pytest.raises(ParametersError, match=words):
        planned(parameters(tmp_path, **sections))


def test_a_capacity_of_slots_that_the_model_fills_is_refused(tmp_path: Any) -> None:
    graph = make_training_graph(slots_of(ROWS + STACK + RESULT), fuse=True)
    asked = parameters(tmp_path, distributed={"expert_parallel_size": 1, "expert_capacity_factor": 1.5}).distributed
    words = (
        r"expert_capacity_factor is 1.5, but the model puts tokens into slots of its experts itself \(.*\), and drops"
    )
    with pytest.raises(ParametersError, match=words):
        plan_experts(graph, asked)


def test_slots_travel_with_their_experts(tmp_path: Any) -> None:
    found = parameters(tmp_path, "slots")
    graph, plan = planned(found)
    assert {"stack_up", "gates", "values"} <= plan.experts.stacks
    assert plan.experts.owners["up3"] == 1
    (rank,) = forecast(found, graph, plan, InMemoryDataLoader(CASE.data(4)).feature_specs()).ranks
    tokens = next(one for one in rank.traffic if one.what == "expert all-to-all")
    # Two slots of each sequence for an expert, in two layers, and two choices of a token in the third.
    rows = 2 * (4 * 2 * EXPERTS) + 4 * TOKENS * 2
    assert (tokens.calls, tokens.payload) == (12, 4 * rows * WIDTH * 4)


def test_a_model_without_experts_is_refused_before_processes_start(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = parameters(tmp_path, "tied_words")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(found.to_mapping()))
    monkeypatch.setattr(training, "launch_until_done", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(ParametersError, match="Looked for: a TopK or ArgMax of scores of experts"):
        training.train(tmp_path / "run.yaml")
