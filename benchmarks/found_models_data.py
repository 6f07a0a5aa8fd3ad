"""A small data set that a found file can learn: its own inputs, and labels from its own outputs.

Classes are the network's own, each renamed to the next one; probabilities become 0 or 1, inverted; numbers are shrunk
and moved. So nothing is hard to learn, and nothing is right before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks.found_models_inputs import Array, make_inputs
from benchmarks.found_models_objective import make_target

SAMPLES = 32
LABEL = "label"


def write_data(
    session: onnxruntime.InferenceSession, file: str, fixed: Sequence[str], path: Path, samples: int = SAMPLES
) -> str:
    """Writes `.npz` with one array for each input that a sample has, and the label.

    Args:
        session: of the file.
        file: its name in the list.
        fixed: inputs that are the same for every sample.
        path: where it goes.
        samples: how many at least.

    Returns:
        what the label is.

    Raises:
        ValueError: the file has no output that could be learned, or no axis of samples.
    """
    names = [one.name for one in session.get_inputs() if one.name not in fixed]
    outputs = [one.name for one in session.get_outputs()]
    batches: list[Mapping[str, Array]] = []
    index, count = -1, 0
    while count < samples:
        feeds = make_inputs(session, file, seed=len(batches))
        results = session.run(None, feeds)
        if index < 0:
            index = _main_output(results)
        sizes = {name: (feeds[name].shape or (0,))[0] for name in names}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"inputs have no common axis of samples: {sizes}")
        batch = sizes[names[0]]
        batches.append({**{name: feeds[name] for name in names}, LABEL: _samples_first(results[index], batch)})
        count += batch
    arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
    kind, label = _label(np.concatenate([batch[LABEL] for batch in batches]))
    np.savez(path, **arrays, **{LABEL: label})  # type: ignore[arg-type]
    return f"{kind} from {outputs[index]}"


def _main_output(results: Sequence[Array]) -> int:
    for index, value in enumerate(results):
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            return index
    raise ValueError("no output of floating-point numbers")


def _samples_first(value: Array, batch: int) -> Array:
    """An output whose samples are along a later axis, as recurrent networks have them, or that has no such axis."""
    axes = [axis for axis, size in enumerate(value.shape) if size == batch]
    if value.ndim and axes and axes[0] <= 1:
        return np.moveaxis(value, axes[0], 0)
    if batch == 1:
        return value[np.newaxis]
    raise ValueError(f"an output of shape {list(value.shape)} has no axis of {batch} samples")


def _label(value: Array) -> tuple[str, Array]:
    kind, target = make_target(value)
    if kind != "multi-label":
        return kind, target
    # Where most probabilities are alike, the middle distinguishes them all the same.
    return kind, (value <= np.median(value)).astype(np.float32)
