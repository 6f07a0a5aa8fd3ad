"""Inputs and tensors of graphs that are written out in ONNX's text form."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SHAPE = (2, 3, 8)
SIGNATURE = "double[b,t,8] x", "double[b,t,8] y"


def inputs(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64), **more}


def used(body: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Those of the tensors that a body reads."""
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    return {name: value for name, value in stored.items() if name in words}


def weight(seed: int = 1, shape: tuple[int, ...] = (8,)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)
