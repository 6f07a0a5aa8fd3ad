"""The activations of recurrent cells, by the standard's names, with their parameters and the clip before them.

RNN, GRU and LSTM list them per direction; https://onnx.ai/onnx/operators/onnx__LSTM.html names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def _affine(x: Tensor, alpha: float, beta: float) -> Tensor:
    return alpha * x + beta


def _scaled_tanh(x: Tensor, alpha: float, beta: float) -> Tensor:
    return alpha * torch.tanh(beta * x)


def _hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def _thresholded_relu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x > alpha, x, 0)


_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
    "relu": (torch.relu, ()),
    "tanh": (torch.tanh, ()),
    "sigmoid": (torch.sigmoid, ()),
    "softsign": (F.softsign, ()),
    "softplus": (F.softplus, ()),
    "leakyrelu": (F.leaky_relu, (0.01,)),
    "elu": (F.elu, (1.0,)),
    "thresholdedrelu": (_thresholded_relu, (1.0,)),
    "affine": (_affine, (1.0, 0.0)),
    "scaledtanh": (_scaled_tanh, (1.0, 1.0)),
    "hardsigmoid": (_hard_sigmoid, (0.2, 0.5)),
}
"""Lower-case name -> (function, default alpha and beta as far as it takes them)."""


def resolve_activations(
    names: Sequence[str],
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    clips: Sequence[float | None],
) -> list[Activation]:
    """The functions by name; each takes the next alpha and beta of the lists, if it has such a parameter.

    `clips` bounds, for each, what goes into it.

    Raises:
        ValueError: a name is not one of the standard's.
    """
    left = [list(alphas or ()), list(betas or ())]
    chosen: list[Activation] = []
    for name, clip in zip(names, clips, strict=True):
        if name.lower() not in _ACTIVATIONS:
            raise ValueError(f"activation {name!r} is not one of the standard's: {', '.join(sorted(_ACTIVATIONS))}.")
        function, defaults = _ACTIVATIONS[name.lower()]
        values = [left[i].pop(0) if left[i] else default for i, default in enumerate(defaults)]
        chosen.append(partial(_activate, function=function, parameters=tuple(values), clip=clip))
    return chosen


def _activate(x: Tensor, function: Callable[..., Tensor], parameters: tuple[float, ...], clip: float | None) -> Tensor:
    return function(x if clip is None else x.clamp(-clip, clip), *parameters)


def name_activations(activations: Sequence[str] | None, defaults: Sequence[str], directions: int) -> list[str]:
    """The activations of all directions, lower-case; `defaults` are those of one direction.

    Raises:
        ValueError: their number does not fit the directions.
    """
    given = [name.lower() for name in activations or ()]
    if not given:
        return list(defaults) * directions
    if len(given) != len(defaults) * directions:
        raise ValueError(
            f"activations has {len(given)} entries; {len(defaults)} for each of {directions} direction(s) are expected."
        )
    return given
