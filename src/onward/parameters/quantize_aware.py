"""The section `quantize_aware` of RUN.yaml: training a model for integers, which the exported file then holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.parameters.field_types import STRICT, Flag


@dataclass(frozen=True, kw_only=True)
class QuantizeAware:
    """Quantization-aware training: weights and activations are rounded as the exported integer model rounds them.

    Attributes:
        weights: what `Conv`, `Gemm` and `MatMul` store: `int8` or `int4` (opset 21); absent: no quantization. A file in
            QDQ form keeps the types that it has.
        activations: `uint8` or `int8`: what these operators read, and what `Conv` computes, is quantized too, to this
            type. Training is the same with both; ONNX Runtime on x86-64 has integer kernels for residual networks with
            `uint8` only. `none`: activations are not quantized.
        per_channel: one scale for each output channel of a weight, or one for all of it.
        observer: how scales are found. `lsq`: they are trained by the gradient of LSQ (Esser et al., arXiv:1902.08153);
            `moving_average`: a moving average of the largest value, as torch.ao has it.
    """

    __pydantic_config__ = STRICT
    weights: Literal["int8", "int4"] | None = None
    activations: Literal["uint8", "int8", "none"] = "uint8"
    per_channel: Flag = True
    observer: Literal["lsq", "moving_average"] = "lsq"
