"""What convolutions read next to a token, and padding around them that becomes theirs: onnxruntime says the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.plan.context.convolutions import Halo, fold_padding, halo_of
from onward.plan.context.ranges import TokenCut
from onward.plan.context.rules import cut_node
from onward.plan.horizontal.cuts import CannotShardError
from onward.plan.horizontal.regions import PartitioningContext
from tests.plan.horizontal.graphs import parsed_model
from tests.plan.horizontal.nodes import site

X = (2, 4, 12)


def halo(kernel: int, length: int = 12, **attributes: object) -> Halo:
    return halo_of(site("Conv", {"x": X, "w": (6, 4, kernel)}, {"y": (2, 6, length)}, **attributes), 2)


def test_a_halo_is_the_padding_that_keeps_the_number_of_tokens() -> None:
    assert halo(3, pads=[1, 1]) == Halo(1, 1, (0, 0))
    assert halo(3, pads=[4, 0], dilations=[2]) == Halo(4, 0, (0, 0))
    assert halo(4, auto_pad="SAME_UPPER") == Halo(1, 2, (0, 0))
    assert halo(4, auto_pad="SAME_LOWER") == Halo(2, 1, (0, 0))
    assert halo(1) == Halo(0, 0, (0, 0))
    image = site("Conv", {"x": (2, 4, 12, 6), "w": (6, 4, 3, 5)}, {"y": (2, 6, 12, 6)}, pads=[1, 2, 1, 2])
    assert halo_of(image, 2) == Halo(1, 1, (0, 2, 0, 2))
    assert halo_of(image, 3) == Halo(2, 2, (1, 0, 1, 0))


@pytest.mark.parametrize(
    ("length", "attributes"), [(6, {"pads": [1, 1], "strides": [2]}), (10, {}), (14, {"pads": [2, 2]})]
)
def test_another_number_of_tokens_is_not_cut(length: int, attributes: dict[str, list[int]]) -> None:
    with pytest.raises(CannotShardError, match=r"node 'n' \(Conv\) gives another number of tokens than it reads"):
        halo(3, length, **attributes)


def test_a_kernel_that_reaches_over_a_chunk_is_not_cut() -> None:
    node = site("Conv", {"x": X, "w": (6, 4, 5)}, {"y": (2, 6, 12)}, pads=[4, 0])
    cut = TokenCut(2, (12,))
    with pytest.raises(CannotShardError, match="reaches further than the tokens of the ranks next to it"):
        cut_node(node, {0: cut}, {}, 2)
    with pytest.raises(CannotShardError, match="holds several sequences"):
        cut_node(node, {0: TokenCut(2, (6, 6))}, {}, 1)


BODIES = {
    "pad": ("xp = Pad (x, before)  y = Conv (xp, w)", 1, [2, 0]),
    "pad of three axes": ("xp = Pad (x, all)  y = Conv (xp, w)", 1, [2, 0]),
    "cut off": ("z = Conv <pads = [2, 2]> (x, w)  y = Slice (z, zero, twelve, two)", 1, [2, 0]),
    "cut off in front": ("z = Conv <pads = [2, 2]> (x, w)  y = Slice (z, two, far, two)", 1, [0, 2]),
    "every second": ("z = Conv <pads = [2, 2]> (x, w)  y = Slice (z, zero, twelve, two, two)", 2, [2, 2]),
    "other values": ("xp = Pad (x, before, half)  y = Conv (xp, w)", 2, None),
    "mirrored": ('xp = Pad <mode = "reflect"> (x, before)  y = Conv (xp, w)', 2, None),
    "of channels": ("xc = Pad (xl, channels)  y = Conv <pads = [1, 1]> (xc, w)", 3, [1, 1]),
    "read twice": (
        "z = Conv <pads = [2, 2]> (x, w)  s = Slice (z, zero, twelve, two)  y = Concat <axis = 2> (z, s)",
        3,
        [2, 2],
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_padding_with_zeros_and_trimming_become_the_pads_of_a_convolution(name: str) -> None:
    body, nodes, pads = BODIES[name]
    body = body.replace("xl", "x3") if name == "of channels" else body
    first = "x3 = Slice (x, zero, three, one)  " if name == "of channels" else ""
    text = (
        "g (float[B, 4, 12] x, float[6, 4, 3] w) => (float[B, 6, M] r)"
        " <int64[6] before = {0, 0, 2, 0, 0, 0}, int64[6] all = {0, 0, 2, 0, 0, 0}, int64[1] zero = {0},"
        " int64[6] channels = {0, 1, 0, 0, 0, 0}, int64[1] three = {3}, int64[1] one = {1},"
        " int64[1] twelve = {12}, int64[1] two = {2}, int64[1] far = {100}, float half = {0.5}>"
        f" {{{first}{body}  r = Relu (y)}}"
    )
    model = parsed_model(text, {"w": (6, 4, 3)})
    x = np.random.default_rng(0).standard_normal((3, 4, 12), np.float32)
    expected = run(model, x)
    graph = make_training_graph(model, fuse=False)
    facts = find_value_facts(graph, {"x": (3, 4, 12)})
    shapes = dict(facts.shapes)
    changed = fold_padding(PartitioningContext(graph, shapes, facts.numbers), shapes)
    left = [node for node in graph.model.graph if node.op_type not in ("Constant", "Relu")]
    assert (changed, len(left)) == (nodes == 1, nodes)
    conv = next(node for node in left if node.op_type == "Conv")
    assert (list(conv.attributes["pads"].as_ints()) if "pads" in conv.attributes else None) == pads
    assert shapes[str(left[-1].outputs[0].name)] == expected.shape
    assert np.allclose(run(graph.model, x), expected, atol=1e-6)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(["r"], {"x": x})[0]
    return found
