"""Tiny text recognizers, as they are usually exported, and images of digit strings for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.graph.exported import export

FONT = ("757", "262", "717", "737", "571", "747", "647", "711", "727", "756")
"""Three rows of a digit each, as octal bits; enough to tell some of them apart."""


class Recognizer(nn.Module):
    """Text recognition as it is usually exported: convolutions that shrink the width, then scores a column."""

    def __init__(self, *end: nn.Module, time_first: bool = False, classes: int = 11, recurrent: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        )
        self.mix = nn.GRU(128, 32, bidirectional=True) if recurrent else None
        self.head, self.end, self.time_first = (
            nn.Linear(64 if recurrent else 128, classes),
            nn.Sequential(*end),
            time_first,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.features(x).flatten(1, 2).permute(2, 0, 1)
        if self.mix is not None:
            columns = self.mix(columns)[0]
        scores = self.end(self.head(columns))
        return scores if self.time_first else scores.transpose(0, 1)


def recognizer(*end: nn.Module, width: bool = False, **options: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        axis = 0 if not options.get("time_first") else 1
        axes = {"image": {0: "batch"}, "scores": {axis: "batch"}}
        if width:
            axes["image"][3], axes["scores"][1 - axis] = "width", "columns"
        export(Recognizer(*end, **options).eval(), (torch.randn(2, 1, 8, 40),), folder / "net.onnx", 17, False,
               input_names=["image"], output_names=["scores"], dynamic_axes=axes)  # fmt: skip

    return write


def digit_strings(
    first_class: int = 1, padding: int = -1, longest: int = 5, dtype: type = np.int64, samples: int = 240
) -> Callable[[Path], str]:
    """Images of one to `longest` digits; digit d is class d + `first_class`."""

    def write(folder: Path) -> str:
        generator = np.random.default_rng(0)
        glyphs = np.array([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in rows] for rows in FONT])
        images = generator.random((samples, 1, 8, 40), dtype=np.float32) * 0.2
        labels = np.full((samples, longest), padding)
        for sample in range(samples):
            digits = generator.integers(0, 10, generator.integers(1, longest + 1))
            labels[sample, : len(digits)] = digits + first_class
            for place, digit in enumerate(digits):
                glyph = np.kron(glyphs[digit], np.ones((2, 2)))
                images[sample, 0, 1:7, 8 * place + 1 : 8 * place + 7] += glyph
        np.savez(folder / "digits.npz", image=images, text=labels.astype(dtype))
        return "digits.npz"

    return write
