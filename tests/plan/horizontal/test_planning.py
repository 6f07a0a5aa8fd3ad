"""The decision of tensor parallelism: what is cut and how, why the rest is unsharded, and one rank's graph."""

from __future__ import annotations

import pytest

from onward.errors import ParametersError
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.models import create_model
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import plan_horizontal
from onward.plan.shards import Sharding
from tests.invariants.cases import mixtures, shared_heads
from tests.plan.horizontal.graphs import CROSS_ENTROPY, gpt2, parsed, planned


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


@pytest.mark.parametrize(("key_heads", "size", "parts"), [(1, 2, 1), (1, 4, 1), (2, 4, 2), (2, 2, 0)])
def test_heads_of_keys_and_values_that_are_fewer_than_ranks_are_replicated(
    key_heads: int, size: int, parts: int
) -> None:
    graph = make_training_graph(shared_heads(key_heads), loss=CROSS_ENTROPY)
    plan = planned(graph, size, (2, 12))
    width = 4 * key_heads
    assert plan.shardings["joint"] == Sharding(1, (16, width, width, 32, 32), (0, parts, parts, 0, 0))
    assert {"bias", "out", "down"} <= plan.shardings.keys()
    assert not plan.partial_gradients
    local = localize(graph, plan, 0).model.graph
    assert [node.op_type for node in local if node.domain == "onward.parallel"].count("Enter") == 2  # of layer and head
    assert local.initializers["joint"].shape == (16, (16 + 64) // size + 2 * width // min(size, key_heads))


def test_fused_experts_are_cut_by_their_hidden_features() -> None:
    graph = make_training_graph(mixtures(), loss=CROSS_ENTROPY, fuse=True, weights_not_to_train=("zero",))
    assert [node.op_type for node in graph.model.graph].count("Experts") == 2
    cut = planned(graph, 2, (2, 12)).shardings
    assert {name: cut[name].axis for name in ("stack_up", "stack_down")} == {"stack_up": 2, "stack_down": 1}
    assert {f"{kind}{e}" for e in range(4) for kind in ("up", "upbias", "down")} <= cut.keys()


def test_weights_of_recurrent_layers_are_left_for_their_own_reason() -> None:
    graph = parsed(
        "agraph (float[S,B,4] x, float[1,9,4] w, float[1,9,3] r, float[3,16] a, float[16,3] b, float[3] c) "
        "=> (float[S,1,B,3] loss)"
        "{v = Cast <to = 1> (w) h = GRU <hidden_size=3> (x, v, r) "
        "i = MatMul(h, a) j = Relu(i) k = MatMul(j, b) loss = Mul(k, c)}",
        {"w": (1, 9, 4), "r": (1, 9, 3), "a": (3, 16), "b": (16, 3), "c": (3,)},
    )
    plan = planned(graph, 2, (5, 2, 4))
    assert set(plan.shardings) == {"a", "b"}
    assert plan.reasons["w"] == plan.reasons["r"]
    assert plan.reasons["w"].startswith("each step of a recurrent layer reads all hidden units of the step before")
    assert plan.reasons["c"].startswith("it belongs to the operators between the sharded layers")
