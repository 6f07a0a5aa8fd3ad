"""How a feature of the data becomes an input of the model: as it is, or by operations of `onward pack --transform`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onward.proposal.data_facts import WORDS, Feature
from onward.proposal.model_facts import Port, Size

CHANNELS = (1, 3, 4)
_LARGEST_OPEN_IMAGE = 224


@dataclass(frozen=True)
class Fit:
    """How a feature becomes an input.

    Attributes:
        cost: 0: as it is; the more is to be done the higher.
        operations: of `--transform`, in order.
        cast: dtype to cast to; "" for none.
        reasons: one clause for each thing that is done.
    """

    cost: float
    operations: tuple[str, ...] = ()
    cast: str = ""
    reasons: tuple[str, ...] = ()


def fits(found: Sequence[int], wanted: Sequence[Size]) -> bool:
    """Whether a shape has the rank and the fixed sizes that are wanted."""
    return len(found) == len(wanted) and all(
        isinstance(want, str) or size == want for size, want in zip(found, wanted, strict=True)
    )


def fit(feature: Feature, port: Port, is_scaled_inside: bool = False) -> Fit | None:
    """What makes a feature an input of the model; None: nothing does.

    Args:
        feature: of the data.
        port: the input.
        is_scaled_inside: the model itself scales this input.
    """
    if feature.dtype == WORDS or port.dtype == "string":
        return None
    shaped = _fit_shape(feature.shape, port.sample)
    if shaped is None:
        return None
    operations, reasons, cost = list(shaped.operations), list(shaped.reasons), shaped.cost
    cast = ""
    if port.is_float:
        if feature.dtype == "uint8" and not is_scaled_inside:
            operations.append(f"scale:{1 / 255:.9g}")
            reasons.append("pixels from 0 to 255 are scaled to 0 to 1")
    elif feature.dtype.startswith(("float", "bfloat")):
        if port.dtype == "bool" or not feature.holds_whole_numbers():
            return None
        cast, cost = port.dtype, cost + 1
        reasons.append(f"integers stored as {feature.dtype} are cast to {port.dtype}")
    elif (port.dtype == "bool") != (feature.dtype == "bool"):
        cast = port.dtype
    if port.is_float and feature.dtype in ("int64", "int32") and len(feature.shape) == 1:
        cost += 0.5
    return Fit(cost, tuple(operations), cast, tuple(reasons))


def _fit_shape(found: tuple[int, ...], wanted: tuple[Size, ...] | None) -> Fit | None:
    if wanted is None or fits(found, wanted):
        return Fit(0.0)
    if _same_elements(found, wanted):
        sizes = _fill_in(found, wanted)
        if sizes is not None:
            reason = f"the shape {list(found)} of a sample is reshaped to {list(sizes)}"
            return Fit(0.25, (f"reshape:{'x'.join(map(str, sizes))}",), "", (reason,))
    image = _fit_image(found, wanted)
    if image is not None:
        return image
    fixed = [size for size in wanted if isinstance(size, int)]
    if len(fixed) == len(wanted) and math.prod(fixed) == math.prod(found) and found and wanted:
        reason = f"the shape {list(found)} of a sample is reshaped to {list(fixed)}"
        return Fit(2.0, (f"reshape:{'x'.join(map(str, fixed))}",), "", (reason,))
    return None


def _same_elements(found: tuple[int, ...], wanted: tuple[Size, ...]) -> bool:
    """Whether two shapes differ only in sizes of 1."""
    return fits([size for size in found if size != 1], [size for size in wanted if size != 1])


def _fill_in(found: tuple[int, ...], wanted: tuple[Size, ...]) -> tuple[int, ...] | None:
    """The wanted shape with its open sizes filled in from the found one."""
    sizes = iter([size for size in found if size != 1])
    filled = tuple(1 if want == 1 else next(sizes) for want in wanted)
    return filled if fits(filled, wanted) else None


def channels_last(shape: Sequence[Size]) -> bool | None:
    """Whether a sample of three axes is an image with its channels last; None: it is no image."""
    if len(shape) != 3:
        return None
    first, last = shape[0] in CHANNELS, shape[2] in CHANNELS
    if first and not last:
        return False
    if last and not first:
        return True
    return False if first and last else None


def image_size(wanted: Sequence[Size], found: tuple[int, int]) -> tuple[int, int]:
    """Height and width for an input whose sizes are fixed or open; open ones come from the data, within bounds."""
    last = channels_last(wanted)
    pair = tuple(wanted[:2] if last else wanted[1:])
    sizes = []
    for want, size in zip(pair, found, strict=True):
        open_size = min(_LARGEST_OPEN_IMAGE, max(32, size // 32 * 32))
        sizes.append(want if isinstance(want, int) else open_size)
    return sizes[0], sizes[1]


def _fit_image(found: tuple[int, ...], wanted: tuple[Size, ...]) -> Fit | None:
    """Gray images without an axis of channels, the other order of axes, other sizes, one channel for three."""
    wants_last = channels_last(wanted)
    shape = found if len(found) == 3 else (1, *found) if len(found) == 2 else None
    has_last = None if shape is None else channels_last(shape)
    if wants_last is None or has_last is None or shape is None:
        return None
    operations, reasons, cost = [], [], 0.5
    if len(found) == 2:
        operations.append(f"reshape:1x{found[0]}x{found[1]}")
        reasons.append("a channel axis of size 1 is added")
    elif has_last:
        operations.append("transpose:2,0,1")
        reasons.append(f"images of shape {list(found)} are channels-last")
    channels, height, width = (shape[2], *shape[:2]) if has_last else shape
    count = wanted[2] if wants_last else wanted[0]
    if channels != count:
        if channels != 1 or not isinstance(count, int):
            return None
        operations.append(f"repeat:{count}")
        reasons.append(f"the one channel is repeated {count} times")
        cost += 0.5
    fixed = wanted[:2] if wants_last else wanted[1:]
    target = tuple(w if isinstance(w, int) else have for w, have in zip(fixed, (height, width), strict=True))
    if target != (height, width):
        operations.append(f"resize:{target[0]}x{target[1]}")
        reasons.append(f"images of {height} x {width} are resized to the model's {target[0]} x {target[1]}")
        cost += 1
    if wants_last:
        operations.append("transpose:1,2,0")
        reasons.append("the model expects channels-last (NHWC)")
    if operations == ["transpose:2,0,1", "transpose:1,2,0"]:
        operations, reasons = [], []
    return Fit(cost, tuple(operations), "", tuple(reasons))
