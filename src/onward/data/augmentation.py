"""Images varied during training: each by its own random numbers, from the seed, the epoch and the sample's own number.

No state is kept, so that a resumed run varies the same images in the same way, whoever reads them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import numpy as np

from onward.data.batches import Batch
from onward.data.prefetch import WORTH_A_THREAD_BYTES, Prefetch
from onward.errors import DataError, ParametersError
from onward.parameters.augmentation import Augmentation

_CHANNELS = (1, 3, 4)
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)
_WORD = 2.0**64


def augmented(
    batches: Iterator[Batch], asked: Augmentation, labels: Sequence[str], seed: int, threads: int = 1
) -> Iterator[Batch]:
    """The same batches with their images varied, those of large ones beside training, on threads of their own.

    Args:
        batches: for training.
        asked: what to vary; without a feature, the batches are given as they are.
        labels: features that are mixed as images are, where images are mixed.
        seed: of the run.
        threads: how many images of a large batch are varied at once.

    Raises:
        DataError: the feature is not there or holds no images.
        ParametersError: labels that cannot be mixed, or as many means as there are no channels.
    """
    if asked.feature is None:
        yield from batches
        return
    with ExitStack() as stack:
        stack.callback(getattr(batches, "close", int))
        first = next(batches, None)
        if first is None:
            return
        varied = vary(first, asked, labels, seed)
        is_large = varied.features[asked.feature].nbytes >= WORTH_A_THREAD_BYTES
        yield varied
        del first, varied
        if not is_large:
            yield from (vary(batch, asked, labels, seed) for batch in batches)
            return
        each = stack.enter_context(ThreadPoolExecutor(threads, "onward-images")).map if threads > 1 else map
        prefetch = Prefetch(batches, lambda batch: vary(batch, asked, labels, seed, each), capacity=2)
        try:
            yield from prefetch
        finally:
            prefetch.close()


class Each(Protocol):
    """`map`, or that of a pool of threads."""

    def __call__(self, function: Callable[[int], None], rows: range, /) -> Iterator[None]:
        """Calls the function for every row."""


def vary(batch: Batch, asked: Augmentation, labels: Sequence[str], seed: int, each: Each = map) -> Batch:
    """A batch with its images varied, by `each` of them. Raises as `augmented`."""
    name = str(asked.feature)
    if name not in batch.features:
        held = ", ".join(map(repr, batch.features))
        raise DataError(f"augmentation.feature is {name!r}; the data hold {held}. Name one of them.")
    given = batch.features[name]
    images, found = _channels_first(given, asked, name), np.empty_like(given, order="C")
    mean, std = (_by_channel(asked, field, images.shape[1]) for field in ("mean", "std"))
    draws = [_Draws(seed, batch.epoch, *key) for key in _keys(batch)]
    # One image after the other, which stays in the processor's cache.
    into = _channels_first(found, asked, name)

    def varied(row: int) -> np.ndarray:
        return _vary_image(images[row].astype(np.float32) * std + mean, asked, draws[row])

    def store(row: int, pixels: np.ndarray) -> None:
        into[row] = _rounded((pixels - mean) / std, given.dtype)

    features = {**batch.features, name: found}
    if asked.mixup_alpha:
        pixels = np.empty(images.shape, np.float32)
        _run(each, lambda row: pixels.__setitem__(row, varied(row)), len(draws))
        others, shares = _partners(draws, asked.mixup_alpha)
        mixed = _mixed(pixels, others, shares)
        _run(each, lambda row: store(row, mixed[row]), len(draws))
        features |= {label: _mixed_labels(features, label, others, shares) for label in labels}
    else:
        _run(each, lambda row: store(row, varied(row)), len(draws))
    return replace(batch, features=features)


def _run(each: Each, function: Callable[[int], None], rows: int) -> None:
    """Calls a function for every row, and raises what one of the calls raised."""
    for _ in each(function, range(rows)):
        pass


def _rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers that a type can hold."""
    if dtype.kind not in "iu":
        return values
    limits = np.iinfo(dtype)
    found: np.ndarray = np.clip(np.rint(values), limits.min, limits.max)
    return found


# ------------------------------------------------------------------------------------------------------ random numbers


class _Draws:
    """The random numbers of one sample in one epoch, from 0 to 1 (excluded)."""

    def __init__(self, *key: int) -> None:
        # numpy keeps raw bit streams fixed over its versions, but not what Generator makes of them.
        self._bits = np.random.PCG64(np.random.SeedSequence(list(key)))

    def __call__(self) -> float:
        return int(self._bits.random_raw()) / _WORD

    def around_one(self, largest: float) -> float:
        return max(0.0, 1 + largest * (2 * self() - 1))

    def index(self, count: int) -> int:
        return min(count - 1, int(self() * count))

    def beta(self, alpha: float) -> float:
        """Of Beta(alpha, alpha), by Jöhnk's method, in logarithms for small alphas."""
        while True:
            first, second = (np.log(max(self(), 1 / _WORD)) / alpha for _ in range(2))
            total = np.logaddexp(first, second)
            if total <= 0:
                return float(np.exp(first - total))


def _keys(batch: Batch) -> list[tuple[int, int]]:
    """What tells each sample of a batch from all others of the data: its file and its number there."""
    if not batch.origin:
        return [(batch.cursor.sample, row) for row in range(batch.sample_count)]
    return [
        (zlib.crc32(str(getattr(path, "name", path)).encode()), int(number))
        for path, numbers in batch.origin
        for number in numbers
    ]


# -------------------------------------------------------------------------------------------------------------- images


