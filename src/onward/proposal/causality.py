"""Whether a model of token sequences looks ahead, found by running it: a language model must not."""

from __future__ import annotations

import torch

from onward.errors import OnwardError
from onward.lowering.conversion import to_torch
from onward.proposal.model_facts import ModelFacts, Port

_TRIED_LENGTH = 8


def is_causal(model: ModelFacts, output: str | None = None) -> bool:
    """Whether the scores at a position stay the same when a later token changes.

    Where the model cannot be run on made-up tokens, it is taken as causal.

    Args:
        model: whose inputs are token ids and what follows from them.
        output: which one is looked at; None: the first of three axes.
    """
    names = [port.name for port in model.outputs]
    three = [port.name for port in model.outputs if port.shape is not None and len(port.shape) == 3]
    name = output or (three or names)[0]
    try:
        net = to_torch(model.path, fixed_inputs=model.fixed_inputs, limits=model.limits)
        first, second = (_inputs(model, last) for last in (0, 1))
        with torch.no_grad():
            results = [net(**inputs) for inputs in (first, second)]
    except (OnwardError, RuntimeError):
        return True
    place = names.index(name)
    one, other = (result[place] if isinstance(result, tuple) else result for result in results)
    before = one[:, :-1].float() - other[:, :-1].float()
    return float(before.abs().max()) <= 1e-5 * max(1.0, float(one.abs().max()))


def _inputs(model: ModelFacts, last: int) -> dict[str, torch.Tensor]:
    """Tokens that count up, with another one at the end."""
    ports = [port for port in model.inputs if port.name not in model.fixed_inputs]
    lengths = [port.shape[1] for port in ports if port.shape is not None and len(port.shape) > 1]
    length = next((size for size in lengths if isinstance(size, int)), _TRIED_LENGTH)
    return {port.name: _tensor(model, port, length, last) for port in ports}


def _tensor(model: ModelFacts, port: Port, length: int, last: int) -> torch.Tensor:
    batch = port.shape[0] if port.shape and isinstance(port.shape[0], int) else 1
    shape = (batch, *(size if isinstance(size, int) else length for size in (port.shape or (1, length))[1:]))
    dtype = getattr(torch, port.dtype, torch.int64)
    name = port.name.lower()
    if "mask" in name:
        return torch.ones(shape, dtype=dtype)
    if "type" in name or "segment" in name:
        return torch.zeros(shape, dtype=dtype)
    tokens = torch.arange(shape[-1]).expand(shape)
    if "position" in name:
        return tokens.to(dtype)
    rows = model.tables.get(port.name, 8)
    tokens = (tokens % rows).clone()
    tokens[..., -1] = (tokens[..., -1] + last) % rows
    return tokens.to(dtype)
