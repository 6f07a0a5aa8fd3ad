"""A folder of images, one folder for each class, against a model with an input of images."""

from __future__ import annotations

import math
from pathlib import Path

from onward.data.packing.options import ImageOptions, PackOptions
from onward.errors import DataError
from onward.proposal.data_facts import DataFacts
from onward.proposal.fitting import channels_last, image_size
from onward.proposal.label import Label
from onward.proposal.matching import Match, free_label_name, needed_inputs
from onward.proposal.model_facts import ModelFacts, Port, Size
from onward.proposal.proposal import Answers, Packing, Question
from onward.proposal.task import find_task

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of the channels that most published image models were trained with."""


def match_images(model: ModelFacts, data: DataFacts, answers: Answers, folder: Path) -> Match:
    """How images go with a model: size, channels, order of axes, normalization.

    Raises:
        DataError: the model has no input of images, or the classes do not fit its output.
    """
    ports = needed_inputs(model, answers.prediction)
    images = [port for port in ports if _image_shape(port) is not None]
    if len(images) != 1 or len(ports) != 1:
        listed = "; ".join(str(port) for port in ports)
        raise DataError(
            f"{str(data.path)!r} is a folder of images, and {str(model.path)!r} reads {listed}: expected one input "
            "of images ([batch, channels, height, width]). Pass data for these inputs as an .npz file with an array "
            "for each."
        )
    port = images[0]
    wanted = _image_shape(port)
    assert wanted is not None
    assert port.sample is not None
    found = data.features[0].shape
    last = channels_last(wanted)
    channels = wanted[2] if last else wanted[0]
    count = channels if isinstance(channels, int) else found[0]
    if count not in (1, 3):
        raise DataError(f"input {port} has {count} channels; images are packed with 1 or 3. Pass an .npz file.")
    height, width = image_size(wanted, (found[1], found[2]))
    mean, std, why, questions = _normalization(model, port, count)
    operations, reasons = _operations(port, last, count, height, width)
    if port.name in model.scaled_inputs:
        operations.insert(0, ("image", "scale:255"))
        reasons.append("the model scales its input itself: pixel values stay in 0 to 255")
    reasons = [f"images are resized to {count} x {height} x {width}, the shape of input {port}", why, *reasons]
    options = PackOptions(
        source=ImageOptions(
            image_size=(height, width), image_mode="rgb" if count == 3 else "grayscale", mean=mean, std=std
        ),
        transform=tuple(operations),
        cast=(("image", port.dtype),) if port.dtype != "float32" else (),
    )
    label = data.features[1]
    task = find_task(model, Label(label, data.classes), answers.prediction, answers.loss)
    name = free_label_name(model, label.name)
    names = {one: other for one, other in (("image", port.name), ("label", name)) if one != other}
    packing = Packing(source=data.path, folder=folder, options=options, reasons=tuple(reasons))
    return Match(task=task, label=name, name_map=names, packing=packing, questions=questions)


def _image_shape(port: Port) -> tuple[Size, ...] | None:
    """The sample of an input as an image of three axes; None: it cannot be one."""
    sample = port.sample
    if sample is None or port.dtype == "string":
        return None
    if len(sample) == 3:
        known = channels_last(sample)
        return sample if known is not None or isinstance(sample[0], str) else None
    if len(sample) == 2 and all(isinstance(size, int) for size in sample):
        return (1, *sample)
    if len(sample) == 1 and isinstance(sample[0], int):
        for channels in (1, 3):
            side = math.isqrt(sample[0] // channels)
            if side > 4 and channels * side * side == sample[0]:
                return (channels, side, side)
    return None


def _operations(
    port: Port, last: bool | None, count: int, height: int, width: int
) -> tuple[list[tuple[str, str]], list[str]]:
    assert port.sample is not None
    if last:
        return [("image", "transpose:1,2,0")], ["the model expects channels-last (NHWC)"]
    if len(port.sample) == 1:
        return [("image", f"reshape:{count * height * width}")], ["the model reads images as vectors"]
    if len(port.sample) == 2:
        return [("image", f"reshape:{height}x{width}")], ["the model has no channel axis"]
    return [], []


def _normalization(
    model: ModelFacts, port: Port, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...], str, tuple[Question, ...]]:
    plain = ((0.0,), (1.0,))
    if port.name in model.scaled_inputs:
        return *plain, "the model normalizes its input itself", ()
    if not model.origin.is_trained:
        if channels == 3:
            return (0.5,), (0.5,), "pixel values are scaled to -1 to 1: the weights are new, so any scaling will do", ()
        return *plain, "pixel values are scaled to 0 to 1: the weights are new, so any scaling will do", ()
    text = (
        "How was the model's input normalized when it was trained? The file does not say; check --mean and --std of "
        "the onward pack command."
    )
    if channels == 3:
        why = "pixel values are normalized by ImageNet's mean and standard deviation, as for most trained image models"
        return *IMAGENET, why, (Question("normalization", text, "ImageNet's mean and standard deviation"),)
    return *plain, "pixel values are scaled to 0 to 1", (Question("normalization", text, "pixel values from 0 to 1"),)
