"""The decision of tensor parallelism: what is cut and how, why the rest is unsharded, and one rank's graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.errors import ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.models import create_model
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import HorizontalPlan, plan_horizontal
from onward.plan.horizontal.rules_movement import through_reshape
from onward.plan.shards import Sharding, take_shard

CROSS_ENTROPY = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")


def gpt2(**options: object) -> TrainingGraph:
    fixed = {"size": "tiny", "layers": 1, "heads": 4, "width": 32, "vocab_size": 96, "context_length": 16}
    return make_training_graph(create_model("gpt2", **{**fixed, **options}), loss=CROSS_ENTROPY)


def planned(graph: TrainingGraph, size: int, shape: tuple[int, ...] = (2, 7)) -> HorizontalPlan:
    names = [str(v.name) for v in graph.model.graph.inputs]
    facts = find_value_facts(graph, dict.fromkeys(names, shape))
    return plan_horizontal(graph, size, facts.shapes, facts.numbers)


def parsed(text: str, weights: dict[str, tuple[int, ...]], loss: str = "loss") -> TrainingGraph:
    """A graph in ONNX's text form whose output `loss` is minimized, with weights drawn from a normal distribution."""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}'))
    generator = np.random.default_rng(0)
    inputs = {value.name: value for value in model.graph.inputs}
    for name, shape in weights.items():
        value = inputs[name]
        model.graph.inputs.remove(value)
        value.const_value = ir.Tensor(generator.standard_normal(shape).astype(np.float32), name=name)
        model.graph.register_initializer(value)
    return make_training_graph(model, loss=LossSpec(type="output", prediction=loss))


@pytest.mark.parametrize(
    ("cut", "before", "after", "expected"),
    [
        (Sharding(2, (12,)), (2, 5, 12), (2, 5, 3, 4), Sharding(2, (3,))),
        (Sharding(2, (4, 4, 4)), (2, 5, 12), (2, 5, 3, 4), Sharding(3, (4,))),
        (Sharding(2, (12,)), (2, 5, 12), (10, 12), Sharding(1, (12,))),
        (Sharding(1, (8,)), (2, 8, 7, 4), (16, 7, 4), Sharding(0, (8, 8))),
        (Sharding(0, (8, 8)), (16, 7, 4), (2, 8, 7, 4), Sharding(1, (8,))),
        (Sharding(1, (6,)), (2, 6, 5, 5), (2, 150), Sharding(1, (150,))),
        (Sharding(3, (6,)), (2, 5, 5, 6), (2, 150), Sharding(1, (6,) * 25)),
        (Sharding(1, (8,)), (2, 8, 4, 4), (2, 4, 32), Sharding(1, (4,))),
        (Sharding(1, (6, 2)), (3, 8), (3, 8, 1), Sharding(1, (6, 2))),
        (Sharding(1, (6, 2)), (3, 8), (3, 2, 4), None),
    ],
)
def test_a_cut_seen_through_a_reshape(
    cut: Sharding, before: tuple[int, ...], after: tuple[int, ...], expected: Sharding | None
) -> None:
    assert through_reshape(cut, before, after) == expected
    if expected is None:
        return
    whole = np.arange(np.prod(before)).reshape(before)
    for rank in range(2):
        if all(block % 2 == 0 for block in (*cut.blocks, *expected.blocks)):
            part = take_shard(whole, cut, rank, 2)
            np.testing.assert_array_equal(take_shard(whole.reshape(after), expected, rank, 2).ravel(), part.ravel())


def test_a_layer_of_gpt2_is_cut_by_heads_and_by_hidden_features() -> None:
    plan = planned(gpt2(), 2)
    assert plan.shardings["h.0.attn.c_attn.weight"] == Sharding(1, (32, 32, 32))
    assert plan.shardings["h.0.attn.c_attn.bias"] == Sharding(0, (32, 32, 32))
    assert plan.shardings["h.0.attn.c_proj.weight"] == Sharding(0, (32,))
    assert plan.shardings["h.0.mlp.c_fc.weight"] == Sharding(1, (128,))
    assert plan.shardings["h.0.mlp.c_proj.weight"] == Sharding(0, (128,))
    assert plan.shardings["wte.weight"] == Sharding(0, (96,))
    assert "h.0.attn.c_proj.bias" not in plan.shardings
    assert plan.partial_gradients == ()


@pytest.mark.parametrize("by_tokens", [False, True])
def test_fused_linear_layers_are_cut_as_products_and_sums_are(by_tokens: bool) -> None:
    model = create_model("gpt2", size="tiny", layers=1, heads=4, width=32, vocab_size=96, context_length=16)
    plans, exchanges = [], []
    for fuse in (False, True):
        graph = make_training_graph(model, loss=CROSS_ENTROPY, fuse=fuse, fusions_off=("attention", "cross_entropy"))
        facts = find_value_facts(graph, dict.fromkeys(("input_ids", "labels"), (2, 8)))
        plan = plan_horizontal(graph, 2, facts.shapes, facts.numbers, sequence_parallel=by_tokens)
        plans.append(plan)
        nodes = localize(graph, plan, 0).model.graph
        exchanges.append(sorted(node.op_type for node in nodes if node.domain == "onward.parallel"))
        linear = [node for node in nodes if node.op_type == "Linear"]
        # Partial sums have their bias added after they are summed up.
        assert [len(node.inputs) > 2 and node.inputs[2] is not None for node in linear] == [True, False] * 2 * fuse
    assert plans[0].shardings == plans[1].shardings
    assert plans[0].reasons == plans[1].reasons
    assert set(plans[0].partial_gradients) == set(plans[1].partial_gradients)
    assert exchanges[0] == exchanges[1]


