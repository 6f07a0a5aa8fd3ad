"""Calls and bytes of an update: by stage, by replica, added up by what is exchanged."""

from __future__ import annotations

import math
import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.plan import communication
from onward.plan.communication import BUCKET_BYTES, FIRST_BUCKET_BYTES, stage_traffic, weight_elements
from onward.plan.context.cutting import plan_context
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import plan_horizontal
from onward.plan.memory import StageFootprint, Traffic
from tests.parallel.context.test_layers import facts_of
from tests.parallel.horizontal_models import EXAMPLES
from tests.plan.horizontal.graphs import CROSS_ENTROPY, parsed_model


def traffic(what: str, calls: float = 1.0, payload: float = 100.0) -> Traffic:
    return Traffic(what=what, calls=calls, payload=payload, ranks=4, share=1.5)


def footprint(**given: object) -> StageFootprint:
    empty: dict[str, float] = {}
    peaks = dict.fromkeys(("held", "kept", "forward_peak", "backward_peak", "update_peak"), empty)
    return StageFootprint(**{**peaks, **given})  # type: ignore[arg-type]


def test_the_first_and_the_last_micro_batch_may_differ() -> None:
    one = footprint(
        traffic_first=(traffic("a"), traffic("b")), traffic_between=(traffic("a"),), traffic_last=(traffic("a", 3.0),)
    )
    found = {each.what: (each.calls, each.payload) for each in stage_traffic({0: one}, 5, is_pipeline=False)}
    assert found == {"a": (1 + 3 + 3, 500.0), "b": (1.0, 100.0)}


def test_stages_send_activations_and_gradients_once_a_micro_batch() -> None:
    first, last = footprint(sent=(10.0, 8.0)), footprint(received=(10.0, 8.0))
    found = {each.what: (each.calls, each.payload) for each in stage_traffic({0: first, 3: last}, 4, is_pipeline=True)}
    assert found == {"activations to the next stage": (4.0, 40.0), "gradients to the previous stage": (4.0, 32.0)}
    assert stage_traffic({0: first}, 4, is_pipeline=False) == []


@pytest.mark.parametrize(
    ("size", "count"),
    [(0, 1), (FIRST_BUCKET_BYTES, 1), (FIRST_BUCKET_BYTES + 1, 2), (FIRST_BUCKET_BYTES + BUCKET_BYTES, 2)],
)
def test_buckets_of_gradients(size: int, count: int) -> None:
    assert communication._buckets(size) == count


def test_elements_of_trained_weights() -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[n, 2] x) => (y) { a = MatMul(x, w) y = Mul(a, k) }'
    proto = onnx.parser.parse_model(text)
    for name, array in (("w", np.ones((2, 3), np.float32)), ("k", np.float32(2))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    assert weight_elements(make_training_graph(proto)) == {"w": 6}


TOWER = "h{0} = MatMul (x, up{0})  a{0} = {1} (h{0})  t{0} = MatMul (a{0}, down{0})"
NORMALIZED = " s{0} = Mul (t{0}, t{0})  q{0} = ReduceSum (s{0}, last)  r{0} = Sqrt (q{0})  n{0} = Div (t{0}, r{0})"
SIMILAR = "  c = Transpose <perm = [1, 0]> ({0}1)  d = MatMul ({0}0, c)  logits = Mul (d, temperature)"
NETWORKS = {
    "classes alone": "logits = MatMul (x, classes)",
    "two towers": TOWER.format(0, "Relu") + TOWER.format(1, "Tanh") + SIMILAR.format("t"),
    "of unit length": "".join((TOWER + NORMALIZED).format(i, "Gelu") for i in range(2)) + SIMILAR.format("n"),
    "a tower and a layer": TOWER.format(0, "Sigmoid") + " t1 = MatMul (x, layer)" + SIMILAR.format("t"),
    "a norm inside": "h = MatMul (x, up0)  n = LayerNormalization (h, scale)  logits = MatMul (n, down0)",
}
WEIGHTS = {
    "classes": (8, 64), "up0": (8, 32), "down0": (32, 12), "up1": (8, 32), "down1": (32, 12), "layer": (8, 12),
    "scale": (32,), "temperature": (),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_what_every_sharded_weight_exchanges_is_counted(name: str) -> None:
    """A plan whose shapes cannot be computed is estimated from the graph, and lists the same collectives."""
    body = NETWORKS[name]
    weights = {one: shape for one, shape in WEIGHTS.items() if re.search(rf"\b{one}\b", body)}
    listed = "".join(f", float[{','.join(map(str, shape))}] {one}" for one, shape in weights.items())
    text = f"g (float[B, 8] x{listed}) => (float[B, C] logits) <int64[1] last = {{-1}}> {{{body}}}"
    graph = make_training_graph(parsed_model(text, weights), loss=CROSS_ENTROPY)
    inputs = {"x": (4, 8), "labels": (4,)}
    facts = find_value_facts(graph, inputs)
    plan = plan_horizontal(graph, 2, facts.shapes, facts.numbers)
    assert plan.regions
    assert set().union(*plan.regions) == set(plan.shardings)
    bytes_of = {one: 4.0 * math.prod(shape) for one, shape in facts.shapes.items()}
    (found,) = communication.estimated_traffic(localize(graph, plan, 0).model.graph, bytes_of, 2)
    assert found.what == "tensor-parallel all-reduce"
    assert found.calls >= len(plan.regions)
    assert found.payload > 0


def test_context_ranks_gather_keys_and_values_twice_and_scatter_their_gradients() -> None:
    """By formula: two layers of keys and values of 2 x 8 tokens, with 32 features each; then the logits."""
    example = EXAMPLES["gpt2-fused"]
    graph = example.graph()
    facts = facts_of(example, graph)
    plan = plan_context(graph, 2, facts.shapes, facts.numbers)
    bytes_of = {one: 4.0 * math.prod(shape) for one, shape in facts.shapes.items()}
    found = {one.what: one for one in communication.estimated_traffic(plan.of(graph).model.graph, bytes_of, 1, 2)}
    keys = next(node for node in graph.model.graph if node.op_type == "Attention").inputs[1]
    assert keys is not None
    tensor, logits = bytes_of[str(keys.name)], bytes_of[str(graph.model.graph.outputs[0].name)]
    assert tensor == 4 * 2 * 8 * 32
    gathered, scattered = found["context all-gather"], found["context reduce-scatter"]
    assert (gathered.calls, gathered.payload, gathered.share) == (2 * 2 * 2 + 1, 2 * 2 * 2 * tensor + logits, 0.5)
    assert (scattered.calls, scattered.payload) == (2 * 2 + 1, 2 * 2 * tensor + logits)
    assert found["context all-reduce"].payload < 100


def test_convolutions_exchange_the_edges_of_chunks() -> None:
    """By formula: of 15 tokens of 100 bytes, three next to both chunks of each of three ranks."""
    node = ir.node(
        "ContextHalo",
        [ir.Value(name="x")],
        {"blocks": (15,), "before": 2, "after": 1},
        domain="onward.parallel",
        outputs=[ir.Value(name="y")],
    )
    found = communication.estimated_traffic(ir.Graph([], [], nodes=[node]), {"x": 1500.0}, 1, 3)
    assert [(one.what, one.calls) for one in found] == [("context all-gather", 1), ("context reduce-scatter", 1)]
    for one in found:
        assert one.payload == pytest.approx(100 * 2 * 3 * 3)
        assert one.share == pytest.approx(2 / 3)
