"""Adapters merged into the weights that they adapt: what a model without adapters computes the same with.

Quantized weights are quantized again, in the codes and blocks that their file has; how far that is off is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch

from onward.errors import ModelError
from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.packed_weights.requantization import Requantization, StoredWeight, find_stored_weight
from onward.graph.training_graph import TrainingGraph
from onward.lowering.kernels.dtypes import TORCH_DTYPE, tensor_from_ir, torch_dtype

Read = Callable[[str], torch.Tensor]


class Merging:
    """Values of weights with their adapters.

    Args:
        graph: what was trained.
        read: gives weights and running statistics by name.
        describe: gives tensors of the same shape and type without their values.

    Attributes:
        graph: the same, its adapted weights trained instead of their adapters.

    Raises:
        ModelError: an adapted weight is stored as integers in a way that others cannot be written in.
    """

    def __init__(self, graph: TrainingGraph, read: Read, describe: Read) -> None:
        self._adapted, self._read, self._describe = graph, read, describe
        stored = [_quantized(graph, name) for name in graph.adapters]
        self._quantized = {name: one for one in stored if one is not None for name in one.replaced}
        self._errors: dict[str, Requantization] = {}
        self._made: dict[str, torch.Tensor] = {}
        trained = {name for adapted in graph.adapters.values() for name in adapted.names}
        merged = dict.fromkeys((*graph.adapters, *self._quantized))
        weights = (*(name for name in graph.weights if name not in trained and name not in merged), *merged)
        self.graph = replace(graph, weights=weights, adapters={}) if merged else graph

    def read(self, name: str) -> torch.Tensor:
        """The value of a weight, or of something that a quantized one consists of."""
        if name in self._made:
            return self._made.pop(name)
        stored = self._quantized.get(name)
        adapted = self._adapted.adapters.get(name if stored is None else stored.name)
        if adapted is None:
            return self._read(name)
        if self._read(adapted.a).is_meta:  # a rehearsal, which has no values
            return self.describe(name)
        merged = merged_weight(adapted, self._base(adapted.weight), self._read)
        if stored is None:
            return merged
        arrays, error = stored.requantized(merged.numpy())
        self._errors[stored.name] = error
        self._made = {key: _as_tensor(array) for key, array in arrays.items()}
        return self._made.pop(name)

    def factor(self, name: str) -> torch.Tensor:
        """The trained norms of a weight over those that it has with its adapter."""
        adapted = self._adapted.adapters[name]
        total = _with_product(adapted, self._base(name), self._read)
        return _over_norm(adapted, total, self._read).reshape(adapted.shapes[adapted.magnitude])

    def _base(self, name: str) -> torch.Tensor:
        """A frozen weight: a parameter where `onward.add_adapter` left it one, else as the graph has it."""
        if name in self._quantized:
            return torch.from_numpy(self._quantized[name].matrix())
        if name in self._adapted.weights:
            return self._read(name).detach().cpu()
        value = self._adapted.model.graph.initializers[name].const_value
        assert value is not None
        return tensor_from_ir(value, f"initializer {name!r}")

    def describe(self, name: str) -> torch.Tensor:
        """Shape and type of that, without values."""
        if name not in self._quantized and name not in self._adapted.adapters:
            return self._describe(name)
        value = self._adapted.model.graph.initializers[name].const_value
        assert value is not None
        shape = tuple(int(size) for size in value.shape.numpy())
        return torch.empty(shape, dtype=torch_dtype(value.dtype, name), device="meta")

    @property
    def notes(self) -> tuple[str, ...]:
        """How far quantized weights that were written are from what they stand for, for the user."""
        if not self._errors:
            return ()
        errors = self._errors.values()
        worst = max(errors, key=lambda one: one.largest_error)
        mean = math.fsum(one.mean_error for one in errors) / len(errors)
        steps = math.fsum(one.mean_steps for one in errors) / len(errors)
        changed = math.fsum(one.changed for one in errors) / len(errors)
        return (
            f"adapters were merged into {len(errors)} quantized weights, which were quantized again: their "
            f"elements are off by {mean:.1e} on average, {steps:.2f} of the step between two codes, and by "
            f"{worst.largest_error:.1e} at most, {worst.largest_steps:.2f} steps, in "
            f"{self._adapted.known_as.shown(worst.weight)!r}; {changed:.1%} of the codes changed. Write the adapters "
            "next to the model to keep them exact (adapter.outputs: [onnx_adapter]).",
        )


def _quantized(graph: TrainingGraph, name: str) -> StoredWeight | None:
    """The stored form of an adapted weight that is quantized."""
    value = graph.model.graph.initializers[name]
    if value.const_value is None or not value.const_value.dtype.is_integer():
        return None
    stored = find_stored_weight(graph.model.graph, name)
    if stored is None:
        raise ModelError(
            f"the adapter of {graph.known_as.shown(name)!r} cannot be merged: its integers are read by several nodes, "
            "or their scales are computed. Set adapter.outputs to [peft] or [onnx_adapter], or leave the weight out of "
            "adapter.targets."
        )
    return stored


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """4-bit integers as torch holds them, one a byte."""
    dtype = TORCH_DTYPE[ir.DataType.from_numpy(array.dtype)]
    narrow = array.astype(np.int8 if dtype is torch.int8 else np.uint8) if array.dtype.itemsize == 1 else array
    return torch.from_numpy(np.ascontiguousarray(narrow)).to(dtype)


def merged_weight(adapted: AdaptedWeight, stored: torch.Tensor, read: Read) -> torch.Tensor:
    """A weight with its adapter, in the weight's own type and layout; computed in fp32 or wider."""
    total = _with_product(adapted, stored, read)
    return (total * _over_norm(adapted, total, read) if adapted.has_magnitude else total).to(stored.dtype)


def _with_product(adapted: AdaptedWeight, stored: torch.Tensor, read: Read) -> torch.Tensor:
    wide = torch.promote_types(stored.dtype, torch.float32)
    a, b = (read(name).detach().cpu().to(wide) for name in (adapted.a, adapted.b))
    return stored.to(wide) + product_of(adapted, a, b)


def _over_norm(adapted: AdaptedWeight, total: torch.Tensor, read: Read) -> torch.Tensor:
    """The trained norm of each output over the norm of the adapted weight, in a shape that broadcasts to it."""
    axes = tuple(range(1, total.dim())) if adapted.is_flat else (-1 if adapted.outputs_first else -2,)
    norm = torch.linalg.vector_norm(total, dim=axes, keepdim=True)
    factor: torch.Tensor = read(adapted.magnitude).detach().cpu().to(total.dtype).reshape(norm.shape) / norm
    return factor


def product_of(adapted: AdaptedWeight, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What an adapter adds to its weight, in the weight's layout."""
    if adapted.is_flat:
        return adapted.scale * (b.reshape(-1, adapted.rank) @ a.reshape(adapted.rank, -1)).reshape(adapted.shape)
    product = adapted.scale * (b @ a)
    return product if adapted.outputs_first else product.transpose(-1, -2)
