"""Recordings in class folders: formats, depths, channels, rates and lengths, against the waves they were made from."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import scipy.signal
import soundfile

from onward.data import DataLoader
from onward.data.manifest import read_manifest
from onward.data.packing import AudioOptions, PackOptions, pack
from onward.data.packing.audio import read_audio, resample
from onward.errors import DataError, ParametersError
from onward.parameters import Limits

RATE = 8000


def tone(hertz: float, count: int = 800, rate: int = RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(count) / rate)).astype(np.float32)


def write(folder: Path, name: str, sound: np.ndarray, rate: int = RATE, **given: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(str(path), sound, rate, **given)
    return path


def pack_audio(source: Path, dest: Path, limits: Limits | None = None, **options: int | str | bool) -> tuple:
    given = {} if limits is None else {"limits": limits}
    pack(source, dest, PackOptions(source=AudioOptions(**options), progress=False, **given))
    (batch,) = DataLoader({}, dest).one_pass(1000)
    return batch.features["audio"], batch.features["label"]


@pytest.mark.parametrize(
    ("name", "subtype", "bound"),
    [
        ("a.wav", "PCM_U8", 1 / 128),
        ("a.wav", "PCM_16", 1 / 32768),
        ("a.wav", "PCM_24", 2**-23),
        ("a.wav", "PCM_32", 1e-7),
        ("a.wav", "FLOAT", 0),
        ("a.flac", "PCM_16", 1 / 32768),
        ("a.aiff", "PCM_16", 1 / 32768),
        ("a.ogg", "VORBIS", 0.1),
        ("a.mp3", "MPEG_LAYER_III", 0.1),
    ],
)
def test_formats_and_depths(name: str, subtype: str, bound: float, tmp_path: Path) -> None:
    sound = tone(440, 8000)
    write(tmp_path / "in", f"c/{name}", sound, subtype=subtype)
    audio, _ = pack_audio(tmp_path / "in", tmp_path / "out")
    assert audio.dtype == np.float32
    inner = slice(1000, 7000)  # lossy formats also change where a sound begins and ends
    assert np.abs(audio[0, : len(sound)] - sound)[inner].max() <= bound


def test_files_of_the_standard_library(tmp_path: Path) -> None:
    """Two channels of 16 bits, written by Python's own module: their mean."""
    samples = np.random.default_rng(0).integers(-32768, 32767, (100, 2), dtype=np.int16)
    (tmp_path / "in" / "c").mkdir(parents=True)
    with wave.open(str(tmp_path / "in" / "c" / "x.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    audio, _ = pack_audio(tmp_path / "in", tmp_path / "out")
    np.testing.assert_allclose(audio[0], samples.mean(1) / 32768, rtol=0, atol=1e-7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of tones, of two rates and several lengths."""
    for k in range(3):
        write(tmp_path / "in", f"high/{k}.wav", tone(1000, 600 + 100 * k), subtype="FLOAT")
    for k in range(2):
        write(tmp_path / "in", f"low/deeper/{k}.wav", tone(200, 700, 2 * RATE), 2 * RATE, subtype="FLOAT")
    return tmp_path / "in"


def test_the_most_frequent_rate_and_the_longest_file_set_the_shape(folder: Path, tmp_path: Path) -> None:
    audio, labels = pack_audio(folder, tmp_path / "out", shuffle_audio=False)
    assert audio.shape == (5, 800)
    assert labels.tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_array_equal(audio[0, :600], tone(1000, 600))
    assert not audio[0, 600:].any()
    assert read_manifest(tmp_path / "out").details == {
        "classes": ["high", "low"],
        "recordings_per_class": {"high": 3, "low": 2},
        "sample_rate": RATE,
        "audio_length": 800,
    }


def test_rate_and_length_on_request(folder: Path, tmp_path: Path) -> None:
    audio, _ = pack_audio(folder, tmp_path / "out", sample_rate=2 * RATE, audio_length=500, shuffle_audio=False)
    assert audio.shape == (5, 500)
    np.testing.assert_array_equal(audio[3], tone(200, 500, 2 * RATE))


@pytest.mark.parametrize("count", [1, 2, 99, 100, 801])
@pytest.mark.parametrize(("rate", "target"), [(8000, 16000), (16000, 8000), (44100, 16000), (16000, 22050), (8, 7)])
def test_resampling_equals_scipys(count: int, rate: int, target: int) -> None:
    sound = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    expected = scipy.signal.resample(sound.astype(np.float64), max(1, round(count * target / rate)))
    np.testing.assert_allclose(resample(sound, rate, target), expected, rtol=0, atol=1e-6)


def test_what_would_be_cut_off_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in", "c/long.wav", tone(100, 50_000), subtype="FLOAT")
    taken = []
    read = soundfile.SoundFile.read
    monkeypatch.setattr(
        soundfile.SoundFile, "read", lambda self, frames, **given: taken.append(frames) or read(self, frames, **given)
    )
    pack_audio(tmp_path / "in", tmp_path / "out", sample_rate=RATE // 2, audio_length=100)
    assert taken == [200]


def test_broken_recordings_are_named_or_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "low" / "broken.wav").write_bytes(b"RIFF but no more")
    write(folder, "low/empty.wav", np.zeros(0, np.float32))
    write(folder, "low/nan.wav", np.full(9, np.nan, np.float32), subtype="FLOAT")
    with pytest.raises(
        DataError,
        match=r"^recording '.*\.wav' cannot be decoded: .*\w\. Replace it, or leave such recordings out with onw",
    ):
        pack_audio(folder, tmp_path / "out")
    audio, _ = pack_audio(folder, tmp_path / "out", unreadable="skip")
    assert len(audio) == 5
    skipped = read_manifest(tmp_path / "out").details["recordings_skipped"]
    assert sorted(Path(name).name for name in skipped) == ["broken.wav", "empty.wav", "nan.wav"]


def test_nothing_that_can_be_decoded(tmp_path: Path) -> None:
    (tmp_path / "in" / "c").mkdir(parents=True)
    (tmp_path / "in" / "c" / "x.wav").write_bytes(b"no sound")
    with pytest.raises(DataError, match=r"none of the 1 recordings of '.*in' can be decoded; replace them\."):
        pack_audio(tmp_path / "in", tmp_path / "out")


def test_recordings_longer_than_the_limits_allow(folder: Path, tmp_path: Path) -> None:
    words = r"would be packed with 800 samples, 0\.0 GB; at most 1e-06 are allowed\. Pass a smaller --audio-length"
    with pytest.raises(DataError, match=words):
        pack_audio(folder, tmp_path / "out", Limits(array_gb=1e-6))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ParametersError, match="sample_rate is -1; expected at least 1, or leave it out"):
        AudioOptions(sample_rate=-1)


def test_a_recording_that_is_cut_off_is_unreadable(folder: Path, tmp_path: Path) -> None:
    for name in ("cut.wav", "cut.aiff", "cut.flac"):
        whole = write(folder, f"low/{name}", np.random.default_rng(0).standard_normal(3096) * 0.1, subtype="PCM_16")
        whole.write_bytes(whole.read_bytes()[:2000])
    piped = write(folder, "low/piped.wav", tone(200, 100), subtype="PCM_16")
    content = piped.read_bytes()
    at = content.index(b"data") + 4
    piped.write_bytes(content[:at] + b"\xff" * 4 + content[at + 4 :])
    for name, words in (
        ("wav", r"it is cut off: its header says 6192 bytes of samples, and it has 1956$"),
        ("aiff", r"it is cut off: its header says 6200 bytes of samples, and it has 1954$"),
    ):
        with pytest.raises(ValueError, match=words):
            read_audio(folder / "low" / f"cut.{name}", RATE, 800)
    pack_audio(folder, tmp_path / "out", unreadable="skip")
    skipped = read_manifest(tmp_path / "out").details["recordings_skipped"]
    assert sorted(Path(name).name for name in skipped) == ["cut.aiff", "cut.flac", "cut.wav"]


def test_a_class_that_loses_all_its_recordings_is_refused(folder: Path, tmp_path: Path) -> None:
    write(folder, "mid/nan.wav", np.full(9, np.nan, np.float32), subtype="FLOAT")
    words = r"none of the recordings of class 'mid' can be decoded, the last one '.*nan\.wav': .*--exclude 'mid' to onw"
    with pytest.raises(DataError, match=words):
        pack_audio(folder, tmp_path / "out", unreadable="skip")
    assert not (tmp_path / "out").exists()


def test_odd_recordings_are_counted(folder: Path, tmp_path: Path) -> None:
    sound = tone(200, 100)
    write(folder, "low/opposite.wav", np.stack([sound, -sound], 1), subtype="FLOAT")
    write(folder, "low/loud.wav", 2e4 * sound, subtype="FLOAT")
    pack_audio(folder, tmp_path / "out")
    details = read_manifest(tmp_path / "out").details
    assert details["recordings_all_zeros"] == {"count": 1, "first": "low/opposite.wav"}
    assert details["recordings_beyond_full_scale"] == {"count": 1, "first": "low/loud.wav"}
