"""Resize and Upsample: every axis is resized by itself, as a product with a matrix of interpolation weights.

Where torch's own interpolation means the same, it is used. Legend: an axis of `size` elements becomes one of
`target` elements; `scale` is the ratio that the coordinates are computed with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onward.lowering.kernels.dtypes import wide_type
from onward.lowering.kernels.embeddings import select
from onward.lowering.kernels.layout import has_channels_last
from onward.lowering.registry import lowers

_HALF_PIXEL = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
_COORDINATES = (*_HALF_PIXEL, "align_corners", "asymmetric", "tf_crop_and_resize", "tf_half_pixel_for_nn")
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "simple")
_POLICIES = ("stretch", "not_larger", "not_smaller")
_INTERPOLATION = {
    ("linear", 3): "linear",
    ("linear", 4): "bilinear",
    ("linear", 5): "trilinear",
    ("cubic", 4): "bicubic",
}
"""(ONNX's mode, rank) -> torch's mode."""

_LEAST_ELEMENTS = 2**13
"""Of a result, from which on products with a matrix for each axis are shorter than torch's kernels (forward and
backward, one thread): bicubic ones take 0.09 to 0.5 of the time, bilinear and trilinear ones 0.2 to 0.6."""

_MOST_CUBIC, _MOST_LINEAR = 512, 128
"""Elements of an axis up to which they are: a product reads all of them, torch four or two."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis to resize; `exact` if `scale` is `target / size` but for its rounding, `region` is its part of `roi`."""

    axis: int
    size: int
    target: int
    scale: float
    exact: bool
    region: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ResizeRules:
    """The attributes of Resize that say how values are found."""

    mode: str
    coordinates: str
    nearest: str
    cubic_coeff_a: float
    exclude_outside: bool
    antialias: bool
    extrapolation_value: float


@lowers("Resize", since=11, host=("roi", "scales", "sizes"))
def resize(
    X: Tensor,
    roi: tuple[float, ...] | None = None,
    scales: tuple[float, ...] | None = None,
    sizes: tuple[int, ...] | None = None,
    *,
    antialias: int = 0,
    axes: tuple[int, ...] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Resize.html; `roi`, `scales` and `sizes` per axis of `axes`, default all.

    `antialias`, `axes` and `keep_aspect_ratio_policy` exist from version 18 on, "half_pixel_symmetric" from 19 on,
    "tf_half_pixel_for_nn" in versions 11 and 12 only. Where a scale implies a fractional length, align_corners
    computes with it, as the standard's own cases do (onnxruntime takes the integer length). With scales the length of
    a result is `size * scale` whatever the region, as in the standard's shape inference (the text multiplies by it).
    """
    _check_choice("coordinate_transformation_mode", coordinate_transformation_mode, _COORDINATES)
    _check_choice("mode", mode, ("nearest", "linear", "cubic"))
    _check_choice("nearest_mode", nearest_mode, _NEAREST)
    _check_choice("keep_aspect_ratio_policy", keep_aspect_ratio_policy, _POLICIES)
    rules = ResizeRules(
        mode=mode,
        coordinates=coordinate_transformation_mode,
        nearest=nearest_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=bool(exclude_outside),
        antialias=bool(antialias),
        extrapolation_value=extrapolation_value,
    )
    chosen = [axis % X.dim() for axis in axes] if axes else list(range(X.dim()))
    region = roi if coordinate_transformation_mode == "tf_crop_and_resize" else None
    plan = _plan_axes(X.shape, chosen, region, scales, sizes, keep_aspect_ratio_policy)
    return _resize(X, plan, rules)


@lowers("Upsample", since=9, host=("scales",))
@lowers("Resize", since=10, host=("scales",))
def resize_10(X: Tensor, scales: tuple[float, ...], *, mode: str = "nearest") -> Tensor:
    """https://onnx.ai/onnx/operators/text_diff_Resize_10_11.html: coordinates are `x / scale`.

    "nearest" takes the element below when it enlarges and the one above when it shrinks, as onnxruntime does.
    "bilinear" is an old name of "linear".
    """
    mode = "linear" if mode == "bilinear" else mode
    return resize(X, scales=scales, coordinate_transformation_mode="asymmetric", nearest_mode="simple", mode=mode)


@lowers("Upsample", since=7)
def upsample_7(X: Tensor, *, mode: str = "nearest", scales: tuple[float, ...]) -> Tensor:
    """https://onnx.ai/onnx/operators/text_diff_Upsample_7_9.html: the scales are an attribute."""
    return resize_10(X, scales, mode=mode)


@lowers("Upsample", since=1)
def upsample_1(X: Tensor, *, height_scale: float, mode: str = "nearest", width_scale: float) -> Tensor:
    """https://onnx.ai/onnx/operators/text_diff_Upsample_1_7.html; X (N, C, H, W)."""
    return resize_10(X, (1.0, 1.0, height_scale, width_scale), mode=mode)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices)}.")


