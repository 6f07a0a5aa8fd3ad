"""What inspection prints."""

from __future__ import annotations

from onnx import parser

from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from tests.genai_models import genai_model
from tests.graph.inspection.models import inspected_model, why_not


def test_text():
    """The whole page, as a user sees it."""
    assert render(inspect(inspected_model(), why_not)).splitlines() == [
        "net",
        "  ai.onnx 17, com.acme 3; IR version 8; written by acme 1.2; 7 nodes",
        "",
        "Inputs",
        "  image  float32  [batch, 3, 8, 8]",
        "",
        "Outputs",
        "  logits    float32  [batch, 10]",
        "  features  float32  [batch, 16]",
        "",
        "Symbolic dimensions",
        "  batch  image[0]",
        "",
        "Trainable weights: 6 (650 parameters, 2.6 kB)",
        "  name       type     shape          parameters    size",
        "  kernel     float32  [16, 3, 3, 3]         432  1.7 kB",
        "  head       float32  [16, 10]              160   640 B",
        "  shift      float32  [16]                   16    64 B",
        "  one        float32  [16]                   16    64 B",
        "  zero       float32  [16]                   16    64 B",
        "  head_bias  float32  [10]                   10    40 B",
        "",
        "Tensors that are not trainable: 3",
        "     why                                       parameters   size  names",
        "  2  running statistic of batch normalization          32  128 B  mean, variance",
        "  1  a rank-0 constant                                  1    4 B  factor",
        "  training.weights_to_train overrides this by exact name",
        "",
        "Operators: 7 kinds, 7 nodes",
        "  BatchNormalization 1, Conv 1, Flatten 1, Gemm 1, GlobalAveragePool 1, Mul 1, com.acme.Squash 1",
        "",
        "Cannot be lowered, so the model cannot be trained as it is",
        "  com.acme.Squash  no lowering of version 3  node_5",
        "",
        "Weights adapted if adapter.rank is set: 1; at rank 8, 208 parameters train. adapter.targets takes these "
        "patterns or others",
        "  1  head  10 outputs, 16 inputs",
        "",
        "Cut points: 2, where one activation separates two parts",
        "  value     shape              nodes before  after  weights before",
        "  c         [batch, 16, 6, 6]             1      6               2",
        "  features  [batch, 16]                   6      1               4",
    ]


def test_quantized_layers_are_listed_as_adapter_targets_takes_them():
    lines = render(inspect(genai_model())).splitlines()
    assert [line.strip() for line in lines if "attn" in line and " outputs" in line] == [
        "1  model.layers.*.attn.qkv_proj.MatMul.weight_Q4  64 outputs, 32 inputs",
        "1  model.layers.*.attn.o_proj.MatMul.weight_Q4    32 outputs, 32 inputs",
    ]


def test_long_lists_are_counted():
    text = render(inspect(inspected_model()), largest_weights=2)
    assert "... and 4 smaller ones (232 B)" in text
    assert "Cannot be lowered" not in text


def test_a_model_without_weights():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Relu(x) }'
    )
    text = render(inspect(model))
    assert "Trainable weights: 0 (0 parameters, 0 B)\n  none" in text
    assert "Cut points: none" in text
