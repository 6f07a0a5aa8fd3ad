"""Modules that use a parameter more than once, written out by hand and drawn at random, and training them two ways.

torch's exporter merges equal tensors of up to 1,024 elements, folds what a call does with a parameter of up to 8,192,
once for each call, and leaves larger ones as they are: `WIDTHS` has square matrices on each side of both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onward
from onward.lowering.module import OnnxModule
from tests.graph.exported import export
from tests.one_node import run_onnxruntime

WIDTHS = (32, 33, 40, 90, 91)
"""1,024 and 1,089 elements; 8,100 and 8,281."""


class Shared(nn.Module):
    """Layers of one width and a way through them, in which each may occur several times."""

    def __init__(self, width: int, way: Callable[[Shared, torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(width, width, bias), nn.Linear(width, width, bias)
        self.conv, self.norm = nn.Conv1d(width, width, 1, bias=bias), nn.LayerNorm(width)
        self.group = nn.GroupNorm(1, width)
        self.vector, self.matrix = (
            nn.Parameter(torch.randn(width)),
            nn.Parameter(torch.randn(width, width) / width**0.5),
        )
        for norm in (self.norm, self.group):
            nn.init.normal_(norm.weight, 1, 0.2)
            nn.init.normal_(norm.bias, 0, 0.2)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


def turned(x: torch.Tensor) -> torch.Tensor:
    """[N, T, C] <-> [N, C, T]."""
    return x.transpose(1, 2)


def chunked(m: Shared, x: torch.Tensor) -> torch.Tensor:
    """Halves of one matrix, as heads are cut from a joined projection."""
    left, right = m.matrix[: m.matrix.shape[0] // 2 * 2].chunk(2)
    return F.pad(F.linear(x, left) * F.linear(x, right), (0, m.matrix.shape[0] - len(left)))


WAYS: dict[str, Callable[[Shared, torch.Tensor], torch.Tensor]] = {
    "linear twice": lambda m, x: m.linear(torch.tanh(m.linear(x))),
    "two linears, twice each": lambda m, x: m.linear(m.other(torch.tanh(m.linear(m.other(x))))),
    "linear with its transpose": lambda m, x: torch.tanh(m.linear(x)) @ m.linear.weight,
    "linear, then tied decoder": lambda m, x: F.linear(torch.tanh(m.linear(x)), m.linear.weight.t(), m.vector),
    "three and two dimensions": lambda m, x: m.linear(torch.tanh(m.linear(x)).mean(1)),
    "convolution twice": lambda m, x: m.conv(torch.tanh(m.conv(turned(x)))),
    "convolution, transposed too": lambda m, x: (
        F.conv_transpose1d(torch.tanh(m.conv(turned(x))), m.conv.weight)
        + F.conv1d(turned(x), m.conv.weight.transpose(0, 1))
    ),
    "norms twice": lambda m, x: m.norm(m.linear(torch.tanh(m.norm(turned(m.group(turned(x) + m.group(turned(x)))))))),
    "vector in many shapes": lambda m, x: (
        turned(turned(x * m.vector[:, None].T) * m.vector[:, None]) + m.linear(x) * m.vector + m.vector.view(1, 1, -1)
    ),
    "matrix and parts of it": lambda m, x: torch.tanh(x @ m.matrix) + x @ m.matrix[:1].T + x[..., :5] @ m.matrix[:5],
    "matrix as a vector": lambda m, x: (
        (x @ m.matrix) * m.matrix.reshape(-1)[None, None, : x.shape[-1]]
        + torch.tanh(x) @ m.matrix[0].repeat(x.shape[-1], 1)
    ),
    "chunks twice": lambda m, x: chunked(m, torch.tanh(chunked(m, x))),
}  # fmt: skip


def random_way(seed: int) -> Callable[[Shared, torch.Tensor], torch.Tensor]:
    """Six steps drawn from all that `Shared` has; most parameters are used more than once."""
    generator = np.random.default_rng(seed)
    steps: list[Callable[[Shared, torch.Tensor], torch.Tensor]] = [
        lambda m, x: m.linear(x),
        lambda m, x: m.other(x),
        lambda m, x: turned(m.conv(turned(x))),
        lambda m, x: m.norm(x),
        lambda m, x: turned(m.group(turned(x))),
        lambda m, x: x + m.vector,
        lambda m, x: turned(turned(x) * m.vector[:, None]),
        lambda m, x: x @ m.matrix,
        lambda m, x: F.linear(x, m.matrix),
        lambda m, x: F.linear(x, m.other.weight.t()),
        lambda m, x: x + x[..., :5] @ m.matrix[:5],
        lambda m, x: m.linear(x[:, 0])[:, None] + x,
    ]
    drawn = [steps[i] for i in generator.integers(0, len(steps), 6)]

    def way(m: Shared, x: torch.Tensor) -> torch.Tensor:
        for step in drawn:
            x = x + torch.tanh(step(m, x))
        return x

    return way


def descend_together(net: OnnxModule, module: nn.Module, x: Tensor, updates: int, lr: float = 0.3) -> None:
    """Updates a network and the module it was exported from by SGD, towards one target."""
    target = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(1))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizers = [torch.optim.SGD(list(parameters), lr=lr) for parameters in (net.weights.values(), trained)]
    for _ in range(updates):
        for one, optimizer in zip((net, module), optimizers, strict=True):
            optimizer.zero_grad()
            (one(x) - target).square().mean().backward()
            optimizer.step()


def train_both(
    module: nn.Module, x: torch.Tensor, folder: Path, dynamo: bool = True, updates: int = 3, lr: float = 0.3
) -> tuple[OnnxModule, float]:
    """Trains a module and its export alike; gives the net and how far the exported file is from the module.

    Only if every gradient is right do both follow one path; the distance is of outputs, relative to the largest output.
    """
    module.eval()
    path = export(module, (x,), folder / "m.onnx", 18 if dynamo else 17, dynamo)
    net = onward.to_torch(path)
    descend_together(net, module, x, updates, lr)
    onward.export(net, folder / "t.onnx")
    other = x.flip(0) if x.dtype == torch.int64 else torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    found, expected = run_onnxruntime(onnx.load(folder / "t.onnx"), other)[0], module(other).detach().numpy()
    return net, float(np.abs(found - expected).max() / np.abs(expected).max())
