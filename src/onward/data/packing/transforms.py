"""Operations on single features while they are packed: `--transform NAME=OPERATION:ARGUMENT`, in the order given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onward.data.packing.source import Sample, require
from onward.errors import DataError, ParametersError

Transform = Callable[[Sample], Sample]
IGNORED_LABEL = -100
"""The label of what has none, as torch and Hugging Face have it."""


def make_transforms(asked: Sequence[tuple[str, str]]) -> Transform:
    """All transforms of a command line as one function of a sample.

    Raises:
        ParametersError: an operation that there is not, or an argument that it does not take.
    """
    steps = [(name, *_parse(name, text)) for name, text in asked]

    def apply(sample: Sample) -> Sample:
        for name, text, step in steps:
            if name not in sample:
                raise ParametersError(f"--transform names {name!r}; the samples hold {', '.join(map(repr, sample))}.")
            try:
                added = step(sample[name])
            except ValueError as error:
                shape = list(sample[name].shape)
                raise DataError(f"--transform {name}={text}: impossible for shape {shape}: {error}.") from error
            sample.update(added if isinstance(added, Mapping) else {name: np.asarray(added)})
        return sample

    return apply if steps else lambda sample: sample


Step = Callable[[np.ndarray], np.ndarray | Mapping[str, np.ndarray]]


def _parse(name: str, text: str) -> tuple[str, Step]:
    operation, _, argument = text.partition(":")
    make = OPERATIONS.get(operation)
    if make is None:
        raise ParametersError(
            f"--transform {name}={text}: there is no operation {operation!r}; expected one of {', '.join(OPERATIONS)}."
        )
    try:
        return text, make(argument)
    except ValueError as error:
        raise ParametersError(f"--transform {name}={text}: {EXPECTED[operation]} expected after the colon.") from error


def _sizes(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(separator)) if text else ()


def _transpose(argument: str) -> Step:
    axes = _sizes(argument, ",")
    if sorted(axes) != list(range(len(axes))):
        raise ValueError(argument)
    return lambda array: np.ascontiguousarray(array.transpose(axes))


def _reshape(argument: str) -> Step:
    sizes = _sizes(argument, "x")
    return lambda array: array.reshape(sizes)


def _resize(argument: str) -> Step:
    height, width = _sizes(argument, "x")
    pil = require("PIL.Image", "resizing images")

    def resize(array: np.ndarray) -> np.ndarray:
        if array.ndim < 2:
            raise ValueError("it has no height and width")
        planes = array.reshape(-1, *array.shape[-2:])
        is_integer = array.dtype.kind in "iub"
        # Interpolated labels would be other labels.
        is_image = array.dtype == np.uint8 or not is_integer
        method = pil.Resampling.BILINEAR if is_image else pil.Resampling.NEAREST
        resized = [
            np.asarray(pil.fromarray(plane.astype(np.float32), mode="F").resize((width, height), method))
            for plane in planes
        ]
        stacked = np.stack(resized).reshape(*array.shape[:-2], height, width)
        return (np.round(stacked) if is_integer else stacked).astype(array.dtype)

    return resize


def _repeat(argument: str) -> Step:
    count = int(argument)
    return lambda array: np.repeat(array, count, axis=0)


def _scale(argument: str) -> Step:
    factor = np.float32(float(argument))
    return lambda array: array.astype(np.float32) * factor if array.dtype != np.float64 else array * float(factor)


def _shift(argument: str) -> Step:
    number = float(argument)

    def shift(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind in "iu" and number == int(number):
            return array.astype(np.int64) + int(number)
        return array.astype(array.dtype if array.dtype.kind == "f" else np.float32) + np.float32(number)

    return shift


def _normalize(argument: str) -> Step:
    """(x - mean) / std for each channel of axis 0: means, then deviations."""
    means, _, deviations = argument.partition("/")
    mean, std = (np.array([float(one) for one in text.split(",")], np.float32) for text in (means, deviations))
    if len(mean) != len(std) or (std <= 0).any():
        raise ValueError(argument)
    return lambda array: (array - _by_channel(mean, array)) / _by_channel(std, array)


def _by_channel(numbers: np.ndarray, array: np.ndarray) -> np.ndarray:
    return numbers.reshape(-1, *[1] * (array.ndim - 1))


def _next_token(argument: str) -> Step:
    _require_name(argument)

    def add(array: np.ndarray) -> Mapping[str, np.ndarray]:
        labels = np.concatenate([array[1:], np.full((1, *array.shape[1:]), IGNORED_LABEL)]).astype(np.int64)
        return {argument: labels}

    return add


def _filled(number: int) -> Callable[[str], Step]:
    def make(argument: str) -> Step:
        _require_name(argument)
        return lambda array: {argument: np.full(array.shape, number, np.int64)}

    return make


def _positions(argument: str) -> Step:
    _require_name(argument)
    return lambda array: {argument: np.arange(len(array), dtype=np.int64)}


def _one_hot(argument: str) -> Step:
    classes = int(argument)

    def encode(array: np.ndarray) -> np.ndarray:
        if array.size and (array.min() < 0 or array.max() >= classes):
            raise ValueError(f"class {array.max()} is not among 0 to {classes - 1}")
        return np.eye(classes, dtype=np.float32)[array.astype(np.int64)]

    return encode


def _require_name(argument: str) -> None:
    if not argument:
        raise ValueError(argument)


OPERATIONS: Mapping[str, Callable[[str], Step]] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "resize": _resize,
    "repeat": _repeat,
    "scale": _scale,
    "shift": _shift,
    "normalize": _normalize,
    "one-hot": _one_hot,
    "next-token": _next_token,
    "ones": _filled(1),
    "zeros": _filled(0),
    "positions": _positions,
}
"""Name of an operation -> what makes it from its argument."""

EXPECTED: Mapping[str, str] = {
    "transpose": "the order of the axes (transpose:2,0,1)",
    "reshape": "the sizes of the new shape (reshape:1x28x28)",
    "resize": "height and width (resize:224x224)",
    "repeat": "how often axis 0 is repeated (repeat:3)",
    "scale": "a factor (scale:0.5)",
    "shift": "a number to add (shift:-1)",
    "normalize": "means and deviations (normalize:0.5,0.5,0.5/0.25,0.25,0.25)",
    "one-hot": "the number of classes (one-hot:10)",
    "next-token": "the name of the feature to add (next-token:labels)",
    "ones": "the name of the feature to add (ones:attention_mask)",
    "zeros": "the name of the feature to add (zeros:token_type_ids)",
    "positions": "the name of the feature to add (positions:position_ids)",
}
"""Name of an operation -> what its argument is."""
