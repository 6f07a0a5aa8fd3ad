"""A folder of recordings against an input: length, rate, an axis of channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.errors import DataError
from onward.proposal.data_facts import DataFacts, Feature
from onward.proposal.match_audio import match_audio
from onward.proposal.model_facts import ModelFacts
from onward.proposal.proposal import Answers
from tests.proposal.facts import feature, model, port


def match(net: ModelFacts, answers: Answers | None = None, median: int = 0) -> Any:
    audio = Feature(name="audio", dtype="float32", shape=(9000,), values=np.zeros((1, 9000), np.float32))
    data = DataFacts(
        path=Path("clips"),
        kind="audio",
        features=(audio, feature("label", [0, 1])),
        sample_count=2,
        classes=("no", "yes"),
        sample_rate=16000,
        median_length=median,
    )
    return match_audio(net, data, answers or Answers(), Path("shards"))


def net(*shape: int | str, is_trained: bool = False) -> ModelFacts:
    return model((port("wave", *shape),), (port("scores", 2),), is_trained)


@pytest.mark.parametrize(
    ("shape", "length", "transform"),
    [
        ((16000,), 16000, ()),
        (("samples",), 9000, ()),
        ((1, 16000), 16000, (("audio", "reshape:1x16000"),)),
        ((1, "samples"), 9000, (("audio", "reshape:1x9000"),)),
        ((16000, 1), 16000, (("audio", "reshape:16000x1"),)),
    ],
)
def test_inputs_of_waveforms(shape: tuple[int | str, ...], length: int, transform: tuple[str, ...]) -> None:
    found = match(net(*shape))
    options = found.packing.options
    assert (options.source.audio_length, options.source.sample_rate, options.transform) == (length, 16000, transform)
    assert found.name_map == {"audio": "wave"}
    assert found.task.kind == "classification"
    assert f"cut or padded to {length:,} samples ({length / 16000:.3g} s at 16,000 Hz)" in found.packing.reasons[0]


def test_a_trained_model_has_a_rate_that_nobody_says() -> None:
    assert not match(net(16000)).questions
    (question,) = match(net(16000, is_trained=True)).questions
    assert question.key == "sample_rate"
    assert "set it with --sample-rate" in question.text


def test_an_input_of_spectrograms_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"is a folder of recordings, and .* reads 'wave' float32 \[batch, 40, 98\].*npz"
    ):
        match(net(40, 98))


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (16000, "at least 44% of every sample is silence. At 28,444 Hz it would fill the input"),
        (4500, "of the longest recording 50% is cut off. At 8,000 Hz it would fill the input"),
    ],
)
def test_recordings_much_shorter_or_longer_than_the_input(length: int, words: str) -> None:
    (note,) = match(net(length)).notes
    assert words in note
    assert not match(net(9000)).notes
    assert not match(net("samples")).notes


def test_a_rate_that_is_given_resamples_and_asks_nothing() -> None:
    found = match(net("samples", is_trained=True), Answers(sample_rate=8000))
    assert (found.packing.options.source.sample_rate, found.packing.options.source.audio_length) == (8000, 4500)
    assert "cut or padded to 4,500 samples (0.562 s at 8,000 Hz)" in found.packing.reasons[0]
    assert not found.questions


def test_one_recording_far_longer_than_the_others() -> None:
    (note,) = match(net("samples"), median=1000).notes
    assert note == (
        "the longest recording has 9,000 samples (0.562 s), the median 1,000: all 2 are padded to the longest, 0.1 MB. "
        "Remove the long ones, or cut them: onward pack clips shards --test-fraction 0.2 --overwrite --sample-rate "
        "16000 --audio-length 2000, then onward init MODEL shards."
    )
    assert not match(net("samples"), median=2250).notes
