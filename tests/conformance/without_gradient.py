"""Operators without a gradient, and inputs that none is taken of, each with the reason. Everything else is checked."""

from __future__ import annotations

_INTEGERS = "its results are integers or booleans"
_OF_INTEGERS = "its inputs are integers"
_MADE = "it makes tensors from numbers, or draws them"
_STRAIGHT_THROUGH = (
    "its gradient is the straight-through rule, which differs from finite differences on purpose; "
    "tests/lowering/ops/test_quantization.py checks it against torch.fake_quantize"
)

_FLOAT32 = (
    "it computes in float32 whatever it is given; tests/lowering/ops/test_classical.py compares its gradient with "
    "finite differences"
)
_QUANTIZED = "it computes with rounded numbers, through which gradients pass by the straight-through rule"

WITHOUT_GRADIENT: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        [
            ("", name)
            for name in (
                "And", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less",
                "LessOrEqual", "NonMaxSuppression", "NonZero", "Not", "OptionalHasElement", "Or", "SequenceLength",
                "Shape", "Size", "Xor",
            )
        ],
        _INTEGERS,
    ),
    **dict.fromkeys(
        [
            ("", name)
            for name in (
                "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "ConvInteger", "MatMulInteger",
                "QLinearConv", "QLinearMatMul", "TfIdfVectorizer",
            )
        ],
        _OF_INTEGERS,
    ),
    **dict.fromkeys(
        [
            ("", name)
            for name in (
                "Bernoulli", "BlackmanWindow", "Constant", "ConstantFill", "ConstantOfShape", "EyeLike",
                "HammingWindow", "HannWindow", "MelWeightMatrix", "Multinomial", "RandomNormal", "RandomNormalLike",
                "RandomUniform", "RandomUniformLike", "Range", "SequenceEmpty",
            )
        ],
        _MADE,
    ),
    ("ai.onnx.ml", "FeatureVectorizer"): _FLOAT32,
    ("ai.onnx.ml", "Normalizer"): _FLOAT32,
    ("", "BitCast"): "the bits of a number have no gradient",
    ("", "Hardmax"): "its results are 0 and 1, constant but for jumps",
    **dict.fromkeys(
        [
            ("com.microsoft", name)
            for name in (
                "DequantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat",
                "QAttention", "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool",
                "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere",
                "GatherBlockQuantized", "NhwcMaxPool", "QEmbedLayerNormalization", "QLinearConv", "QMoE",
                "QuantizeLinear",
            )
        ],
        _QUANTIZED,
    ),
    ("", "DynamicQuantizeLinear"): _STRAIGHT_THROUGH,
    ("", "QuantizeLinear"): _STRAIGHT_THROUGH,
    ("", "DequantizeLinear"): _STRAIGHT_THROUGH,
}  # fmt: skip
"""(domain, operator) -> why its gradient is not checked by finite differences."""

NUMBERS: dict[tuple[str, str, int], str] = {
    ("", "Dropout", 1): "the ratio is a number of the program",
    ("", "Pad", 2): "the value of the border is a number of the program",
    ("", "Resize", 1): "the region of tf_crop_and_resize is a number of the program",
    ("", "Resize", 2): "scales decide sizes",
    ("", "Upsample", 1): "scales decide sizes",
}
"""(domain, operator, input) -> why a float input is not differentiated."""

NOT_DOUBLE = {
    "test_dequantizelinear*": "scales are float32 at most",
    "test_quantizelinear*": "scales are float32 at most",
    "test_mod_float_edge_cases*": "the examples stand on jumps",
}
"""Pattern of cases -> why float64 or a small step gives no number to compare with."""
