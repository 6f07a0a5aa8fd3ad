"""Whether a model's weights look trained or freshly initialized, judged by what initializers leave behind.

Frameworks draw weights from uniform or normal distributions of known widths, set norm scales to one and shifts to zero
(Glorot & Bengio 2010; He et al. 2015; the defaults of PyTorch and Keras). Training moves them away from that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph.operators import Fact, has_fact
from onward.graph.training_graph import TrainingGraph

_MOST_ELEMENTS = 1 << 16
"""So many elements of a weight are looked at, evenly spaced."""

_FEWEST_ELEMENTS = 32
"""Smaller weights say too little about a distribution."""


@dataclass(frozen=True)
class Origin:
    """Whether weights look trained.

    Attributes:
        is_trained: the verdict.
        evidence: what speaks for it, as one clause.
    """

    is_trained: bool
    evidence: str


def find_origin(training: TrainingGraph) -> Origin:
    """Looks at the trainable weights and the running statistics of a model."""
    graph = training.model.graph
    tensors = {name: graph.initializers[name] for name in training.weights}
    scales, shifts = _norm_values(tensors)
    moved_scales = [name for name in scales if not _is_all(tensors[name], 1.0)]
    moved_shifts = [name for name in shifts if not _is_all(tensors[name], 0.0)]
    statistics = [value for name in training.states if (value := graph.initializers.get(name)) is not None]
    moved_statistics = [value for value in statistics if not (_is_all(value, 0.0) or _is_all(value, 1.0))]
    if moved_statistics:
        return Origin(True, f"{len(moved_statistics)} running statistics of batch normalization differ from 0 and 1")
    if scales and len(moved_scales) + len(moved_shifts) > (len(scales) + len(shifts)) / 2:
        count = len(moved_scales) + len(moved_shifts)
        total = len(scales) + len(shifts)
        return Origin(True, f"{count} of {total} scales and shifts of normalization layers differ from 1 and 0")
    if scales and not moved_scales and not moved_shifts:
        return Origin(False, f"all {len(scales)} scales of normalization layers are 1, as initialized")
    return _by_distribution(tensors)


def _norm_values(tensors: dict[str, ir.Value]) -> tuple[list[str], list[str]]:
    scales, shifts = [], []
    for name, value in tensors.items():
        places = {use.idx for use in value.uses() if has_fact(use.node.op_type, Fact.NORMALIZATION)}
        if 1 in places:
            scales.append(name)
        elif 2 in places:
            shifts.append(name)
    return scales, shifts


def _is_all(value: ir.Value, number: float) -> bool:
    if value.const_value is None:
        return False
    array = np.asarray(value.const_value.numpy()).reshape(-1)
    return bool(np.abs(array[:_MOST_ELEMENTS].astype(np.float64) - number).max(initial=0.0) < 1e-6)


def _by_distribution(tensors: dict[str, ir.Value]) -> Origin:
    """Counts weights whose numbers are distributed as a known initializer draws them."""
    has_biases = _has_drawn_biases(tensors)
    fresh = judged = 0
    for value in tensors.values():
        tensor = value.const_value
        if tensor is None or len(tensor.shape) < 2 or tensor.size < _FEWEST_ELEMENTS:
            continue
        judged += 1
        fresh += _looks_initialized(np.asarray(tensor.numpy()), has_biases)
    if judged == 0:
        zeros = sum(_is_all(value, 0.0) for value in tensors.values())
        is_fresh = zeros == len(tensors)
        return Origin(not is_fresh, "all weights are 0" if is_fresh else "its few weights are not all 0")
    share = f"{fresh} of {judged} weight matrices"
    if fresh * 2 >= judged:
        return Origin(False, f"{share} have the distribution of a common initializer")
    share = f"only {share} have" if fresh else f"none of {judged} weight matrices has"
    return Origin(True, f"{share} the distribution of a common initializer")


def _has_drawn_biases(tensors: dict[str, ir.Value]) -> bool:
    """Whether some biases are not constant: of the common initializers, only PyTorch's default draws them."""
    for value in tensors.values():
        tensor = value.const_value
        if tensor is None or len(tensor.shape) != 1 or tensor.size < 2:
            continue
        numbers = np.asarray(tensor.numpy()).astype(np.float64)
        if numbers.max() - numbers.min() > 1e-6 and not np.isin(numbers, (0.0, 1.0)).all():
            return True
    return False