def test_a_vocabulary_may_be_shared_unevenly() -> None:
    plan = planned(gpt2(vocab_size=97), 4)
    assert plan.shardings["wte.weight"] == Sharding(0, (97,))
    assert [plan.shardings["wte.weight"].local_size(rank, 4) for rank in range(4)] == [24, 24, 24, 25]


def test_what_cannot_be_cut_is_named_with_the_operator_in_the_way() -> None:
    plan = planned(gpt2(), 2, (2, 9))
    assert "too small to be worth" in plan.reasons["wpe.weight"]
    assert "every rank computes in full" in plan.reasons["h.0.ln_1.weight"]


def test_a_model_without_anything_to_cut_is_refused() -> None:
    graph = parsed("agraph (float[B,4] x, float[4,6] a) => (float[B,6] loss) {loss = MatMul(x, a)}", {"a": (4, 6)})
    with pytest.raises(ParametersError, match="no weight of the model can be sharded"):
        planned(graph, 2, (5, 4))


def test_a_lone_column_cut_is_not_made() -> None:
    graph = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,3] b, float[6,8] c) => (float[B,3] loss, float[B,8] other)"
        "{h = MatMul(x, a) r = Relu(h) loss = MatMul(r, b) other = MatMul(r, c)}",
        {"a": (4, 6), "b": (6, 3), "c": (6, 8)},
    )
    plan = planned(graph, 2, (5, 4))
    assert set(plan.shardings) >= {"a", "b"}
    lone = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,3] b, float[4,8] c) => (float[B,3] loss)"
        "{h = MatMul(x, a) r = Relu(h) y = MatMul(r, b)"
        "d = MatMul(x, c) e = Abs(d) s = ReduceMax <keepdims=0> (e) loss = Add(y, s)}",
        {"a": (4, 6), "b": (6, 3), "c": (4, 8)},
    )
    plan = planned(lone, 2, (5, 4))
    assert set(plan.shardings) == {"a", "b"}
    assert "ReduceMax) needs all of its reduced axis at once" in plan.reasons["c"]


def test_clashing_cuts_are_chosen_by_what_they_save() -> None:
    graph = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,8] b, float[8,40] c) => (float[B,40] loss)"
        "{h = MatMul(x, a) i = Relu(h) j = MatMul(i, b) k = Relu(j) loss = MatMul(k, c)}",
        {"a": (4, 6), "b": (6, 8), "c": (8, 40)},
    )
    plan = planned(graph, 2, (5, 4))
    assert plan.regions == (("b", "c"),)
    assert plan.reasons["a"] == "it could be sharded only instead of 'b', 'c', which hold more"


def test_a_rank_gets_an_ordinary_graph_with_its_parts_and_the_whole_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(create_model("gpt2", size="tiny", layers=1, heads=4, width=32, vocab_size=96), path, external_data="data")
    graph = make_training_graph(path, loss=CROSS_ENTROPY)
    plan = planned(graph, 2)
    before = [node.op_type for node in graph.model.graph]
    whole = {name: graph.model.graph.initializers[name].const_value.numpy().copy() for name in graph.weights}
    locals_ = [localize(graph, plan, rank) for rank in range(2)]
    assert [node.op_type for node in graph.model.graph] == before
    for rank, local in enumerate(locals_):
        assert local.weights == graph.weights
        assert local.loss == "loss"
        for name in graph.weights:
            stored = local.model.graph.initializers[name].const_value
            expected = take_shard(whole[name], plan.shardings.get(name), rank, 2)
            assert tuple(stored.shape.numpy()) == expected.shape
            np.testing.assert_array_equal(stored.numpy(), expected)
    types = [node.op_type for node in locals_[0].model.graph if node.domain == "onward.parallel"]
    assert types.count("AllReduce") == 4
    assert types.count("Enter") == 3
    assert types.count("AllGather") == 1
    assert [str(v.name) for v in locals_[0].model.graph.outputs] == [str(v.name) for v in graph.model.graph.outputs]


def test_one_rank_gets_the_graph_itself() -> None:
    graph = gpt2()
    plan = planned(graph, 1)
    assert localize(graph, plan, 0) is graph


def test_a_plan_of_another_graph_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the plan shards 'h\.1\.attn.*', which the graph does not have"):
        localize(gpt2(layers=1), planned(gpt2(layers=2), 2), 0)