def _plan_axes(
    shape: Sequence[int],
    axes: Sequence[int],
    roi: Sequence[float] | None,
    scales: Sequence[float] | None,
    sizes: Sequence[int] | None,
    policy: str,
) -> list[Axis]:
    """Sizes and ratios of the axes that change; those resized by nothing are left out."""
    given = sizes if sizes else scales
    if not given:
        raise ValueError("neither 'scales' nor 'sizes' is given; exactly one of them is needed.")
    if len(given) != len(axes):
        raise ValueError(f"{'sizes' if sizes else 'scales'} has {len(given)} entries for {len(axes)} axes.")
    regions = [(0.0, 1.0)] * len(axes)
    if roi:
        regions = list(zip(roi[: len(axes)], roi[len(axes) :], strict=True))
    ratio = None
    if sizes and policy != "stretch":
        choose = min if policy == "not_larger" else max
        ratio = choose(target / shape[axis] for axis, target in zip(axes, sizes, strict=True))
    plan = []
    for index, axis in enumerate(axes):
        size, region = shape[axis], regions[index]
        if ratio is not None:
            scale, target = ratio, math.floor(ratio * size + 0.5)
        elif sizes:
            scale, target = sizes[index] / size, sizes[index]
        else:
            assert scales is not None
            scale = scales[index]
            if scale <= 0:
                raise ValueError(f"scales is {list(scales)}; every entry must be positive.")
            # A scale is a float32: allow for its rounding, so that 3 * float32(5 / 3) is 5.
            target = math.floor(size * scale * (1 + 2**-24))
        exact = abs(size * scale - target) <= target * 2**-23
        if target != size or scale != 1 or region != (0.0, 1.0):
            plan.append(
                Axis(
                    axis=axis,
                    size=size,
                    target=target,
                    scale=scale,
                    exact=exact or (bool(sizes) and ratio is None),
                    region=region,
                )
            )
    return plan


def _resize(X: Tensor, plan: Sequence[Axis], rules: ResizeRules) -> Tensor:
    if not plan:
        return X
    if rules.mode == "nearest":
        return _resize_nearest(X, plan, rules)
    direct = _torch_mode(X, plan, rules)
    if direct is not None and not _pays_as_products(X, plan, rules):
        targets = _spatial_targets(X, plan)
        return F.interpolate(X, size=targets, mode=direct, align_corners=rules.coordinates == "align_corners")
    # Integers are interpolated exactly enough in float64, and rounded to the nearest.
    Y = X if X.is_floating_point() else X.to(torch.float64)
    for axis in plan:
        Y = _resize_axis(Y, axis, rules)
    if X.is_floating_point():
        return Y
    limits = torch.iinfo(X.dtype)
    return Y.round().clamp(limits.min, limits.max).to(X.dtype)


def _torch_mode(X: Tensor, plan: Sequence[Axis], rules: ResizeRules) -> str | None:
    """The mode of F.interpolate that computes the same, or None."""
    mode = _INTERPOLATION.get((rules.mode, X.dim()))
    if mode is None or not X.is_floating_point() or rules.antialias or rules.exclude_outside:
        return None
    if rules.mode == "cubic" and rules.cubic_coeff_a != -0.75:
        return None
    if any(axis.axis < 2 or not axis.exact or axis.target < 1 for axis in plan):
        return None
    alike = rules.coordinates in ("half_pixel", "half_pixel_symmetric", "align_corners") or (
        rules.coordinates == "pytorch_half_pixel" and all(axis.target > 1 for axis in plan)
    )
    return mode if alike else None


def _spatial_targets(X: Tensor, plan: Sequence[Axis]) -> list[int]:
    targets = list(X.shape[2:])
    for axis in plan:
        targets[axis.axis - 2] = axis.target
    return targets


def _pays_as_products(X: Tensor, plan: Sequence[Axis], rules: ResizeRules) -> bool:
    """Whether torch's own kernel takes longer on a CPU: there it computes element by element, but for linear
    interpolation with the channels last or along one axis.
    """
    is_compiled = torch.compiler.is_compiling()
    if not X.is_cpu or X.dim() < 4 or (not is_compiled and get_proxy_mode() is not None):
        return False
    if math.prod(_spatial_targets(X, plan)) * X.shape[0] * X.shape[1] < _LEAST_ELEMENTS:
        return False
    is_linear = rules.mode == "linear"
    if is_linear and (is_compiled or has_channels_last(X)):
        return False
    return max(axis.size for axis in plan) <= (_MOST_LINEAR if is_linear else _MOST_CUBIC)


