"""Mixtures whose tokens the model puts into slots itself: exports, forms of graphs, and what is left as it is."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from onward.graph.training_graph import make_training_graph
from tests.graph.fusion.pairs import kinds
from tests.graph.fusion.test_experts import D, E, assert_equal, model, tokens
from tests.graph.mixtures import SLOTS, Mixture, exported

ROUTED = (
    "logits = MatMul(x, router)\nscores = Softmax(logits)\nbest = ArgMax<axis=-1>(scores)\n"
    "chose = Equal(best, numbers)\nmask = CastLike(chose, scores)\ncombine = Mul(mask, scores)\n"
)
ROWS = ROUTED + 'rows = Einsum<equation="bne,bnd->bed">(mask, x)\n'
RESULT = '\ny = Einsum<equation="bne,bed->bnd">(combine, o)'
STACK = 'h = Einsum<equation="bed,edf->bef">(rows, up)\na = Relu(h)\no = Einsum<equation="bef,efd->bed">(a, down)'
LOOP = (
    "one = Constant<value_ints=[1]>()\nr0, r1, r2 = Split<axis=1, num_outputs=3>(rows)\n"
    + "".join(f"h{e} = MatMul(r{e}, up{e})\na{e} = Relu(h{e})\no{e} = MatMul(a{e}, down{e})\n" for e in range(E))
    + "o = Concat<axis=1>(o0, o1, o2)"
)
OUTPUT = f"double[b,n,{D}] y"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOTS, ids=lambda kind: kind.__name__)
def test_exports(tmp_path: Path, kind: type[Mixture]) -> None:
    path = exported(kind, tmp_path / "m.onnx")
    assert_equal(onnx.load(path), tokens(3, 6, 8))
    assert make_training_graph(path, fuse=True).unfused == ()


@pytest.mark.parametrize("experts", [STACK, LOOP], ids=["stack", "loop"])
def test_a_stack_and_single_experts(experts: str) -> None:
    assert_equal(model(ROWS + experts + RESULT), tokens(2, 3, D))


def test_features_before_experts() -> None:
    body = ROUTED + 'rows = Einsum<equation="bne,bnd->dbe">(mask, x)\n' + STACK.replace("bed,edf->bef", "dbe,edf->ebf")
    assert_equal(model(body.replace("bef,efd->bed", "ebf,efd->bed") + RESULT), tokens(2, 3, D))


MIXED_ORDER = LOOP.replace("Concat<axis=1>(o0, o1, o2)", "Concat<axis=1>(o1, o0, o2)")
OTHERS = {
    "experts in another order": (ROWS + MIXED_ORDER + RESULT, OUTPUT),
    "experts with other activations": (ROWS + LOOP.replace("Relu(h1)", "Tanh(h1)") + RESULT, OUTPUT),
    "an expert for two": (ROWS + LOOP.replace(", up1)", ", up0)") + RESULT, OUTPUT),
    "an unknown activation": (ROWS + LOOP.replace("Relu", "Softsign") + RESULT, OUTPUT),
    "hidden features that are read elsewhere": (ROWS + STACK + RESULT, f"{OUTPUT}, double[b,{E},5] a"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_one_node_stays_and_is_reported(name: str) -> None:
    graph = make_training_graph(model(*OTHERS[name]), fuse=True)
    assert kinds(graph).get("experts") is None
    (text,) = graph.unfused
    assert text.startswith(f"a mixture of {E} experts")
    assert "stays as it is exported" in text


def test_layers_of_heads_are_no_mixture() -> None:
    """A stack of matrices alone, one for each head, is a projection."""
    body = ROUTED + 'rows = Einsum<equation="bne,bnd->bed">(mask, x)\nh = Einsum<equation="bed,edf->bef">(rows, up)'
    graph = make_training_graph(model(body + "\ny = Tanh(h)", f"double[b,{E},5] y"), fuse=True)
    assert kinds(graph).get("experts") is None
