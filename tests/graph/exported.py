"""Small torch modules and transformers as both of torch's exporters write them."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Encoder(nn.Module):
    """Layers copied from one prototype (equal numbers), a norm and a linear layer that are called twice, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        prototype = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(prototype, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)
        self.shared = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.norm(self.shared(self.encoder(x)))))
        return (self.out(self.shared(x)) * self.logit_scale) @ self.mask


class Tied(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


class Residual(nn.Module):
    """Convolutions with batch norm; all scales one, all shifts zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


def export(module: nn.Module, inputs: tuple[Any, ...], path: Path, opset: int, dynamo: bool, **options: Any) -> Path:
    """Writes the module by torch's newer (`dynamo`) or older exporter, without its chatter."""
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            if dynamo:
                options = {"external_data": False, **options}
            torch.onnx.export(module, inputs, path, opset_version=opset, dynamo=dynamo, **options)
    finally:
        logging.disable(logging.NOTSET)
    return path