def _looks_initialized(array: np.ndarray, has_biases: bool) -> bool:
    """Whether numbers are drawn as by an initializer; with drawn biases, by PyTorch's default ones."""
    flat = array.reshape(-1)
    numbers = flat[:: max(1, flat.size // _MOST_ELEMENTS)].astype(np.float64)
    largest, deviation = float(np.abs(numbers).max()), float(numbers.std())
    if largest == 0 or deviation == 0:
        return True
    if not has_biases and _is_orthogonal(array.reshape(-1, *array.shape[-2:])[0]):
        return True
    fans = _fans(array.shape)
    bounds = _default_bounds(array.shape, fans) if has_biases else _uniform_bounds(fans)
    if _is_uniform(numbers, largest) and any(
        bound * (1 - 12 / numbers.size) - 1e-9 <= largest <= bound * 1.0005 for bound in bounds
    ):
        return True
    kurtosis = float(((numbers - numbers.mean()) ** 4).mean() / deviation**4)
    is_normal = abs(kurtosis - 3) < 0.1 + 5 * math.sqrt(24 / numbers.size) or abs(kurtosis - 2.36) < 0.15
    tolerance = 0.002 + 4 / math.sqrt(2 * numbers.size)
    deviations = [1.0] if has_biases else _normal_deviations(fans)  # torch.nn.Embedding
    return is_normal and any(abs(deviation / known - 1) < tolerance for known in deviations)


def _default_bounds(shape: tuple[int, ...], fans: tuple[int, ...]) -> list[float]:
    """Of PyTorch's linear, convolutional and recurrent layers."""
    gates = (1, 3, 4) if len(shape) == 3 and shape[0] <= 2 else (1,)
    return [math.sqrt(count / fan) for fan in fans if fan for count in gates]


def _is_orthogonal(matrix: np.ndarray) -> bool:
    """Whether rows, or columns, or each square block of stacked gates are orthonormal, as recurrent layers begin."""
    rows, columns = matrix.shape
    if min(rows, columns) < 4 or matrix.size > 1 << 20:
        return False
    wide = (matrix if rows <= columns else matrix.T).astype(np.float64)
    if np.abs(wide @ wide.T - np.eye(len(wide))).max() < 1e-3:
        return True
    if rows % columns:
        return False
    return all(
        np.abs(block @ block.T - np.eye(columns)).max() < 1e-3
        for block in matrix.astype(np.float64).reshape(-1, columns, columns)
    )


def _is_uniform(numbers: np.ndarray, largest: float) -> bool:
    ratio = float((numbers**2).mean()) / largest**2
    return abs(ratio - 1 / 3) < 0.02 + 1.5 / math.sqrt(numbers.size)


def _fans(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What counts as inputs and outputs of a weight, whichever way it is stored."""
    if len(shape) == 2 or (len(shape) == 3 and shape[0] <= 2):  # of recurrent layers: directions, gates, inputs
        return int(shape[-2]), int(shape[-1])
    window = int(np.prod(shape[2:], dtype=np.int64))
    return int(shape[1]) * window, int(shape[0]) * window


def _uniform_bounds(fans: tuple[int, ...]) -> list[float]:
    one, other = fans
    each = [math.sqrt(gain / fan) for fan in fans if fan for gain in (1.0, 3.0, 6.0)]
    # Recurrent layers draw by their hidden size, which a stack of gates holds three or four times; or by all gates.
    gates = [math.sqrt(gates / fan) for fan in fans if fan for gates in (3, 4)]
    of_gate = [math.sqrt(6 / (one / count + other)) for count in (1, 3, 4)]
    return [*each, *gates, *of_gate, math.sqrt(6 / (one + other)), 0.05, 1.0, 0.1]


def _normal_deviations(fans: tuple[int, ...]) -> list[float]:
    one, other = fans
    each = [math.sqrt(gain / fan) for fan in fans if fan for gain in (1.0, 2.0)]
    fixed = [0.02, 0.01, 0.05, 1.0, 0.88 * 0.05]
    scaled = [0.02 / math.sqrt(2 * layers) for layers in (2, 4, 6, 8, 12, 24, 36, 48)]
    return [*each, math.sqrt(2 / (one + other)), *fixed, *scaled]
