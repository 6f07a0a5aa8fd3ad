"""A folder of recordings per class -> waveforms of equal length and labels."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onward.data.packing.class_folders import ClassFiles, open_class_folders
from onward.data.packing.options import AudioOptions
from onward.data.packing.source import Source, require
from onward.errors import DataError
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.untrusted_files import open_regular

_CUT = re.compile(r"^\s*(?:data|SSND)\s*:\s*(?P<said>\d+) \(should be (?P<has>\d+)\)", re.MULTILINE)
"""In libsndfile's log: a chunk of samples that is longer than the file."""
_UNKNOWN_SIZE = 0x7FFFF000
"""Programs that write to a pipe, such as sox and ffmpeg, write this size or more into the header."""
_ESTIMATED = ("MP3", "OGG")
"""Formats whose number of samples is estimated, or holds some that a decoder leaves out."""
_FAR_BEYOND_FULL_SCALE = 2
"""Resampling and lossy formats exceed full scale by less."""


class Recording(NamedTuple):
    """What the header of an audio file says; `duration` in samples of `rate` Hz."""

    rate: int
    duration: int


def open_audio(
    folder: Path,
    paths: list[Path],
    options: AudioOptions,
    seed: int,
    test_folder: Path | None = None,
    test_paths: Sequence[Path] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Source:
    """Opens a folder whose folders are classes, and maybe another for testing.

    Without a rate or a length among the options, those of the training files apply: their most frequent rate, and
    the duration of the longest.

    Raises:
        DataError: as of `open_class_folders`; or no file can be decoded, or one is longer than the limits allow.
        UserError: soundfile is not installed.
    """
    rate, length = options.sample_rate, options.audio_length
    if not (rate and length):
        recordings = [one for path in paths if (one := read_header(path)) is not None]
        if not recordings:
            raise DataError(f"none of the {len(paths)} recordings of {str(folder)!r} can be decoded; replace them.")
        rate = rate or most_frequent_rate(recordings)
        length = length or max(resampled_length(one.duration, one.rate, rate) for one in recordings)
    if 4 * length > limits.array_gb * 1e9:
        raise DataError(
            f"each recording of {str(folder)!r} would be packed with {length:,} samples, {4e-9 * length:,.1f} GB; at "
            f"most {limits.array_gb:,.10g} are allowed. Pass a smaller --audio-length; if the data are as intended, "
            "pass --limits.array_gb."
        )
    audio = ClassFiles(
        feature="audio",
        word="recording",
        decode=partial(read_audio, rate=rate, length=length),
        skips_unreadable=options.unreadable == "skip",
        shuffle_seed=seed if options.shuffle_audio else None,
        remark=_remark,
    )
    source = open_class_folders(audio, folder, paths, test_folder, test_paths)
    source.details.update(sample_rate=rate, audio_length=length)
    return source


def most_frequent_rate(recordings: Sequence[Recording]) -> int:
    """The rate in Hz that most recordings have; of equally many the highest."""
    rates = [one.rate for one in recordings]
    return max(rates, key=lambda rate: (rates.count(rate), rate))


def resampled_length(duration: int, rate: int, target: int) -> int:
    """Samples at `target` Hz of what has `duration` samples at `rate` Hz."""
    return max(1, round(duration * target / rate))


def read_header(path: Path) -> Recording | None:
    """Rate and duration, without decoding; None: the file cannot be decoded."""
    soundfile = require("soundfile", "reading recordings")
    try:
        with open_regular(path) as stream, soundfile.SoundFile(stream) as file:
            return Recording(file.samplerate, file.frames) if file.frames > 0 else None
    except (OSError, RuntimeError):
        return None


def read_audio(path: Path, rate: int, length: int) -> np.ndarray:
    """Decodes one recording, averages its channels, resamples it, and cuts it or pads it with silence at its end.

    Returns:
        float32 [length], full scale being -1 to 1.

    Raises:
        OSError, ValueError: it cannot be decoded, or is empty.
    """
    soundfile = require("soundfile", "packing recordings")
    try:
        with open_regular(path) as stream, soundfile.SoundFile(stream) as file:
            found = file.samplerate
            # What would be cut off is not decoded: a small file can stand for hours.
            wanted = min(math.ceil(length * found / rate), file.frames)
            channels = file.read(wanted, dtype="float32", always_2d=True)
            log, is_exact = file.extra_info, file.format not in _ESTIMATED
    except soundfile.LibsndfileError as error:
        raise ValueError(error.error_string.rstrip(".")) from error
    if not channels.size:
        raise ValueError("it has no samples")
    if (cut := _CUT.search(log)) and int(cut["said"]) < _UNKNOWN_SIZE:
        raise ValueError(f"it is cut off: its header says {cut['said']} bytes of samples, and it has {cut['has']}")
    if is_exact and len(channels) < wanted:
        raise ValueError(f"it is cut off: of {wanted} samples {len(channels)} can be read")
    if not np.isfinite(channels).all():
        raise ValueError("it has samples that are not finite")
    wave = resample(channels.mean(axis=1), found, rate)[:length]
    return np.pad(wave, (0, length - len(wave)))


def _remark(wave: np.ndarray) -> str:
    """What suggests that a recording was not decoded as it was meant."""
    if not wave.any():
        return "all_zeros"
    if np.abs(wave).max() > _FAR_BEYOND_FULL_SCALE:
        return "beyond_full_scale"
    return ""


def resample(wave: np.ndarray, rate: int, target: int) -> np.ndarray:
    """A waveform [samples] at another rate, by cutting off or extending its spectrum (as `scipy.signal.resample` does).

    Source: Oppenheim and Schafer, Discrete-Time Signal Processing, section 4.6: without frequencies above half of the
    lower rate, the samples at the other rate follow exactly.
    """
    size = resampled_length(len(wave), rate, target)
    if size == len(wave):
        return wave
    spectrum = np.fft.rfft(wave.astype(np.float64))
    kept = np.zeros(size // 2 + 1, spectrum.dtype)
    shared = min(len(kept), len(spectrum))
    kept[:shared] = spectrum[:shared]
    if min(size, len(wave)) % 2 == 0:  # the highest shared frequency stands for itself and its mirror image
        kept[shared - 1] *= 2.0 if size < len(wave) else 0.5
    return (np.fft.irfft(kept, size) * (size / len(wave))).astype(np.float32)
