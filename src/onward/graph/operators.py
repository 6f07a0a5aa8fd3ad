"""What is known of every operator, one row each: what its inputs hold, where gradients flow, what it keeps for them.

Passes ask this table, by fact, and keep no list of operators of their own; what is not listed has no fact: all of its
inputs are data, and a gradient flows through all of them. Lowerings are registered elsewhere (`lowering/registry.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto
from types import MappingProxyType


class Fact(Flag):
    """What can be true of an operator.

    Attributes:
        MATMUL: multiplies matrices.
        CONVOLUTION: convolves images.
        NORMALIZATION: normalizes by a mean, a variance or both.
        RECURRENT: runs a recurrent cell over time.
        CONTROL_FLOW: runs nested graphs.
        UNARY: computes each element from the element at the same place of its first input.
        BROADCASTING: computes each element from the elements at the same place of operands that broadcast.
        SAME_ELEMENTS: gives all elements of its first input, in another shape or order.
        VIEW: gives elements of its first input, some left out or repeated.
        SHAPE_ONLY: reads the shape of its input, not its elements.
        RANDOM: gives something else each time.
        NO_GRADIENT: no gradient flows through any input.
        KEEPS_INPUTS: its backward pass reads its inputs.
        KEEPS_FACTORS: its backward pass reads each of two factors for the gradient of the other.
        KEEPS_OUTPUT: its backward pass reads its output.
        RECOMPUTED: linear layers recompute its output for the gradients of their weights instead of keeping it.
    """

    NONE = 0
    MATMUL = auto()
    CONVOLUTION = auto()
    NORMALIZATION = auto()
    RECURRENT = auto()
    CONTROL_FLOW = auto()
    UNARY = auto()
    BROADCASTING = auto()
    SAME_ELEMENTS = auto()
    VIEW = auto()
    SHAPE_ONLY = auto()
    RANDOM = auto()
    NO_GRADIENT = auto()
    KEEPS_INPUTS = auto()
    KEEPS_FACTORS = auto()
    KEEPS_OUTPUT = auto()
    RECOMPUTED = auto()


_PARAMETERS = frozenset({"weight", "weight_ih", "weight_hh", "bias", "peephole"})
_STATISTICS = frozenset({"running_mean", "running_var"})


@dataclass(frozen=True)
class Operator:
    """The facts of one operator.

    Attributes:
        inputs: what each input holds, as far as something is known: `data`; a parameter by the name that torch gives it
            (with `?` where a stored tensor may as well be a constant of the arithmetic), a running statistic, a `table`
            of angles, an initial `state`, a `scale`; `-` for indices, sizes and whatever else has no gradient.
        facts: what is true of it.
    """

    inputs: tuple[str, ...] = ()
    facts: Fact = Fact.NONE

    def input(self, index: int) -> str:
        """What an input holds."""
        return self.inputs[index] if index < len(self.inputs) else "data"

    def is_parameter(self, index: int) -> bool:
        """Whether a stored tensor at an input is a parameter wherever it stands."""
        return self.input(index) in _PARAMETERS

    def is_running_statistic(self, index: int) -> bool:
        """Whether an input is a mean or variance that training updates without a gradient."""
        return self.input(index) in _STATISTICS

    def parameter_name(self, index: int) -> str:
        """What torch calls the parameter at an input, "" where none can be."""
        name = self.input(index).removesuffix("?")
        return name if name in _PARAMETERS | _STATISTICS else ""

    def blocks_gradient(self, index: int) -> bool:
        """Whether no gradient flows through an input, whatever the node's attributes are."""
        return Fact.NO_GRADIENT in self.facts or self.input(index) in {"-", *_STATISTICS}


_UNKNOWN = Operator()


def operator(op_type: str) -> Operator:
    """The facts of an operator, whatever its domain: names of the domains that are listed do not clash."""
    return OPERATORS.get(op_type, _UNKNOWN)


def has_fact(op_type: str, facts: Fact) -> bool:
    """Whether at least one of some facts is true of an operator."""
    return bool(operator(op_type).facts & facts)


def operators_with(facts: Fact) -> frozenset[str]:
    """The names of the operators of which at least one of some facts is true."""
    return frozenset(op_type for op_type, row in OPERATORS.items() if row.facts & facts)


def _row(inputs: str, facts: Fact = Fact.NONE) -> Operator:
    return Operator(tuple(inputs.split()), facts)


