"""Whether a file whose export fixed the batch size trains with another: proven once, or why not."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from onward.proposal.any_batch_size import with_batch_proof
from onward.proposal.model_facts import BatchProof, Port
from tests.proposal.facts import model, port


def saved(body: str, folder: Path) -> Path:
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[2, 3] x) => (float[2, 3] y) {{ {body} }}'
    onnx.save(onnx.parser.parse_model(text), folder / "net.onnx")
    return folder / "net.onnx"


def test_an_open_batch_and_one_that_was_proven_are_left_alone() -> None:
    is_open = model((port("x", 3),), ())
    assert with_batch_proof(is_open) is is_open
    proven = model((Port("x", "float32", (2, 3)),), (), batch_proof=BatchProof(0.0))
    assert with_batch_proof(proven) is proven


@pytest.mark.filterwarnings("ignore:The model has no trainable weights")
@pytest.mark.parametrize(("body", "reason"), [("y = Relu(x)", ""), ("m = ReduceMax(x) y = Sub(x, m)", "ReduceMax")])
def test_numbers_decide(body: str, reason: str, tmp_path: Path) -> None:
    fixed = model((Port("x", "float32", (2, 3)),), (), path=saved(body, tmp_path))
    proof = with_batch_proof(fixed).batch_proof
    assert proof is not None
    assert (proof.difference is None) is bool(reason)
    assert reason in proof.reason


def test_a_file_that_cannot_be_read_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"nonsense")
    proof = with_batch_proof(model((Port("x", "float32", (2, 3)),), (), path=tmp_path / "net.onnx")).batch_proof
    assert proof is not None
    assert proof.difference is None
    assert "net.onnx" in proof.reason
