"""Dropout of values that are cut: every rank draws numbers of its own, and all ranks' generators stay in step.

The numbers of a rank follow from the state of the device's default generator and the rank. So there is no second state
to save: a checkpoint, or the repetition of a segment, restores them with the default generator, which must have the
same seed on all tensor-parallel ranks, for dropout of full values to agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onward.lowering.registry import lowers
from onward.plan.horizontal.cuts import DOMAIN

_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it are spread evenly over 64 bits (Knuth, volume 3, section 6.4)."""

_OFFSETS_OF_A_CALL = 2**28
"""More numbers than one thread of a kernel draws, a multiple of 4 as Philox needs; 2^35 calls fit in 63 bits."""


@contextlib.contextmanager
def numbers_of_rank(device: torch.device, rank: int) -> Iterator[None]:
    """What draws inside of it draws the rank's own numbers; the default generator continues alike on all ranks."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(_mixed(seed, rank))
        generator.set_offset(offset)
        try:
            yield
        finally:
            generator.manual_seed(seed)
            generator.set_offset(offset + _OFFSETS_OF_A_CALL)  # however much was drawn: ranks' parts may differ in size
        return
    generator = torch.default_generator
    with _disable_current_modes():  # a forecast on tensors without memory has no numbers to draw
        drawn = int(torch.randint(2**62, (), generator=generator))
    state = generator.get_state()
    generator.manual_seed(_mixed(drawn, rank))
    try:
        yield
    finally:
        generator.set_state(state)


def _mixed(seed: int, rank: int) -> int:
    return (seed ^ ((rank + 1) * _MULTIPLIER)) % 2**63


@torch.library.custom_op("onward::horizontal_dropout", mutates_args=())
def drop_part(x: Tensor, ratio: float, rank: int) -> tuple[Tensor, Tensor]:
    """The part with elements dropped and the others scaled, and which were kept (bool)."""
    with numbers_of_rank(x.device, rank):
        result, mask = torch.native_dropout(x, ratio, True)
    return result, mask


@drop_part.register_fake
def _(x: Tensor, ratio: float, rank: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.scale = 1 / (1 - inputs[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    (mask,) = ctx.saved_tensors
    return gradient * mask * ctx.scale, None, None


drop_part.register_autograd(_backward, setup_context=_keep)


@lowers("Dropout", domain=DOMAIN, host=("ratio_input", "training_mode"))
def dropout(
    data: Tensor,
    ratio_input: float | None = None,
    training_mode: bool | None = None,
    *,
    seed: int | None = None,
    ratio: float = 0.5,
    is_test: int = 0,
    consumed_inputs: tuple[int, ...] | None = None,
    cut_axis: int,
    blocks: tuple[int, ...],
    rank: int,
    size: int,
    training: bool,
    owned: tuple[bool, ...],
    output_count: int,
) -> tuple[Tensor, ...]:
    """ONNX's `Dropout` of any version, on a rank's shard; which mode decides is as in `onward.lowering.ops.random`."""
    decided = training_mode is not None and not owned[2]
    active = bool(training_mode) if decided else training
    share = ratio if ratio_input is None else float(ratio_input)
    if not 0 <= share < 1:
        raise ValueError(f"ratio is {share}; expected a number from 0 up to, but not including, 1.")
    if not active or share == 0:
        return (data,) if output_count == 1 else (data, torch.ones_like(data, dtype=torch.bool))
    result, mask = drop_part(data, share, rank)
    return (result,) if output_count == 1 else (result, mask)
