"""A folder of recordings, one folder for each class, against a model with an input of a waveform."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onward.data.packing.audio import resampled_length
from onward.data.packing.options import AudioOptions, PackOptions
from onward.errors import DataError
from onward.proposal.data_facts import DataFacts
from onward.proposal.label import Label
from onward.proposal.matching import Match, free_label_name, needed_inputs
from onward.proposal.model_facts import ModelFacts, Port, Size
from onward.proposal.pack_command import pack_command
from onward.proposal.proposal import Answers, Packing, Question
from onward.proposal.task import find_task

_FAR_ABOVE_MEDIAN = 4
"""From this ratio of the longest recording to the median one most of the data is silence."""


def match_audio(model: ModelFacts, data: DataFacts, answers: Answers, folder: Path) -> Match:
    """How recordings go with a model: length, rate, an axis of channels.

    Raises:
        DataError: the model has no input of a waveform, or the classes do not fit its output.
    """
    ports = needed_inputs(model, answers.prediction)
    waveforms = [(port, length) for port in ports if (length := _length(port)) is not None]
    if len(waveforms) != 1 or len(ports) != 1:
        listed = "; ".join(str(port) for port in ports)
        raise DataError(
            f"{str(data.path)!r} is a folder of recordings, and {str(model.path)!r} reads {listed}: expected one input "
            "of a waveform ([batch, samples] or [batch, 1, samples]). A model that reads a spectrogram or other "
            "features needs them computed as for its training: pass an .npz file with an array for each input."
        )
    port, wanted = waveforms[0]
    rate = data.sample_rate if answers.sample_rate is None else answers.sample_rate
    longest = resampled_length(data.features[0].shape[0], data.sample_rate, rate)
    length = wanted if isinstance(wanted, int) else longest
    shape = tuple(1 if size == 1 else length for size in port.sample or (length,))
    operations = () if len(shape) == 1 else (("audio", f"reshape:{'x'.join(map(str, shape))}"),)
    seconds = f"{length / rate:.3g} s at {rate:,} Hz"
    whose = f"the shape of input {port}" if isinstance(wanted, int) else "as long as the longest"
    reasons = [f"recordings are cut or padded to {length:,} samples ({seconds}), {whose}"]
    notes = _note_on_length(port, length, longest, rate) if abs(longest - length) > 0.1 * length else ()
    questions: tuple[Question, ...] = ()
    if model.origin.is_trained and answers.sample_rate is None:
        text = "Which sample rate was the model trained with? The file does not say; set it with --sample-rate."
        questions = (Question("sample_rate", text, f"{rate:,} Hz, as most recordings have"),)
    options = PackOptions(
        source=AudioOptions(sample_rate=rate, audio_length=length),
        transform=operations,
        cast=(("audio", port.dtype),) if port.dtype != "float32" else (),
    )
    median = resampled_length(data.median_length, data.sample_rate, rate)
    if not isinstance(wanted, int) and data.median_length and longest > _FAR_ABOVE_MEDIAN * median:
        shorter = replace(options, source=AudioOptions(sample_rate=rate, audio_length=2 * median), test_fraction=0.2)
        command = pack_command(data.path, folder, replace(shorter, overwrite=True))
        notes = (_note_on_padding(data, longest, median, rate, f"{command}, then onward init MODEL {folder}"),)
    label = data.features[1]
    task = find_task(model, Label(label, data.classes), answers.prediction, answers.loss)
    name = free_label_name(model, label.name)
    names = {one: other for one, other in (("audio", port.name), ("label", name)) if one != other}
    packing = Packing(source=data.path, folder=folder, options=options, reasons=tuple(reasons))
    return Match(task=task, label=name, name_map=names, packing=packing, questions=questions, notes=notes)


def _note_on_padding(data: DataFacts, longest: int, median: int, rate: int, commands: str) -> str:
    """How much is packed because one recording is far longer than most."""
    return (
        f"the longest recording has {longest:,} samples ({longest / rate:.3g} s), the median {median:,}: all "
        f"{data.sample_count:,} are padded to the longest, {4e-6 * longest * data.sample_count:,.1f} MB. Remove the "
        f"long ones, or cut them: {commands}."
    )


def _note_on_length(port: Port, length: int, longest: int, rate: int) -> tuple[str, ...]:
    """How recordings differ in length from what the model takes, which a wrong rate would explain."""
    what = (
        f"at least {1 - longest / length:.0%} of every sample is silence"
        if longest < length
        else f"of the longest recording {1 - length / longest:.0%} is cut off"
    )
    return (
        f"input {port.name!r} takes {length:,} samples, and the longest recording has {longest:,} at {rate:,} Hz: "
        f"{what}. At {round(rate * length / longest):,} Hz it would fill the input; if the model was made for another "
        "rate, set it with --sample-rate.",
    )


def _length(port: Port) -> Size | None:
    """The size of the only axis of a sample that is not 1; None: the input is no waveform."""
    if port.sample is None or not port.is_float:
        return None
    sizes = [size for size in port.sample if size != 1]
    return sizes[0] if len(sizes) == 1 else None
