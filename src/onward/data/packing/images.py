"""A folder of images per class -> image tensors and labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.options import ImageOptions
from onward.data.packing.source import Advance, ChooseSplit, Read, Sample, Source, require
from onward.data.packing.splits import one_after_the_other
from onward.errors import DataError


def open_images(
    folder: Path,
    paths: list[Path],
    options: ImageOptions,
    seed: int,
    test_folder: Path | None = None,
    test_paths: Sequence[Path] = (),
) -> Source:
    """Opens a folder whose folders are classes, numbered in the order of their names; and another for testing alone.

    Raises:
        DataError: an image is in no class folder, or the test folder has a class that the other one lacks.
        UserError: pillow is not installed.
    """
    require("PIL.Image", "packing images")
    names = _class_names(folder, paths)
    classes = sorted(set(names))
    details: dict[str, Any] = {"classes": classes, "images_per_class": {name: names.count(name) for name in classes}}
    read: Read = partial(_read, _labelled(paths, names, classes, options, seed), options, details)
    if test_folder is not None:
        test_names = _class_names(test_folder, test_paths)
        _check_classes(test_folder, test_names, folder, classes)
        test_images = _labelled(test_paths, test_names, classes, options, seed)
        read = one_after_the_other(read, partial(_read, test_images, options, details))
    return Source(unit="images", total=len(paths) + len(test_paths), read=read, details=details)


def _class_names(folder: Path, paths: Sequence[Path]) -> list[str]:
    """The class of each image."""
    if folder.is_file():
        raise DataError(f"{str(folder)!r} is one file; images are packed from a folder with one folder per class.")
    names = []
    for path in paths:
        parts = path.relative_to(folder).parts
        if len(parts) < 2:
            raise DataError(
                f"image {str(path)!r} is in no class folder; expected {str(folder / 'CLASS' / path.name)!r}: the "
                "class is the name of the folder inside the source."
            )
        names.append(parts[0])
    return names


def _labelled(
    paths: Sequence[Path], names: Sequence[str], classes: Sequence[str], options: ImageOptions, seed: int
) -> list[tuple[Path, int]]:
    """Images with the numbers of their classes, in the order in which they are packed."""
    order = np.arange(len(paths))
    if options.shuffle_images:
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 3]))).permutation(len(paths))
    return [(paths[k], classes.index(names[k])) for k in order.tolist()]


def _check_classes(test_folder: Path, found: Sequence[str], folder: Path, classes: Sequence[str]) -> None:
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise DataError(
            f"test folder {str(test_folder)!r} has {len(unknown)} class folders that {str(folder)!r} lacks, the first "
            f"{unknown[0]!r}; the classes are {', '.join(map(repr, classes))}. Add training images of these classes, "
            "or remove them from the test folder."
        )


def _read(
    images: list[tuple[Path, int]],
    options: ImageOptions,
    details: dict[str, Any],
    choose_split: ChooseSplit,
    advance: Advance,
) -> Iterator[tuple[str, Sample]]:
    skipped: list[str] = []
    number = 0
    for path, label in images:
        advance(1)
        image = read_image(path, options)
        if image is None:
            skipped.append(str(path))
            details["images_per_class"][details["classes"][label]] -= 1
            continue
        yield choose_split(number), {"image": image, "label": np.array(label, np.int64)}
        number += 1
    if skipped:
        details["images_skipped"] = [*details.get("images_skipped", ()), *skipped]


OF_16_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
"""Modes of pillow whose `convert` takes every value above 255 for white."""


def _in_8_bits(image: Any, file_format: str | None, is_rgb: bool) -> Any:
    """The image with values of 0 to 255; of 16 bits, which X-rays and depth maps have, with fractions of them.

    Raises:
        ValueError: its numbers have no range that a file says.
    """
    if image.mode in OF_16_BITS or (image.mode == "I" and file_format == "PNG"):
        values = np.asarray(image).astype(np.float32) * np.float32(255 / 65535)
        return require("PIL.Image", "packing images").fromarray(values)
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ValueError(f"its pixels are {kind}, whose range the file does not say; save it in 8 or 16 bits")
    return image.convert("RGB" if is_rgb else "L")


def read_image(path: Path, options: ImageOptions) -> np.ndarray | None:
    """Decodes, turns as the camera says, resizes and normalizes one image.

    Returns:
        float32 [channels, height, width]; None: it cannot be decoded and is to be skipped.

    Raises:
        DataError: it cannot be decoded.
    """
    pil = require("PIL.Image", "packing images")
    operations = require("PIL.ImageOps", "packing images")
    height, width = options.image_size
    try:
        with pil.open(path) as opened:
            image = _in_8_bits(operations.exif_transpose(opened), opened.format, options.image_mode == "rgb")
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
        if options.unreadable == "skip":
            return None
        raise DataError(
            f"image {str(path)!r} cannot be decoded: {error}. Replace it, or leave such images out with "
            "--unreadable skip."
        ) from error
    if options.resize == "crop":
        image = operations.fit(image, (width, height), method=pil.Resampling.BILINEAR)
    else:
        image = image.resize((width, height), resample=pil.Resampling.BILINEAR)
    pixels = np.asarray(image, np.float32) / np.float32(255)
    planes = pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]
    if options.image_mode == "rgb" and len(planes) == 1:
        planes = planes.repeat(3, axis=0)
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (options.mean, options.std))
    return np.ascontiguousarray((planes - mean) / std)
