"""Computing in 16 or 8 bits with fp32 masters: which tensors get a low-precision copy, and what autocast does.

Weights are cast inside the autograd graph, so that gradients arrive at the fp32 masters in fp32. torch's autocast
keeps losses, norms and softmax in fp32 where their inputs ask for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from onward.errors import ParametersError
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.lowering.rewriting.float8 import why_not, with_float8_products
from onward.parameters import MixedPrecision
from onward.spelling import shortened

PART = {"cpu": 2**20, "cuda": 2**26}
"""So many elements are cast at a time, by device."""

LISTED = 5
"""So many products that stay as they are a note names."""


@dataclass(frozen=True)
class Precision:
    """The type of the forward and backward pass; None: the model's own types.

    Attributes:
        dtype: torch.float16, torch.bfloat16 or None.
        float8: matmuls with weights are computed in FP8.
    """

    dtype: torch.dtype | None
    float8: bool = False

    @classmethod
    def of(cls, settings: MixedPrecision) -> Precision:
        """The precision that a run asks for."""
        assert settings.use_mixed_precision != "auto", "a run decides what auto means before it is built"
        if not settings.use_mixed_precision:
            return cls(None, settings.float8)
        return cls(torch.bfloat16 if settings.use_bfloat16 else torch.float16, settings.float8)

    def program(self, program: Program, tensors: Mapping[str, torch.Tensor]) -> Program:
        """A program as it is computed in this precision; `tensors` are those that it is called with."""
        return with_float8_products(program, tensors).program if self.float8 else program

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass."""
        if self.dtype is None:
            return contextlib.nullcontext()
        # Copies of the weights are made once a pass, before it; autocast's own cache would hold them twice.
        return torch.autocast(device.type, dtype=self.dtype, cache_enabled=False)

    def type_of(self, tensor: torch.Tensor) -> torch.dtype | None:
        """The type that a tensor is computed in; None: its own."""
        return self.dtype if tensor.dtype in (torch.float32, torch.float64) else None

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """A float tensor in the computing type, finite numbers kept finite; anything else as it is."""
        dtype = self.type_of(tensor)
        if dtype is None:
            return tensor
        if tensor.requires_grad:
            return tensor.to(dtype)
        lowered = torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
        # Part by part: temporary tensors of a large embedding would take several times its memory.
        target, source = lowered.view(-1), tensor.reshape(-1)
        part = PART.get(tensor.device.type, PART["cpu"])
        for start in range(0, tensor.numel(), part):
            target[start : start + part] = self._finite(source[start : start + part])
        return lowered

    def _finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """Masks are often the lowest fp32 number, which fp16 cannot hold; infinity would make NaN of full rows."""
        assert self.dtype is not None
        limits = torch.finfo(self.dtype)
        return torch.where(torch.isinf(tensor), tensor, tensor.clamp(limits.min, limits.max))


def float8_notes(precision: Precision, nets: Sequence[OnnxModule], device: torch.device, is_whole: bool) -> list[str]:
    """Which products of a rank's networks are in FP8 and which are not, one sentence each.

    Args:
        precision: of the run.
        nets: of this rank.
        device: of this rank.
        is_whole: they are the entire network, so that nothing in FP8 would be a mistake.

    Raises:
        ParametersError: the device has no such products, or the networks have none that could be.
    """
    if not precision.float8:
        return []
    obstacle = why_not(device)
    if obstacle is not None:
        raise ParametersError(f"mixed_precision.float8 is true, but {obstacle} Remove it, or use another device.")
    found = [with_float8_products(net.program, net.tensors_by_name()) for net in nets]
    weights = [name for one in found for name in one.weights]
    others = {name: reason for one in found for name, reason in one.others.items()}
    listed = shortened((f"{name!r}: {reason}" for name, reason in others.items()), LISTED, "; ")
    if not weights and is_whole:
        raise ParametersError(
            "mixed_precision.float8 is true, but no matmul with a weight can be computed in FP8"
            + (f" ({listed})" if others else ": the network has none")
            + ". Leave it out."
        )
    note = f"mixed_precision.float8: matmuls with {len(weights)} weights are in FP8"
    notes = [note + (f"; with {len(others)} they are not ({listed})." if others else ", which are all.")]
    if device.type == "cpu":
        notes.append(
            "mixed_precision.float8: on a CPU it computes the same numbers as on a GPU, and is slower than fp32."
        )
    return notes
