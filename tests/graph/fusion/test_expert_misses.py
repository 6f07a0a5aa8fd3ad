"""What inspect and plan report of mixtures of experts that stay as they are exported."""

from __future__ import annotations

import re

import pytest

from onward.graph.inspection.facts import inspect
from onward.graph.training_graph import make_training_graph
from tests.graph.fusion.test_experts import LOOP, STACK, SUM, D, E, model, zeros_of

OUTPUT = f"double[b,n,{D}] y"
STAYS = f"a mixture of {E} experts, 2 for each token, stays as it is exported"
MISSED: dict[str, tuple[str, str, str]] = {
    "activation": (
        LOOP.replace("= Relu(", "= Softsign(") + SUM, OUTPUT,
        r"layer back, with or without a gate \(Softsign at ",
    ),
    "body": (
        LOOP.replace("MatMul(x, up1)", "MatMul(x, up1)\nb1 = Mul(h1, h1)").replace("Relu(h1)", "Relu(b1)") + SUM,
        OUTPUT, "its experts are no linear layer, activation and linear layer back",
    ),
    "read elsewhere": (LOOP + SUM, f"{OUTPUT}, double[b,n,{D}] o1", r"is read elsewhere, too, .*\('y'\)"),
    "shared weights": (LOOP.replace("up1)", "up0)") + SUM, OUTPUT, "experts share weights"),
    "slots of a best expert": (
        "logits = MatMul(x, router)\nshares = Softmax(logits)\nbest = ArgMax<axis=-1, keepdims=0>(shares)\n"
        "wide = Unsqueeze(best, last)\nmask = Equal(wide, numbers)\nones = Cast<to=11>(mask)\n"
        'rows = Einsum<equation="bne,bnd->ebnd">(ones, x)\nh = Einsum<equation="ebnd,edf->ebnf">(rows, up)\n'
        'a = Relu(h)\ny = Einsum<equation="ebnf,efd,bne->bnd">(a, down, shares)',
        OUTPUT, "reading it ended at .*Einsum",
    ),
    "stack": (STACK.replace("Relu(h)", "Softsign(h)"), OUTPUT, "reading it ended at .*an operator Softsign"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED, ids=list(MISSED))
def test_a_mixture_that_stays_is_reported_with_the_reason(name: str) -> None:
    body, outputs, reason = MISSED[name]
    proto = model(body, outputs)
    graph = make_training_graph(proto, fuse=True, weights_not_to_train=zeros_of(proto))
    (text,) = graph.unfused
    assert text in graph.notes
    assert text in inspect(proto).notes
    assert text.startswith(STAYS if "slots" not in name else STAYS.replace("2 for", "1 for"))
    assert "docs/explanation/fusion.md" in text
    assert re.search(reason, text), text


@pytest.mark.parametrize(
    "body", ["logits = MatMul(x, router)\nbest, chosen = TopK(logits, k)\nr = ReduceSum(best, last)\ny = Mul(x, r)"]
)
def test_the_best_scores_of_what_is_no_mixture_are_no_news(body: str) -> None:
    assert make_training_graph(model(body), fuse=True).unfused == ()


def test_a_mixture_that_is_fused_is_no_news() -> None:
    proto = model(LOOP + SUM)
    assert make_training_graph(proto, fuse=True, weights_not_to_train=zeros_of(proto)).unfused == ()