# fmt: off
OPERATORS: Mapping[str, Operator] = MappingProxyType({
    # products of matrices
    "Einsum": _row("", Fact.MATMUL | Fact.KEEPS_FACTORS),
    "Experts": _row("data - data", Fact.MATMUL | Fact.KEEPS_INPUTS),
    "Gemm": _row("data weight bias", Fact.MATMUL | Fact.KEEPS_FACTORS),
    "Linear": _row("data weight bias", Fact.MATMUL | Fact.KEEPS_FACTORS),
    "MatMul": _row("weight weight", Fact.MATMUL | Fact.KEEPS_FACTORS),
    # convolutions
    "Conv": _row("data weight bias", Fact.CONVOLUTION | Fact.KEEPS_INPUTS),
    "ConvInteger": _row("", Fact.CONVOLUTION),
    "ConvTranspose": _row("data weight bias", Fact.CONVOLUTION | Fact.KEEPS_INPUTS),
    "DeformConv": _row("data weight data bias", Fact.CONVOLUTION),
    "FusedConv": _row("", Fact.CONVOLUTION),
    "NhwcConv": _row("", Fact.CONVOLUTION),
    "QLinearConv": _row("data scale data data scale data scale", Fact.CONVOLUTION | Fact.NO_GRADIENT),
    # normalizations
    "BatchNormalization": _row("data weight bias running_mean running_var", Fact.NORMALIZATION | Fact.KEEPS_INPUTS),
    "GroupNormalization": _row("data weight bias", Fact.NORMALIZATION | Fact.KEEPS_INPUTS),
    "InstanceNormalization": _row("data weight bias", Fact.NORMALIZATION | Fact.KEEPS_INPUTS),
    "LayerNormalization": _row("data weight bias", Fact.NORMALIZATION | Fact.KEEPS_INPUTS | Fact.RECOMPUTED),
    "RMSNormalization": _row("data weight", Fact.NORMALIZATION | Fact.KEEPS_INPUTS | Fact.RECOMPUTED),
    # recurrent networks
    "GRU": _row("data weight_ih weight_hh bias - state", Fact.RECURRENT | Fact.KEEPS_INPUTS | Fact.KEEPS_OUTPUT),
    "LSTM": _row(
        "data weight_ih weight_hh bias - state state peephole", Fact.RECURRENT | Fact.KEEPS_INPUTS | Fact.KEEPS_OUTPUT
    ),
    "RNN": _row("data weight_ih weight_hh bias - state", Fact.RECURRENT | Fact.KEEPS_INPUTS | Fact.KEEPS_OUTPUT),
    # control flow
    "If": _row("-", Fact.CONTROL_FLOW),
    "Loop": _row("- -", Fact.CONTROL_FLOW),
    "Scan": _row("", Fact.CONTROL_FLOW),
    # elementwise, one operand
    "Abs": _row("", Fact.UNARY | Fact.KEEPS_INPUTS),
    "Acos": _row("", Fact.UNARY),
    "Acosh": _row("", Fact.UNARY),
    "Asin": _row("", Fact.UNARY),
    "Asinh": _row("", Fact.UNARY),
    "Atan": _row("", Fact.UNARY),
    "Atanh": _row("", Fact.UNARY),
    "BitwiseNot": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "Cast": _row("", Fact.UNARY),
    "Ceil": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "Celu": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Cos": _row("", Fact.UNARY | Fact.KEEPS_INPUTS),
    "Cosh": _row("", Fact.UNARY),
    "Elu": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Erf": _row("", Fact.UNARY | Fact.KEEPS_INPUTS),
    "Exp": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Floor": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "Gelu": _row("", Fact.UNARY | Fact.KEEPS_INPUTS | Fact.RECOMPUTED),
    "HardSigmoid": _row("", Fact.UNARY),
    "HardSwish": _row("", Fact.UNARY | Fact.KEEPS_INPUTS | Fact.RECOMPUTED),
    "Identity": _row("", Fact.SAME_ELEMENTS | Fact.UNARY),
    "IsInf": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "IsNaN": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "LeakyRelu": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Log": _row("", Fact.UNARY | Fact.KEEPS_INPUTS),
    "Mish": _row("", Fact.UNARY | Fact.KEEPS_INPUTS | Fact.RECOMPUTED),
    "NanToNum": _row("", Fact.UNARY | Fact.KEEPS_INPUTS),
    "Neg": _row("", Fact.UNARY),
    "Not": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "Reciprocal": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Relu": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Round": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "StopGradient": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "Selu": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Shrink": _row("", Fact.UNARY),
    "Sigmoid": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Sign": _row("", Fact.NO_GRADIENT | Fact.UNARY),
    "Sin": _row("", Fact.UNARY | Fact.KEEPS_INPUTS),
    "Sinh": _row("", Fact.UNARY),
    "Softplus": _row("", Fact.UNARY | Fact.KEEPS_INPUTS),
    "Softsign": _row("", Fact.UNARY),
    "Sqrt": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "Swish": _row("", Fact.UNARY | Fact.KEEPS_INPUTS | Fact.RECOMPUTED),
    "Tan": _row("", Fact.UNARY),
    "Tanh": _row("", Fact.UNARY | Fact.KEEPS_OUTPUT),
    "ThresholdedRelu": _row("", Fact.UNARY),
    # elementwise, operands broadcast
    "Add": _row("bias? bias?", Fact.BROADCASTING),
    "And": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "BitShift": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "BitwiseAnd": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "BitwiseOr": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "BitwiseXor": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "Div": _row("weight? weight?", Fact.BROADCASTING | Fact.KEEPS_FACTORS),
    "Equal": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "Greater": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "GreaterOrEqual": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "Less": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "LessOrEqual": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "Max": _row("", Fact.BROADCASTING | Fact.KEEPS_INPUTS),
    "Mean": _row("", Fact.BROADCASTING),
    "Min": _row("", Fact.BROADCASTING | Fact.KEEPS_INPUTS),
    "Mod": _row("", Fact.BROADCASTING),
    "Mul": _row("weight? weight?", Fact.BROADCASTING | Fact.KEEPS_FACTORS),
    "Or": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    "PRelu": _row("data weight", Fact.BROADCASTING | Fact.KEEPS_INPUTS),
    "Pow": _row("", Fact.BROADCASTING | Fact.KEEPS_INPUTS),
    "Sub": _row("bias? bias?", Fact.BROADCASTING),
    "Sum": _row("", Fact.BROADCASTING),
    "Where": _row("-", Fact.BROADCASTING),
    "Xor": _row("", Fact.NO_GRADIENT | Fact.BROADCASTING),
    # the same elements in another shape or order
    "Flatten": _row("", Fact.SAME_ELEMENTS),
    "Reshape": _row("data -", Fact.SAME_ELEMENTS),
    "Squeeze": _row("data -", Fact.SAME_ELEMENTS),
    "Transpose": _row("", Fact.SAME_ELEMENTS),
    "Unsqueeze": _row("data -", Fact.SAME_ELEMENTS),
    # some of the elements, or repeated ones, without computing
    "Expand": _row("data -", Fact.VIEW),
    "Slice": _row("data - - - -", Fact.VIEW),
    "Split": _row("data -", Fact.VIEW),
    # read a shape only
    "Shape": _row("", Fact.NO_GRADIENT | Fact.SHAPE_ONLY),
    "Size": _row("", Fact.NO_GRADIENT | Fact.SHAPE_ONLY),
    # random
    "Bernoulli": _row("", Fact.NO_GRADIENT | Fact.RANDOM),
    "Dropout": _row("data - -", Fact.RANDOM),
    "Multinomial": _row("", Fact.NO_GRADIENT | Fact.RANDOM),
    "RandomNormal": _row("", Fact.RANDOM),
    "RandomNormalLike": _row("", Fact.NO_GRADIENT | Fact.RANDOM),
    "RandomUniform": _row("", Fact.RANDOM),
    "RandomUniformLike": _row("", Fact.NO_GRADIENT | Fact.RANDOM),
    # others through which a gradient flows
    "AffineGrid": _row("data -"),
    "ArrayFeatureExtractor": _row("data -"),
    "Attention": _row("data data data data data data -", Fact.KEEPS_INPUTS | Fact.KEEPS_OUTPUT),
    "CastLike": _row("data -"),
    "CenterCropPad": _row("data -"),
    "Clip": _row("data - -"),
    "Col2Im": _row("data - -"),
    "Compress": _row("data -"),
    "CumProd": _row("data -"),
    "CumSum": _row("data -"),
    "DFT": _row("data - -"),
    "EmbeddingBag": _row("weight - - data"),
    "Gather": _row("weight? -"),
    "GatherElements": _row("data -"),
    "GatherND": _row("data -"),
    "GroupQueryAttention": _row("data data data data data - - table table - data"),
    "LogSoftmax": _row("", Fact.KEEPS_OUTPUT),
    "LpPool": _row("", Fact.KEEPS_INPUTS),
    "MaxRoiPool": _row("data -"),
    "MaxUnpool": _row("data - -"),
    "NegativeLogLikelihoodLoss": _row("data - -"),
    "OneHot": _row("- -"),
    "Pad": _row("data - - -"),
    "ReduceL1": _row("data -"),
    "ReduceL2": _row("data -", Fact.KEEPS_OUTPUT),
    "ReduceLogSum": _row("data -"),
    "ReduceLogSumExp": _row("data -", Fact.KEEPS_OUTPUT),
    "ReduceMax": _row("data -", Fact.KEEPS_INPUTS),
    "ReduceMean": _row("data -"),
    "ReduceMin": _row("data -", Fact.KEEPS_INPUTS),
    "ReduceProd": _row("data -", Fact.KEEPS_INPUTS),
    "ReduceSum": _row("data -"),
    "ReduceSumSquare": _row("data -"),
    "Resize": _row("data - - -"),
    "ReverseSequence": _row("data -"),
    "RoiAlign": _row("data data -"),
    "RotaryEmbedding": _row("data table table -"),
    "STFT": _row("data - data -"),
    "Scatter": _row("data -"),
    "ScatterElements": _row("data -"),
    "ScatterND": _row("data -"),
    "SequenceAt": _row("data -"),
    "SequenceErase": _row("data -"),
    "SequenceInsert": _row("data data -"),
    "Softmax": _row("", Fact.KEEPS_OUTPUT),
    "SoftmaxCrossEntropyLoss": _row("data - -", Fact.KEEPS_INPUTS),
    "SplitToSequence": _row("data -"),
    "SwiGLU": _row("", Fact.KEEPS_INPUTS | Fact.RECOMPUTED),
    "TensorScatter": _row("data data -"),
    "Tile": _row("data -"),
    "TopK": _row("data -"),
    "Trilu": _row("data -"),
    "Upsample": _row("data -"),
    # without a gradient
    "ArgMax": _row("", Fact.NO_GRADIENT),
    "ArgMin": _row("", Fact.NO_GRADIENT),
    "BlackmanWindow": _row("", Fact.NO_GRADIENT),
    "CategoryMapper": _row("", Fact.NO_GRADIENT),
    "ConstantFill": _row("", Fact.NO_GRADIENT),
    "ConstantOfShape": _row("", Fact.NO_GRADIENT),
    "EyeLike": _row("", Fact.NO_GRADIENT),
    "HammingWindow": _row("", Fact.NO_GRADIENT),
    "HannWindow": _row("", Fact.NO_GRADIENT),
    "Hardmax": _row("", Fact.NO_GRADIENT),
    "ImageDecoder": _row("", Fact.NO_GRADIENT),
    "Lookup": _row("", Fact.NO_GRADIENT),
    "MelWeightMatrix": _row("", Fact.NO_GRADIENT),
    "NonMaxSuppression": _row("", Fact.NO_GRADIENT),
    "NonZero": _row("", Fact.NO_GRADIENT),
    "OneHotCategories": _row("", Fact.NO_GRADIENT),
    "OptionalHasElement": _row("", Fact.NO_GRADIENT),
    "Range": _row("", Fact.NO_GRADIENT),
    "RegexFullMatch": _row("", Fact.NO_GRADIENT),
    "SequenceLength": _row("", Fact.NO_GRADIENT),
    "StringConcat": _row("", Fact.NO_GRADIENT),
    "StringNormalizer": _row("", Fact.NO_GRADIENT),
    "StringSplit": _row("", Fact.NO_GRADIENT),
    "TfIdfVectorizer": _row("", Fact.NO_GRADIENT),
    "TreeClassifier": _row("", Fact.NO_GRADIENT),
    "TreeRegressor": _row("", Fact.NO_GRADIENT),
    "Unique": _row("", Fact.NO_GRADIENT),
    # quantized
    "DequantizeBnb4": _row("data scale"),
    "DequantizeNBits": _row("data scale scale -"),
    "DequantizeLinear": _row("data scale -"),
    "DynamicQuantizeLSTM": _row("data data data bias data state state peephole scale data scale"),
    "DynamicQuantizeMatMul": _row("data data scale"),
    "MatMulIntegerToFloat": _row("data data scale scale"),
    "GatherBlockQuantized": _row("data - scale scale"),
    "MatMulBnb4": _row("data data scale"),
    "MatMulNBits": _row("data data scale scale - bias"),
    "QGemm": _row("data scale data data scale data data scale"),
    "QLinearAdd": _row("data scale data data scale data scale"),
    "QLinearAveragePool": _row("data scale data scale"),
    "QLinearGlobalAveragePool": _row("data scale data scale"),
    "QLinearLeakyRelu": _row("data scale data scale"),
    "QLinearMatMul": _row("data scale data data scale data scale", Fact.NO_GRADIENT),
    "QLinearMul": _row("data scale data data scale data scale"),
    "QLinearSigmoid": _row("data scale data scale"),
    "QLinearSoftmax": _row("data scale data scale"),
    "QuantizeLinear": _row("data scale -"),
})
# fmt: on
"""Operator -> its facts: of ONNX, of its classical domain, of onnxruntime and of onward's own domains."""
