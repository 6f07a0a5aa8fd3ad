"""A pair of arrays that a small network is fitted to."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

import onward
from onward.fitting.result import FitResult
from tests.mlp import build_mlp, data, weights

DATA = data(40)
PAIR = (DATA["x"], DATA["label"])
ON_CPU = onward.Environment(execution_provider="CPU", threads=1)


def fit(given: Any = PAIR, **options: Any) -> FitResult:
    options = {"loss": "cross_entropy", "batch_size": 8, "progress": False, "environment": ON_CPU, **options}
    return onward.fit(options.pop("model", None) or build_mlp(), given, **options)


class Original(torch.nn.Module):
    """The network before it was exported."""

    def __init__(self) -> None:
        super().__init__()
        tensors = {name: torch.from_numpy(array) for name, array in weights().items()}
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 4)
        with torch.no_grad():
            for layer, weight, bias in ((self.first, "w1", "b1"), (self.second, "w2", "b2")):
                layer.weight.copy_(tensors[weight].T)
                layer.bias.copy_(tensors[bias])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def torch_loader() -> Any:
    return TorchLoader(TensorDataset(*map(torch.from_numpy, PAIR)), batch_size=8)
