"""The section `frozen_weights` of RUN.yaml: how weights that are not trained are stored in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.parameters.field_types import STRICT, Count

FrozenDtype = Literal["as_stored", "bf16", "int8", "int4", "nf4"]
QUANTIZED_DTYPES = ("int8", "int4", "nf4")


@dataclass(frozen=True, kw_only=True)
class FrozenWeights:
    """How the weights that a run does not train are stored in memory; the exported model keeps them as they are.

    Attributes:
        dtype: `as_stored`: as in the file, or in the type of `mixed_precision`. `bf16`: in 2 bytes. `int8`, `int4`,
            `nf4` (QLoRA): linear layers in blocks of 8 or 4 bits with an fp32 scale each, dequantized for one matmul
            at a time; embeddings, convolutions and last layers stay as they are. A note lists what is quantized.
        block_size: elements along the input axis of a layer that share a scale.
    """

    __pydantic_config__ = STRICT
    dtype: FrozenDtype = "as_stored"
    block_size: Count = 64
