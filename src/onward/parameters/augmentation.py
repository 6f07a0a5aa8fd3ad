"""The section `augmentation` of RUN.yaml: how images are varied during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.parameters.field_types import (
    STRICT,
    CountFromZero,
    FiniteNumber,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How images are varied during training: every epoch other variations, drawn from the seed of the run.

    Attributes:
        feature: the input of the model that holds images, [channels, height, width] or [height, width, channels];
            absent: nothing is varied.
        channels: where the channels are; absent: on the axis of 1, 3 or 4.
        horizontal_flip, vertical_flip: the share of images that is mirrored.
        crop_padding: pixels of black put around an image, of which a random part of its size is kept.
        smallest_crop: a random part of at least this share of the area is enlarged to the full image.
        brightness, contrast, saturation: the largest change of each: 0.2 multiplies by 0.8 to 1.2.
        mixup_alpha: images and labels are mixed with those of another sample of the batch, by a share from
            Beta(alpha, alpha); labels must be floats. 0: not at all.
        mean, std: by which the images are normalized, one number or one a channel: brightness, contrast and black are
            those of the image before.
    """

    __pydantic_config__ = STRICT
    feature: str | None = None
    channels: Literal["first", "last"] | None = None
    horizontal_flip: Share = 0.0
    vertical_flip: Share = 0.0
    crop_padding: CountFromZero = 0
    smallest_crop: PositiveShare = 1.0
    brightness: NonNegative = 0.0
    contrast: NonNegative = 0.0
    saturation: NonNegative = 0.0
    mixup_alpha: NonNegative = 0.0
    mean: tuple[FiniteNumber, ...] = (0.0,)
    std: tuple[Positive, ...] = (1.0,)
