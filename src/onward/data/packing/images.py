"""A folder of images per class -> image tensors and labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.class_folders import ClassFiles, open_class_folders
from onward.data.packing.options import ImageOptions
from onward.data.packing.source import Source, require


def open_images(
    folder: Path,
    paths: list[Path],
    options: ImageOptions,
    seed: int,
    test_folder: Path | None = None,
    test_paths: Sequence[Path] = (),
) -> Source:
    """Opens a folder whose folders are classes, and maybe another for testing.

    Raises:
        DataError: as of `open_class_folders`.
        UserError: pillow is not installed.
    """
    require("PIL.Image", "packing images")
    images = ClassFiles(
        feature="image",
        word="image",
        decode=partial(read_image, options=options),
        skips_unreadable=options.unreadable == "skip",
        shuffle_seed=seed if options.shuffle_images else None,
    )
    return open_class_folders(images, folder, paths, test_folder, test_paths)


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


def read_image(path: Path, options: ImageOptions) -> np.ndarray:
    """Decodes, turns as the camera says, resizes and normalizes one image.

    Returns:
        float32 [channels, height, width].

    Raises:
        OSError, ValueError: it cannot be decoded.
    """
    pil = require("PIL.Image", "packing images")
    operations = require("PIL.ImageOps", "packing images")
    height, width = options.image_size
    try:
        with pil.open(path) as opened:
            image = _in_8_bits(operations.exif_transpose(opened), opened.format, options.image_mode == "rgb")
    except (SyntaxError, pil.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
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
