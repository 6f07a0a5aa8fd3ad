"""Tiny models and data of every kind that `onward init` knows, made at test time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image
from torch import nn

from tests.graph.exported import export
from tests.proposal.recognizers import digit_strings, recognizer

SAMPLES = 240


@dataclass(frozen=True)
class Kind:
    """A model and data that go together.

    Attributes:
        model: writes `net.onnx` into a folder.
        data: writes data into a folder, and returns the name that `onward init` is given.
        expected: fields of the RUN.yaml that must come out.
        options: of the command line.
        rate: for thirty updates of so small a model.
        says: what must be in the file's comments.
    """

    model: Callable[[Path], None]
    data: Callable[[Path], str]
    expected: dict[str, Any]
    options: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


def save(net: nn.Module, example: Any, folder: Path, inputs: list[str], outputs: list[str], **axes: Any) -> None:
    """Writes a module with an open batch; `axes` are further open dimensions, None a fixed batch."""
    dynamic = {name: {0: "batch", **axes} for name in (*inputs, *outputs)}
    examples = example if isinstance(example, tuple) else (example,)
    export(net.eval(), examples, folder / "net.onnx", 17, False, input_names=inputs, output_names=outputs,
           dynamic_axes=dynamic)  # fmt: skip


def perceptron(inputs: int, outputs: int, *end: nn.Module) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, outputs), *end)
        save(net, torch.randn(2, inputs), folder, ["x"], ["out"])

    return write


def fixed_batch(folder: Path) -> None:
    """Of one sample, as most exported files are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3))
    export(net.eval(), (torch.randn(1, 5),), folder / "net.onnx", 17, False, input_names=["x"], output_names=["out"])


class Mixing(nn.Module):
    """Subtracts a mean over the batch: with one sample, over its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 24), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.second(self.first(x).relu())
        return scores - scores.mean((0, 1), keepdim=True)


def fixed_batch_that_mixes(folder: Path) -> None:
    """Of one sample, and right for no other number."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["out"]}
    export(Mixing().eval(), (torch.randn(1, 5),), folder / "net.onnx", 17, False, **names)


def classifier_of_images(*end: nn.Module) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 3), *end,
        )  # fmt: skip
        save(net, torch.randn(2, 3, 16, 16), folder, ["image"], ["scores"])

    return write


def classifier_of_recordings(folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 8, 9, stride=4),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    save(net, torch.randn(2, 1, 400), folder, ["waveform"], ["scores"])


class ChannelsLast(nn.Module):
    """As a Keras model has its images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x.permute(0, 3, 1, 2)).relu().mean((2, 3)))


def channels_last(folder: Path) -> None:
    torch.manual_seed(0)
    save(ChannelsLast(), torch.randn(2, 16, 16, 3), folder, ["input_1"], ["logits"])


def segmentation(folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    save(net, torch.randn(2, 1, 16, 16), folder, ["image"], ["logits"])


class Tokens(nn.Module):
    """A small transformer over token ids."""

    def __init__(self, causal: bool, vocabulary: int = 300, length: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, 32), nn.Embedding(length, 32)
        self.mix = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm, self.head, self.causal = nn.LayerNorm(32), nn.Linear(32, vocabulary), causal

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        length = ids.shape[1]
        x = self.embed(ids) + self.place.weight[:length]
        query, key, value, end = self.mix
        scores = query(x) @ key(x).transpose(1, 2) / 32**0.5
        if self.causal:
            scores = scores + torch.full((length, length), -1e9).triu(1)
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, :].float()) * -1e9
        return self.head(self.norm(x + end(scores.softmax(-1) @ value(x))))


def language_model(causal: bool, with_mask: bool = False) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        ids = torch.randint(0, 300, (2, 32))
        if with_mask:
            example = (ids, torch.ones(2, 32, dtype=torch.int64))
            save(Tokens(causal), example, folder, ["input_ids", "attention_mask"], ["logits"])
        else:
            save(Tokens(causal), ids, folder, ["input_ids"], ["logits"])

    return write


# --------------------------------------------------------------------------------------------------------------- data


def pictures(folder: Path) -> str:
    """Images of three colors, of another size than the model's."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(("blue", "green", "red")):
        (folder / "pictures" / name).mkdir(parents=True)
        for k in range(40):
            pixels = generator.integers(0, 90, (20, 24, 3))
            pixels[..., 2 - number] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "pictures" / name / f"{k}.png")
    return "pictures"


