"""A user's own ONNX loss model: tied by name, renamed, converted, and refused where it cannot fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx import parser

from onward.errors import ModelError
from onward.graph.losses.adding import add_loss
from onward.graph.losses.spec import LossSpec
from onward.graph.reading.model_file import read_model
from onward.graph.training_graph import make_training_graph
from tests.graph.loss_models import pass_through, run_loss

FOCAL = """
<ir_version: 8, opset_import: ["" : %d, "local" : 1]>
focal (float[N, C] scores, int64[N] wanted, float[N] sample_weight) => (float loss, float[N] per_sample)
<float two = {2.0}, float one = {1.0}>
{
    log_p = LogSoftmax<axis = 1>(scores)
    minus = NegativeLogLikelihoodLoss<reduction = "none">(log_p, wanted)
    p = local.exp_of_minus(minus)
    rest = Sub(one, p)
    focus = Pow(rest, two)
    raw = Mul(focus, minus)
    per_sample = Mul(raw, sample_weight)
    loss = ReduceMean<keepdims = 0>(per_sample)
}
<domain: "local", opset_import: ["" : %d]>
exp_of_minus (x) => (y) { n = Neg(x) y = Exp(n) }
"""


def _write(text: str, folder: Path, name: str = "own.onnx") -> Path:
    path = folder / name
    onnx.save(parser.parse_model(text), path)
    return path


@pytest.mark.parametrize(("own", "models"), [(13, 13), (18, 18), (13, 18), (18, 13)])
def test_focal_loss(own: int, models: int, tmp_path: Path):
    """A loss with a local function and two labels equals the same formula in torch, also at another opset."""
    path = _write(FOCAL % (own, own), tmp_path)
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(5, 4)).astype(np.float32), rng.integers(0, 4, 5)
    sample_weight = rng.uniform(size=5).astype(np.float32)
    spec = LossSpec(
        type="graph", graph=path, graph_inputs={"scores": "logits", "wanted": "labels"}, graph_output="loss"
    )
    outputs, names = run_loss(
        pass_through(models, {"logits": ["batch", 4]}),
        spec,
        {"logits_in": logits, "labels": labels, "sample_weight": sample_weight},
        tmp_path,
    )
    minus = F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels), reduction="none")
    per_sample = (1 - torch.exp(-minus)) ** 2 * minus * torch.from_numpy(sample_weight)
    assert names.labels == ("labels", "sample_weight")
    assert names.parts == ("per_sample",)
    assert outputs["loss"] == pytest.approx(float(per_sample.mean()), rel=1e-6)
    np.testing.assert_allclose(outputs["per_sample"], per_sample.numpy(), rtol=1e-5)


def test_names_and_dimensions(tmp_path: Path):
    """Names get the prefix `loss/`, the model's own dimension names reach the labels, constants never train."""
    path = _write(FOCAL % (13, 13), tmp_path)
    spec = LossSpec(type="graph", graph=path, graph_inputs={"scores": "logits"})
    graph = make_training_graph(pass_through(13, {"logits": ["batch", 4]}), loss=spec)
    inputs = {str(value.name): value for value in graph.model.graph.inputs}
    assert [str(d) for d in inputs["wanted"].shape] == ["batch"]
    assert inputs["wanted"].dtype is ir.DataType.INT64
    own = [node for node in graph.model.graph if not str(node.name).startswith("pass_")]
    assert all(str(node.name).startswith("loss/") for node in own)
    assert set(graph.loss_names.constants) <= set(graph.model.graph.initializers)
    assert all(name.startswith("loss/") for name in graph.loss_names.constants)
    assert graph.weights == ()
    assert graph.loss == "loss"


