"""Which operators have a lowering, and since which version, without importing torch.

Importing the lowerings costs more than reading a model of a thousand nodes. The test of this file compares it with the
registry and prints what to change. The operators of a layout, `onward.parallel`, are none that a file may hold.
"""

from __future__ import annotations

from collections.abc import Mapping

_SINCE: Mapping[str, Mapping[int, str]] = {
    "": {
        1: """
            Abs Add And ArgMax ArgMin AveragePool BatchNormalization Cast Ceil Clip Concat Constant
            ConstantFill Conv ConvTranspose DepthToSpace Div Dropout Elu Equal Exp Flatten Floor GRU Gather
            Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater HardSigmoid Hardmax Identity If
            InstanceNormalization LRN LSTM LayerNormalization LeakyRelu Less Log LogSoftmax Loop
            LpNormalization LpPool MatMul Max MaxPool MaxRoiPool Mean Min Mul Neg Not Or PRelu Pad Pow RNN
            RandomNormal RandomNormalLike RandomUniform RandomUniformLike Reciprocal ReduceL1 ReduceL2
            ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
            Relu Reshape Selu Shape Sigmoid SimplifiedLayerNormalization Size Slice Softmax Softplus Softsign
            SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose Unsqueeze Upsample Xor
        """,
        7: "Acos Asin Atan Cos Multinomial Sin Tan",
        8: "Expand Scan",
        9: """
            Acosh Asinh Atanh Compress ConstantOfShape Cosh Erf EyeLike IsNaN MaxUnpool
            MeanVarianceNormalization NonZero OneHot Scatter Shrink Sign Sinh TfIdfVectorizer Where
        """,
        10: """
            ConvInteger DequantizeLinear IsInf MatMulInteger Mod NonMaxSuppression QLinearConv QLinearMatMul
            QuantizeLinear Resize ReverseSequence RoiAlign ThresholdedRelu
        """,
        11: """
            BitShift ConcatFromSequence CumSum Det DynamicQuantizeLinear GatherElements GatherND Range Round
            ScatterElements ScatterND SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
            SequenceLength SplitToSequence Unique
        """,
        12: "Celu Einsum GreaterOrEqual LessOrEqual NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
        14: "HardSwish Trilu",
        15: "Bernoulli CastLike Optional OptionalGetElement OptionalHasElement",
        16: "GridSample",
        17: "BlackmanWindow DFT HammingWindow HannWindow MelWeightMatrix STFT SequenceMap",
        18: "BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CenterCropPad Col2Im GroupNormalization Mish",
        19: "DeformConv",
        20: "AffineGrid Gelu",
        23: "Attention RMSNormalization RotaryEmbedding",
        24: "Swish TensorScatter",
        26: "BitCast CumProd",
        27: "CausalConvWithState LinearAttention",
        28: "SwiGLU",
    },
    "ai.onnx.ml": {
        1: "ArrayFeatureExtractor FeatureVectorizer Normalizer",
    },
    "ai.onnx.preview": {
        1: "FlexAttention",
    },
    "ai.onnx.preview.training": {
        1: "Adagrad Adam Gradient Momentum",
    },
    "com.microsoft": {
        1: """
            Attention BiasAdd BiasDropout BiasGelu BiasSoftmax BiasSplitGelu DequantizeLinear
            DynamicQuantizeLSTM DynamicQuantizeMatMul EmbedLayerNormalization ExpandDims FastGelu FusedConv
            FusedGemm FusedMatMul FusedMatMulActivation GatherBlockQuantized Gelu GemmFastGelu GridSample
            GroupNorm GroupQueryAttention Inverse MatMulBnb4 MatMulIntegerToFloat MatMulNBits MoE
            MultiHeadAttention NhwcConv NhwcMaxPool QAttention QEmbedLayerNormalization QGemm QLinearAdd
            QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul
            QLinearSigmoid QLinearSoftmax QLinearWhere QMoE QuantizeLinear QuickGelu RelativePositionBias
            RotaryEmbedding SkipGroupNorm SkipLayerNormalization SkipSimplifiedLayerNormalization
            TransposeMatMul Trilu
        """,
    },
    "onward.classical": {
        1: """
            Lookup OneHotCategories PairwiseCoupling Probit RadialBasis SoftmaxZero TreeClassifier
            TreeRegressor
        """,
    },
    "onward.fused": {
        1: """
            Attention CTCGreedyMatches CTCLoss DequantizeBnb4 DequantizeLinear DequantizeNBits EmbeddingBag
            Experts GatherReplicas Gelu GroupNormalization LayerNormalization Linear LinearCrossEntropy MovingScale
            NanToNum OpenedMask RMSNormalization RotaryEmbedding ScaleGradient Softplus StopGradient SwiGLU Swish
            Unpack VisibleRows
        """,
    },
}
"""Domain -> first version with a lowering -> operators."""

FIRST_VERSIONS: Mapping[tuple[str, str], int] = {
    (domain, op_type): since
    for domain, versions in _SINCE.items()
    for since, op_types in versions.items()
    for op_type in op_types.split()
}
"""(domain, operator) -> the first version that a lowering computes."""


def has_lowering(domain: str, op_type: str, version: int) -> bool:
    """Whether an operator has a lowering at an opset version of its domain."""
    since = FIRST_VERSIONS.get((domain, op_type))
    return since is not None and since <= version