def test_shared_tokens_leave_the_gradients_of_norms_and_biases_to_be_added_up() -> None:
    graph = gpt2()
    facts = find_value_facts(graph, {"input_ids": (2, 8), "labels": (2, 8)})
    plan = plan_horizontal(graph, 2, facts.shapes, facts.numbers, sequence_parallel=True)
    between = {
        "h.0.attn.c_proj.bias",
        "h.0.mlp.c_proj.bias",
        *(f"h.0.ln_{i}.{w}" for i in (1, 2) for w in ("weight", "bias")),
    }
    assert set(plan.partial_gradients) == between | {"ln_f.weight", "ln_f.bias"}
    assert plan.token_axes["h.0/Add_output"] == 1
    types = [node.op_type for node in localize(graph, plan, 0).model.graph if node.domain == "onward.parallel"]
    assert types.count("ReduceScatter") == types.count("GatherTokens") == 3
    assert types.count("AllReduce") == types.count("Enter") == 0


def test_tokens_that_the_ranks_cannot_share_are_refused_where_sharing_was_asked_for() -> None:
    graph = gpt2()
    facts = find_value_facts(graph, {"input_ids": (2, 7), "labels": (2, 7)})
    with pytest.raises(ParametersError) as error:
        plan_horizontal(graph, 2, facts.shapes, facts.numbers, sequence_parallel=True)
    assert "distributed.sequence_parallel is true" in str(error.value)
    assert "their sums are of 7 tokens. Use sequences of a multiple of 2 tokens" in str(error.value)
    flat = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,3] b) => (float[B,3] loss)"
        "{h = MatMul(x, a) r = Relu(h) loss = MatMul(r, b)}",
        {"a": (4, 6), "b": (6, 3)},
    )
    facts = find_value_facts(flat, {"x": (5, 4)})
    with pytest.raises(ParametersError, match="their sums have no axis of tokens"):
        plan_horizontal(flat, 2, facts.shapes, facts.numbers, sequence_parallel=True)


@pytest.mark.parametrize(
    "mixing", ["y = ReduceSum (m, tokens)", "y = Reshape (m, flat)"], ids=["summed over", "merged with the batch"]
)
def test_tokens_are_gathered_before_they_are_mixed(mixing: str) -> None:
    graph = parsed(
        "g (float[B,T,4] x, float[4,6] a, float[6,4] b) => (float loss)"
        "<int64[1] tokens = {1}, int64[2] flat = {-1, 4}>"
        f"{{h = MatMul(x, a) r = Relu(h) p = MatMul(r, b) m = Neg (p) {mixing} loss = ReduceSum <keepdims = 0> (y)}}",
        {"a": (4, 6), "b": (6, 4)},
    )
    facts = find_value_facts(graph, {"x": (2, 8, 4)})
    plan = plan_horizontal(graph, 2, facts.shapes, facts.numbers, sequence_parallel=True)
    assert plan.token_axes == {"p": 1, "m": 1}
    operators = [node.op_type for node in localize(graph, plan, 0).model.graph]
    assert operators.index("GatherTokens") == operators.index("Neg") + 1


def test_a_projection_that_is_split_into_a_sequence_is_cut_in_its_parts() -> None:
    """As torch's newer exporter writes `split`, in GPT-2's fused queries, keys and values for one."""
    graph = parsed(
        """g (float[B, T, 6] x, float[6, 16] w, float[8, 5] v) => (float loss) {
            m = MatMul (x, w)  sizes = Constant <value_ints = [8, 8]> ()
            parts = SplitToSequence <axis = 2> (m, sizes)
            zero = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()
            a = SequenceAt (parts, zero)  b = SequenceAt (parts, one)
            gated = Mul (a, b)  y = MatMul (gated, v)  square = Mul (y, y)
            loss = ReduceMean <keepdims = 0> (square)
        }""",
        {"w": (6, 16), "v": (8, 5)},
    )
    facts = find_value_facts(graph, {"x": (2, 7, 6)})
    plan = plan_horizontal(graph, 4, facts.shapes, facts.numbers)
    assert plan.shardings == {"w": Sharding(1, (8, 8)), "v": Sharding(0, (8,))}


def test_what_is_computed_from_cut_elements_is_cut_though_it_has_no_gradient() -> None:
    """Attention whose rows may be all masked has such a `Where`; a part of the rank's shard would be another's."""
    graph = parsed(
        """g (float[B, 6] x, float[6, 8] w, float[8, 5] v) => (float loss) {
            m = MatMul (x, w)  missing = IsNaN (m)  zero = Constant <value_float = 0.0> ()
            kept = Where (missing, zero, m)  y = MatMul (kept, v)  square = Mul (y, y)
            loss = ReduceMean <keepdims = 0> (square)
        }""",
        {"w": (6, 8), "v": (8, 5)},
    )
    facts = find_value_facts(graph, {"x": (3, 6)})
    plan = plan_horizontal(graph, 2, facts.shapes, facts.numbers)
    assert plan.values["missing"] == Sharding(1, (8,))
    assert not plan.slices
    assert set(plan.shardings) == {"w", "v"}
