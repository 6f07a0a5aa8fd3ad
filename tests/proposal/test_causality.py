"""Whether a model of token sequences looks ahead, found by running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.proposal.causality import is_causal
from tests.proposal.facts import model, port

pytestmark = pytest.mark.filterwarnings("ignore:The model has no trainable weights")
SUM = "r = ReduceSum<keepdims = 1>(e, one)"
BODIES = {
    "each by itself": ("y = Neg(e)", True),
    "those before": ("y = CumSum(e, axis)", True),
    "those after": ("y = CumSum<reverse = 1>(e, axis)", False),
    "all": (f"{SUM} y = Add(e, r)", False),
}


def facts(body: str, folder: Path, **given: Any) -> Any:
    text = (
        '<ir_version: 8, opset_import: ["": 18]> g (int64[b, t] ids) => (float[b, t, 2] y) '
        f"<int64 axis = {{1}}, int64[1] one = {{1}}> {{ e = Gather(table, ids) {body} }}"
    )
    proto = onnx.parser.parse_model(text)
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(proto, folder / "net.onnx")
    net = model((port("ids", "t", dtype="int64"),), (port("y", "t", 2),), path=folder / "net.onnx", **given)
    return net


@pytest.mark.parametrize("name", BODIES)
def test_a_later_token_must_not_change_earlier_scores(name: str, tmp_path: Path) -> None:
    body, expected = BODIES[name]
    assert is_causal(facts(body, tmp_path, tables={"ids": 5})) is expected


def test_a_model_that_cannot_be_run_is_taken_as_causal(tmp_path: Path) -> None:
    assert is_causal(facts("y = Neg(e)", tmp_path, tables={"ids": 50}))  # tokens that the table does not have
    (tmp_path / "net.onnx").write_bytes(b"nonsense")
    assert is_causal(model((port("ids", "t"),), (port("y", "t", 2),), path=tmp_path / "net.onnx"))