def _is_last(given: np.ndarray, asked: Augmentation, name: str) -> bool:
    """Whether channels are on the last axis.

    Raises:
        DataError: the feature holds no images, or it is not clear where the channels are.
    """
    if given.ndim == 3:
        return False
    if given.ndim == 4 and asked.channels is not None:
        return asked.channels == "last"
    first, last = (given.ndim == 4 and given.shape[axis] in _CHANNELS for axis in (1, 3))
    if first == last:
        shape = list(given.shape[1:])
        what = "either axis may hold its channels: set augmentation.channels to first or last" if first else (
            "expected [channels, height, width] or [height, width, channels] with 1, 3 or 4 channels, or [height, "
            "width]. Name a feature of images, or set augmentation.channels"
        )  # fmt: skip
        raise DataError(f"augmentation.feature is {name!r}, whose samples are {shape}; {what}.")
    return last


def _channels_first(given: np.ndarray, asked: Augmentation, name: str) -> np.ndarray:
    if _is_last(given, asked, name):
        return np.moveaxis(given, -1, 1)
    return given[:, None] if given.ndim == 3 else given


def _by_channel(asked: Augmentation, field: str, channels: int) -> np.ndarray:
    values = getattr(asked, field)
    if len(values) not in (1, channels):
        raise ParametersError(
            f"augmentation.{field} has {len(values)} numbers, and the images have {channels} channels; give one "
            "number, or one a channel."
        )
    return np.asarray(values, np.float32).reshape(-1, 1, 1)


def _vary_image(image: np.ndarray, asked: Augmentation, draw: _Draws) -> np.ndarray:
    """One image, [channels, height, width], before normalization; every call draws as many numbers."""
    flips = [draw() < share for share in (asked.horizontal_flip, asked.vertical_flip)]
    image = image[:, :: -1 if flips[1] else 1, :: -1 if flips[0] else 1]
    places = [draw.index(2 * asked.crop_padding + 1) for _ in range(2)]
    if asked.crop_padding:
        image = _cropped(image, asked.crop_padding, places)
    area, ratio, *corner = (draw() for _ in range(4))
    if asked.smallest_crop < 1:
        image = _enlarged(image, asked.smallest_crop + area * (1 - asked.smallest_crop), ratio, corner)
    brightness, contrast, saturation = (
        draw.around_one(one) for one in (asked.brightness, asked.contrast, asked.saturation)
    )
    image = image * np.float32(brightness)
    if asked.contrast:
        image = _away_from(np.float32(_gray(image).mean()), image, contrast)
    if asked.saturation and len(image) >= 3:
        image = np.concatenate([_away_from(_gray(image), image[:3], saturation), image[3:]])
    return image


def _cropped(image: np.ndarray, padding: int, places: Sequence[int]) -> np.ndarray:
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    return padded[:, places[0] : places[0] + height, places[1] : places[1] + width]


def _enlarged(image: np.ndarray, area: float, ratio: float, corner: Sequence[float]) -> np.ndarray:
    """A part of an image with a share of its area and a ratio of 3/4 to 4/3 of its sides, in the size of the image."""
    height, width = image.shape[1:]
    stretch = np.exp((2 * ratio - 1) * np.log(4 / 3) / 2)
    part = [min(1.0, np.sqrt(area) * stretch), min(1.0, np.sqrt(area) / stretch)]
    for axis, (size, share, place) in enumerate(zip((height, width), part, corner, strict=True), start=1):
        at = (np.arange(size) + 0.5) * share + place * (1 - share) * size - 0.5
        lower = np.clip(np.floor(at).astype(np.int64), 0, size - 1)
        upper = np.clip(lower + 1, 0, size - 1)
        weight = np.clip(at - lower, 0, 1).astype(np.float32).reshape(-1, *[1] * (2 - axis))
        image = image.take(lower, axis) * (1 - weight) + image.take(upper, axis) * weight
    return image


def _gray(image: np.ndarray) -> np.ndarray:
    """How bright each pixel is, [1, height, width]."""
    return np.tensordot(_LUMINANCE, image[:3], 1)[None] if len(image) >= 3 else image[:1]


def _away_from(base: np.ndarray | np.float32, image: np.ndarray, factor: float) -> np.ndarray:
    found: np.ndarray = base + (image - base) * np.float32(factor)
    return found


# --------------------------------------------------------------------------------------------------------------- mixup


def _partners(draws: Sequence[_Draws], alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """For each sample another one of the batch, in the order of random numbers, and its own share."""
    order = np.argsort([draw() for draw in draws], kind="stable")
    others = np.empty(len(draws), np.int64)
    others[order] = np.roll(order, 1)
    shares = np.array([draw.beta(alpha) for draw in draws], np.float32)
    return others, shares


def _mixed(values: np.ndarray, others: np.ndarray, shares: np.ndarray) -> np.ndarray:
    own = shares.reshape(-1, *[1] * (values.ndim - 1))
    mixed: np.ndarray = values * own + values[others] * (1 - own)
    return mixed


def _mixed_labels(features: dict[str, np.ndarray], label: str, others: np.ndarray, shares: np.ndarray) -> np.ndarray:
    values = features.get(label)
    if values is None or values.dtype.kind != "f":
        held = "missing" if values is None else str(values.dtype)
        raise ParametersError(
            f"augmentation.mixup_alpha mixes labels, and the label {label!r} is {held}; expected floats. Pack class "
            f"numbers with --transform {label}=one-hot:CLASSES and set loss.dense_labels: true."
        )
    return _mixed(values, others, shares).astype(values.dtype)
