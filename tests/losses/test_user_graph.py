"""A loss that is the user's own ONNX model: reduced where it is no single number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.errors import ModelError
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import pass_through, run_loss

COST = "c = Sub(y, t) cost = Abs(c)"


def save(body: str, out: str, folder: Path) -> Path:
    text = f'<ir_version: 8, opset_import: ["": 13]> g (float[b] y, float[b] t) => ({out}) {{ {body} }}'
    onnx.save(onnx.parser.parse_model(text), folder / "loss.onnx")
    return folder / "loss.onnx"


@pytest.mark.parametrize(
    ("body", "out", "reduction", "expected"),
    [
        (COST, "float[b] cost", "mean", 1.5),
        (COST, "float[b] cost", "sum", 3.0),
        (f"{COST.replace('cost', 'd')} cost = ReduceMax<keepdims = 0>(d)", "float cost", "mean", 2.0),
    ],
)
def test_numbers_are_reduced_and_one_is_taken(
    body: str, out: str, reduction: str, expected: float, tmp_path: Path
) -> None:
    spec = LossSpec(
        type="graph", graph=save(body, out, tmp_path), reduction=reduction, graph_inputs={"y": "prediction", "t": "t"}
    )
    feeds = {"prediction_in": np.array([1.0, 2.0], np.float32), "t": np.array([2.0, 4.0], np.float32)}
    outputs, names = run_loss(pass_through(13, {"prediction": ["b"]}), spec, feeds, tmp_path)
    assert outputs[names.loss] == pytest.approx(expected)


def test_a_model_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"loss.type is 'graph', but loss.graph, the path of the ONNX loss model, is"):
        run_loss(pass_through(13, {"y": ["b"]}), LossSpec(type="graph"), {}, tmp_path)
