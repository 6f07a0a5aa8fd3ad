"""Computing in 16 bits with fp32 masters: which tensors get a low-precision copy, and what autocast does beside it.

Weights are cast inside the autograd graph, so that gradients arrive at the fp32 masters in fp32. torch's autocast
keeps losses, norms and softmax in fp32 where their inputs ask for it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from onward.parameters import MixedPrecision


@dataclass(frozen=True)
class Precision:
    """The type of the forward and backward pass; None: the model's own types.

    Attributes:
        dtype: torch.float16, torch.bfloat16 or None.
    """

    dtype: torch.dtype | None

    @classmethod
    def of(cls, parameters: MixedPrecision) -> Precision:
        """The precision that a run asks for."""
        if not parameters.use_mixed_precision:
            return cls(None)
        return cls(torch.bfloat16 if parameters.use_bfloat16 else torch.float16)

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass."""
        if self.dtype is None:
            return contextlib.nullcontext()
        # Copies of the weights are made once a pass, before it; autocast's own cache would hold them twice.
        return torch.autocast(device.type, dtype=self.dtype, cache_enabled=False)

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """A float tensor in the computing type, finite numbers kept finite; anything else as it is."""
        if self.dtype is None or tensor.dtype not in (torch.float32, torch.float64):
            return tensor
        if not tensor.requires_grad:
            # Masks are often the lowest fp32 number, which fp16 cannot hold; infinity would make NaN of full rows.
            limits = torch.finfo(self.dtype)
            infinite = torch.isinf(tensor)
            tensor = torch.where(infinite, tensor, tensor.clamp(limits.min, limits.max))
        return tensor.to(self.dtype)