def _resize_nearest(X: Tensor, plan: Sequence[Axis], rules: ResizeRules) -> Tensor:
    if 3 <= X.dim() <= 5 and X.is_floating_point() and all(_repeats(axis, rules) for axis in plan):
        return F.interpolate(X, size=_spatial_targets(X, plan), mode="nearest")
    # torch indexes no uint16, uint32 or uint64; the same bits as signed integers do as well.
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(X.dtype)
    Y = X if signed is None else X.view(signed)
    for axis in plan:
        places = _source_places(axis, rules, X.device)
        below, above = (places - 0.5).ceil(), (places + 0.5).floor()
        nearest = {
            "round_prefer_floor": below,
            "round_prefer_ceil": above,
            "floor": places.floor(),
            "ceil": places.ceil(),
            "simple": places.ceil() if axis.scale < 1 else places.floor(),
        }[rules.nearest]
        Y = select(Y, axis.axis, nearest.to(torch.int64).clamp(0, axis.size - 1))
        Y = _extrapolate(Y, axis, rules, places)
    return Y if signed is None else Y.view(X.dtype)


def _repeats(axis: Axis, rules: ResizeRules) -> bool:
    """Whether each element is repeated a power of two times: there torch's rounding of coordinates is exact."""
    if axis.axis < 2 or not axis.exact or axis.target % axis.size:
        return False
    factor = axis.target // axis.size
    if factor & (factor - 1):
        return False
    if rules.coordinates in _HALF_PIXEL:
        return rules.nearest.startswith("round") and axis.target > 1
    return rules.coordinates == "asymmetric" and rules.nearest in ("floor", "simple")


def _source_places(axis: Axis, rules: ResizeRules, device: torch.device) -> Tensor:
    """Where each element of the result is in the input, in elements: float64 (target)."""
    y = torch.arange(axis.target, dtype=torch.float64, device=device)
    # The length that the ratio implies: fractional, where the result's own is rounded.
    length = axis.target if axis.exact else axis.scale * axis.size
    one = length == 1 or axis.target == 1
    last = axis.size - 1
    mode = rules.coordinates
    if mode == "align_corners":
        return torch.zeros_like(y) if one else y * last / (length - 1)
    if mode == "tf_crop_and_resize":
        start, end = axis.region
        if one:
            return torch.full_like(y, (start + end) * last / 2)
        return y * ((end - start) * last) / (length - 1) + start * last
    if mode == "pytorch_half_pixel" and one:
        return torch.zeros_like(y)
    shift = 0.0 if mode == "asymmetric" else 0.5
    if axis.exact:
        places = (y + shift) * axis.size / axis.target
    else:
        # In float32, as the scale itself is: its rounding then does not move a coordinate across an integer.
        places = ((y + shift).to(torch.float32) / axis.scale).to(torch.float64)
    if mode in _HALF_PIXEL:
        places = places - 0.5
    if mode == "half_pixel_symmetric":
        places = places + axis.size / 2 * (1 - axis.target / length)
    return places


def _resize_axis(X: Tensor, axis: Axis, rules: ResizeRules) -> Tensor:
    """Linear or cubic interpolation along one axis: a product with a matrix (target, size)."""
    places = _source_places(axis, rules, X.device)
    stretch = min(axis.scale, 1.0) if rules.antialias else 1.0
    radius, kernel = _kernel(rules)
    first = math.floor(-radius / stretch) + 1
    offsets = torch.arange(first, 2 - first, dtype=torch.float64, device=X.device)
    neighbors = places.floor()[:, None] + offsets
    weights = kernel((neighbors - places[:, None]) * stretch)
    if rules.exclude_outside:
        weights = torch.where((neighbors >= 0) & (neighbors < axis.size), weights, 0)
    if rules.exclude_outside or rules.antialias:
        total = weights.sum(1, keepdim=True)
        weights = weights / torch.where(total == 0, 1, total)
    columns = neighbors.to(torch.int64).clamp(0, axis.size - 1)
    matrix = torch.zeros((axis.target, axis.size), dtype=torch.float64, device=X.device)
    matrix = matrix.scatter_add(1, columns, weights)
    wide = wide_type(X.dtype)
    Y = torch.matmul(X.movedim(axis.axis, -1).to(wide), matrix.T.to(wide))
    return _extrapolate(Y.movedim(-1, axis.axis).to(X.dtype), axis, rules, places)


def _kernel(rules: ResizeRules) -> tuple[int, Callable[[Tensor], Tensor]]:
    """How far the interpolation reaches at most, and its weight at a signed distance."""
    if rules.mode == "linear":
        return 1, _linear_weight
    return 2, partial(_cubic_weight, a=rules.cubic_coeff_a)


def _linear_weight(distance: Tensor) -> Tensor:
    return (1 - distance.abs()).clamp(min=0)


def _cubic_weight(distance: Tensor, a: float) -> Tensor:
    """Keys 1981, https://doi.org/10.1109/TASSP.1981.1163711, equation 4."""
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0))


def _extrapolate(Y: Tensor, axis: Axis, rules: ResizeRules, places: Tensor) -> Tensor:
    """tf_crop_and_resize: what is outside of the input is a constant."""
    if rules.coordinates != "tf_crop_and_resize":
        return Y
    outside = (places < 0) | (places > axis.size - 1)
    return torch.where(outside.reshape(-1, *[1] * (Y.dim() - 1 - axis.axis)), rules.extrapolation_value, Y)