def test_a_low_precision_prediction_is_cast_to_what_the_loss_takes(tmp_path: Path):
    """A float16 output feeds a float32 loss model through a Cast."""
    path = _write(FOCAL % (13, 13), tmp_path)
    model = read_model(pass_through(13, {"logits": ["batch", 4]}, onnx.TensorProto.FLOAT16))
    names = add_loss(model, LossSpec(type="graph", graph=path, graph_inputs={"scores": "logits"}))
    assert names.loss == "loss"
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_an_output_that_is_an_input(tmp_path: Path):
    """A loss model that hands its input through leaves the user's names alone."""
    text = """<ir_version: 8, opset_import: ["" : 13]> own (float y, float t) => (float loss, float y)
    { loss = Sub(y, t) }"""
    model = read_model(pass_through(13, {"y": []}))
    names = add_loss(model, LossSpec(type="graph", graph=_write(text, tmp_path)))
    assert names.parts == ("loss/y",)
    assert [value.name for value in model.graph.outputs] == ["y", "loss", "loss/y"]


@pytest.mark.parametrize(
    ("text", "spec", "words"),
    [
        (FOCAL % (13, 13), {"graph_inputs": {"score": "logits"}}, "graph_inputs names 'score'.*did you mean 'scores'"),
        (FOCAL % (13, 13), {}, "reads no output of the model: its inputs are scores, wanted, sample_weight"),
        (
            FOCAL % (13, 13),
            {"graph_inputs": {"scores": "logits"}, "graph_output": "cost"},
            "graph_output is 'cost', but the outputs of .* are loss, per_sample",
        ),
        (
            """<ir_version: 8, opset_import: ["" : 13]> own (float[N] logits) => (float[N] loss)
            { loss = Neg(logits) }""",
            {},
            r"its input 'logits' is \[N\], but the model's output 'logits' is \[batch, 4\]",
        ),
        (
            """<ir_version: 8, opset_import: ["" : 13]> own (int64[N, 4] logits) => (int64[N, 4] loss)
            { loss = Neg(logits) }""",
            {},
            "its output 'loss' is int64; a loss is a float",
        ),
        (
            """<ir_version: 8, opset_import: ["" : 13]> own (int64[N, 4] logits) => (float[N, 4] loss)
            { loss = Cast<to = 1>(logits) }""",
            {},
            "its input 'logits' is int64, but the model's output 'logits' is float",
        ),
        (
            """<ir_version: 8, opset_import: ["" : 13, "com.acme" : 2]> own (float[N, 4] logits) => (float loss)
            { loss = com.acme.Cost(logits) }""",
            {},
            "",
        ),
    ],
)
def test_what_does_not_fit_is_said(text: str, spec: dict, words: str, tmp_path: Path):
    """Unknown names, ranks and types are named; a custom domain is left to the lowering."""
    path = _write(text, tmp_path)
    model = read_model(pass_through(13, {"logits": ["batch", 4]}))
    if not words:
        add_loss(model, LossSpec(type="graph", graph=path, **spec))
        assert model.opset_imports["com.acme"] == 2
        return
    with pytest.raises(ModelError, match=words):
        add_loss(model, LossSpec(type="graph", graph=path, **spec))


def test_a_loss_model_that_cannot_be_converted_is_refused(tmp_path: Path):
    """An operator that the model's opset has not yet: both opsets and the operator are named."""
    text = """<ir_version: 8, opset_import: ["" : 20]> own (float[N, 4] logits) => (float loss)
    { g = Gelu(logits) loss = ReduceMean<keepdims = 0>(g) }"""
    model = read_model(pass_through(13, {"logits": ["batch", 4]}))
    with pytest.raises(ModelError, match=r"written for opset 20 and the model for opset 13.*Gelu.*changed"):
        add_loss(model, LossSpec(type="graph", graph=_write(text, tmp_path)))


def test_the_loss_model_is_missing(tmp_path: Path):
    """No path at all, and a path to nothing."""
    model = read_model(pass_through(13, {"logits": ["batch", 4]}))
    with pytest.raises(ModelError, match=r"loss.graph, the path of the ONNX loss model, is missing"):
        add_loss(model, LossSpec(type="graph"))
    with pytest.raises(ModelError, match="does not exist"):
        add_loss(model, LossSpec(type="graph", graph=tmp_path / "none.onnx"))