def pixels_as_bytes(folder: Path) -> str:
    """uint8 images with their channels last, as data sets are published."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, SAMPLES)
    images = generator.integers(0, 90, (SAMPLES, 16, 16, 3))
    for number in range(3):
        images[labels == number, :, :, number] += 120
    np.savez(folder / "pixels.npz", images=images.astype(np.uint8), labels=labels.astype(np.uint8))
    return "pixels.npz"


def masks(folder: Path) -> str:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (SAMPLES, 16, 16)).astype(np.uint8)
    np.savez(folder / "masks.npz", image=images, mask=(images // 86).astype(np.uint8))
    return "masks.npz"


def numbers(inputs: int, label: Callable[[np.ndarray], np.ndarray], name: str = "y") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        x = np.random.default_rng(0).standard_normal((SAMPLES, inputs)).astype(np.float32)
        np.savez(folder / "numbers.npz", x=x, **{name: label(x)})  # type: ignore[arg-type]  # numpy's stub: allow_pickle
        return "numbers.npz"

    return write


def table(folder: Path, form: str = "csv") -> str:
    """Rows sorted by their class, which is a word, with a number for each row, as people keep them."""
    generator = np.random.default_rng(0)
    kinds = np.arange(SAMPLES) // (SAMPLES // 3)
    values = generator.normal(kinds[:, None] * [1.0, -1.0, 0.5, 0.0], 0.4)
    names = ["length", "width", "height", "weight"]
    words = [("oak", "elm", "fir")[kind] for kind in kinds]
    if form == "parquet":
        import pyarrow
        from pyarrow import parquet

        columns = {"row": np.arange(SAMPLES), **dict(zip(names, values.T, strict=True)), "tree": words}
        parquet.write_table(pyarrow.table(columns), folder / "trees.parquet")
        return "trees.parquet"
    between = {"csv": ",", "semicolon": ";", "tsv": "\t"}[form]
    lines = [between.join(["row", *names, "tree"])]
    for number, (row, word) in enumerate(zip(values, words, strict=True)):
        lines.append(between.join([str(number), *(f"{value:.3f}" for value in row), word]))
    path = folder / ("trees.tsv" if form == "tsv" else "trees.csv")
    path.write_text("\n".join(lines) + "\n")
    return path.name


def recordings(folder: Path) -> str:
    """Tones with noise, of three heights."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(("high", "low", "middle")):
        (folder / "sounds" / name).mkdir(parents=True)
        for k in range(SAMPLES // 6):
            time = np.arange(350 + k % 100) / 8000
            sound = np.sin(2 * np.pi * (2000, 200, 700)[number] * time + k) + generator.normal(0, 0.1, len(time))
            soundfile.write(str(folder / "sounds" / name / f"{k}.wav"), 0.5 * sound, 8000)
    return "sounds"


def text(folder: Path) -> str:
    (folder / "fox.txt").write_text("The quick brown fox jumps over the lazy dog. " * 300)
    return "fox.txt"


def token_ids(folder: Path) -> str:
    ids = (np.arange(SAMPLES)[:, None] + np.arange(32)) % 290
    np.savez(folder / "ids.npz", ids=ids)
    return "ids.npz"


CROSS_ENTROPY, BINARY = "softmax_cross_entropy", "binary_cross_entropy"
SQUARES = "mean_squared_error"

KINDS: dict[str, Kind] = {
    "images in folders": Kind(
        classifier_of_images(), pictures,
        {"loss.type": CROSS_ENTROPY, "data.input_name_map": {}, "loss.label": "label"},
        says=("images are resized to 3 x 16 x 16", "pixel values are scaled to -1 to 1"),
    ),
    "images in folders, softmax inside": Kind(
        classifier_of_images(nn.Softmax(1)), pictures, {"loss.type": CROSS_ENTROPY},
        says=("it is the result of Softmax; the loss is computed from the value before it",),
    ),
    "images in folders, channels last": Kind(
        channels_last, pictures, {"loss.type": CROSS_ENTROPY, "data.input_name_map": {"image": "input_1"}},
        says=("the model expects channels-last",),
    ),
    "recordings in folders": Kind(
        classifier_of_recordings, recordings,
        {"loss.type": CROSS_ENTROPY, "data.input_name_map": {"audio": "waveform"}, "loss.label": "label"},
        says=("recordings are cut or padded to 400 samples (0.05 s at 8,000 Hz)",),
    ),
    "images as bytes": Kind(
        classifier_of_images(), pixels_as_bytes,
        {"loss.type": CROSS_ENTROPY, "data.input_name_map": {"images": "image"}, "loss.label": "labels"},
        says=("are channels-last", "pixels from 0 to 255 are scaled to 0 to 1"),
    ),
    "images as bytes, channels last": Kind(
        channels_last, pixels_as_bytes, {"loss.type": CROSS_ENTROPY, "data.input_name_map": {"images": "input_1"}},
    ),
    "segmentation": Kind(
        segmentation, masks, {"loss.type": CROSS_ENTROPY, "loss.class_axis": 1, "loss.label": "mask"},
        says=("classification of every pixel into 3 classes",),
    ),
    "table": Kind(
        perceptron(4, 3), table, {"loss.type": CROSS_ENTROPY, "loss.label": "tree"},
        says=("'row' numbers the rows and is left out", "the rows are sorted by label"),
    ),
    "table of semicolons": Kind(perceptron(4, 3), lambda f: table(f, "semicolon"), {"loss.type": CROSS_ENTROPY}),
    "table of tabulators": Kind(perceptron(4, 3), lambda f: table(f, "tsv"), {"loss.type": CROSS_ENTROPY}),
    "table in Parquet": Kind(perceptron(4, 3), lambda f: table(f, "parquet"), {"loss.type": CROSS_ENTROPY}),
    "table, a label of two words": Kind(
        perceptron(2, 1), lambda folder: two_words(folder), {"loss.type": BINARY, "loss.from_logits": True},
        says=("(bad: 0, good: 1)",),
    ),
    "regression [N, 1]": Kind(
        perceptron(5, 1), numbers(5, lambda x: x.sum(1, keepdims=True)), {"loss.type": SQUARES},
    ),
    "regression [N]": Kind(perceptron(5, 1), numbers(5, lambda x: x.sum(1)), {"loss.type": SQUARES}),
    "several numbers": Kind(perceptron(5, 3), numbers(5, lambda x: x[:, :3] * 2), {"loss.type": SQUARES}),
    "binary, sigmoid inside": Kind(
        perceptron(5, 1, nn.Sigmoid()), numbers(5, lambda x: (x.sum(1) > 0).astype(np.int64), "label"),
        {"loss.type": BINARY, "loss.from_logits": False}, says=("it ends in Sigmoid",),
    ),
    "binary, logits": Kind(
        perceptron(5, 1), numbers(5, lambda x: x.sum(1) > 0, "label"), {"loss.type": BINARY, "loss.from_logits": True},
    ),
    "multi-label": Kind(
        perceptron(5, 4), numbers(5, lambda x: (x[:, :4] > 0).astype(np.uint8), "tags"),
        {"loss.type": BINARY, "loss.from_logits": True, "loss.label": "tags"},
    ),
    "one-hot labels": Kind(
        perceptron(5, 3), numbers(5, lambda x: np.eye(3)[x[:, :3].argmax(1)].astype(np.float32)),
        {"loss.type": CROSS_ENTROPY, "loss.dense_labels": True},
    ),
    "classes from 1": Kind(
        perceptron(5, 3), numbers(5, lambda x: x[:, :3].argmax(1) + 1), {"loss.type": CROSS_ENTROPY},
        says=("the labels range from 1 to 3, the model's classes start at 0",),
    ),
    "batch of one": Kind(
        fixed_batch, numbers(5, lambda x: x[:, :3].argmax(1)),
        {"loss.type": CROSS_ENTROPY, "training.batch_size": 16, "training.gradient_accumulation_steps": None},
        says=("The file fixes a batch size of 1: training rewrites the graph for any size", "of the largest output"),
    ),
    "batch of one, samples that mix": Kind(
        fixed_batch_that_mixes, numbers(5, lambda x: x[:, :3].argmax(1)),
        {"loss.type": CROSS_ENTROPY, "training.batch_size": 1, "training.gradient_accumulation_steps": 16},
        says=("the graph cannot be rewritten for another, because node", "mixes the samples of a batch",
              "16 batches of 1"),
    ),
    "digit strings": Kind(
        recognizer(), digit_strings(),
        {"loss.type": "ctc", "loss.label": "text", "loss.blank": 0},
        says=("class 0 is never a label", "recognition of label sequences (CTC) of 11 classes"),
    ),
    "digit strings, time first, softmax, recurrent": Kind(
        recognizer(nn.Softmax(-1), time_first=True, recurrent=True), digit_strings(),
        {"loss.type": "ctc"}, says=("it is the result of Softmax; the loss is computed from the value before it",),
    ),
    "digit strings, any width, the last class blank": Kind(
        recognizer(nn.LogSoftmax(-1), width=True), digit_strings(0, dtype=np.int32),
        {"loss.type": "ctc", "loss.blank": 10}, says=("class 10, the last, is never a label",),
    ),
    "digit strings padded with the blank": Kind(
        recognizer(), digit_strings(padding=0, dtype=np.uint8),
        {"loss.type": "ctc", "loss.blank": 0},
    ),
    "autoencoder": Kind(
        perceptron(5, 5), lambda folder: only_inputs(folder), {"loss.type": SQUARES, "loss.label": "x"},
        says=("reconstructing the input",),
    ),
    "text": Kind(
        language_model(True), text, {"loss.type": CROSS_ENTROPY, "data.input_name_map": {"tokens": "input_ids"}},
        says=("causal language model",),
    ),
    "text with a mask": Kind(language_model(True, True), text, {"loss.type": CROSS_ENTROPY}),
    "masked text": Kind(
        language_model(False), text, {"loss.type": CROSS_ENTROPY, "loss.ignore_index": -100},
        says=("masked language model",),
    ),
    "token ids without labels": Kind(
        language_model(True), token_ids, {"loss.type": CROSS_ENTROPY, "loss.ignore_index": -100},
    ),
}  # fmt: skip
"""What somebody has -> what must come out."""


def two_words(folder: Path) -> str:
    x = np.random.default_rng(0).standard_normal((SAMPLES, 2))
    rows = [f"{a:.3f},{b:.3f},{'good' if a + b > 0 else 'bad'}" for a, b in x]
    (folder / "goods.csv").write_text("\n".join(["first,second,verdict", *rows]) + "\n")
    return "goods.csv"


def only_inputs(folder: Path) -> str:
    np.savez(folder / "only.npz", x=np.random.default_rng(0).standard_normal((SAMPLES, 5)).astype(np.float32))
    return "only.npz"
