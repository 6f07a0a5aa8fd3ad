"""A folder of images against an input: size, channels, order of axes, normalization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.errors import DataError
from onward.proposal.data_facts import DataFacts, Feature
from onward.proposal.match_images import IMAGENET, match_images
from onward.proposal.model_facts import ModelFacts
from onward.proposal.proposal import Answers
from tests.proposal.facts import feature, model, port

SCORES = port("scores", 2)


def match(net: ModelFacts, size: tuple[int, int] = (100, 70)) -> Any:
    image = Feature(name="image", dtype="uint8", shape=(3, *size), values=np.zeros((1, 3, *size), np.uint8))
    label = feature("label", [0, 1])
    data = DataFacts(path=Path("pics"), kind="images", features=(image, label), sample_count=2, classes=("a", "b"))
    return match_images(net, data, Answers(), Path("shards"))


def net(*shape: int | str, is_trained: bool = True, **given: Any) -> ModelFacts:
    return model((port("pixels", *shape),), (SCORES,), is_trained, **given)


@pytest.mark.parametrize(
    ("shape", "size", "mode", "transform"),
    [
        ((3, 32, 48), (32, 48), "rgb", ()),
        ((3, "h", "w"), (96, 64), "rgb", ()),
        ((32, 48, 3), (32, 48), "rgb", ("transpose:1,2,0",)),
        ((1, 28, 28), (28, 28), "grayscale", ()),
        ((28, 28), (28, 28), "grayscale", ("reshape:28x28",)),
        ((784,), (28, 28), "grayscale", ("reshape:784",)),
        ((3072,), (32, 32), "rgb", ("reshape:3072",)),
    ],
)
def test_inputs_of_images(
    shape: tuple[int | str, ...], size: tuple[int, int], mode: str, transform: tuple[str, ...]
) -> None:
    found = match(net(*shape))
    options = found.packing.options
    assert (options.source.image_size, options.source.image_mode) == (size, mode)
    assert tuple(one for _, one in options.transform) == transform
    assert found.name_map == {"image": "pixels"}
    assert found.task.kind == "classification"


def test_normalization() -> None:
    trained = match(net(3, 8, 8))
    source = trained.packing.options.source
    assert (source.mean, source.std) == IMAGENET
    assert trained.questions[0].key == "normalization"
    new = match(net(3, 8, 8, is_trained=False))
    assert (new.packing.options.source.mean, new.questions) == ((0.5,), ())
    inside = match(net(3, 8, 8, scaled_inputs=frozenset({"pixels"})))
    assert inside.packing.options.transform[0] == ("image", "scale:255")
    assert inside.packing.options.source.mean == (0.0,)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (net(5), "expected one input of images ([batch, channels, height, width]). Pass data for these inputs as an"),
        (net(4, 8, 8), "input 'pixels' float32 [batch, 4, 8, 8] has 4 channels; images are packed with 1 or 3."),
        (model((port("a", 3, 8, 8), port("b", 3)), (SCORES,)), "is a folder of images, and 'net.onnx' reads 'a'"),
    ],
)
def test_inputs_of_something_else(refused: ModelFacts, words: str) -> None:
    with pytest.raises(DataError) as caught:
        match(refused)
    assert words in str(caught.value)
