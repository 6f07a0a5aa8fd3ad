"""Model FLOPs utilization (MFU) and peak memory of this process: what a report shows of how well the machine is used.

MFU is the operations of the model's matrix products and convolutions, forward and backward, that a process does in a
second, as a share of those that the same device does in a second of one large matrix product of the run's precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onward.data.batches import Batch
from onward.engine.inputs.sample_shapes import fit_sample_shape
from onward.engine.matmul_rate import MATMUL_SECONDS, format_operations, matmul_rate
from onward.errors import OnwardError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import input_types
from onward.operating_system import peak_memory_bytes
from onward.plan.costs.costs import measure_costs

MEASURED_FROM_SECONDS = 10.0
"""Training time from which MFU is measured: counting and the product take about a second, once in a run, which a
shorter one should not have to wait for."""

_OFF: tuple[float, float] = (0.0, 0.0)


class Utilization:
    """Measures MFU of one process, once, between two steps and long after the first; and peak memory.

    MFU is left out where operations cannot be counted from shapes: sizes that depend on values, nested graphs,
    operators outside the standard, batches whose samples differ in shape.

    Args:
        graph: the entire network with its loss, as the user's model has it.
        device: of this process.
        dtype: of the run's matrix products.
        world_size: processes that share the work.
        notify: called once where MFU cannot be true.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        device: torch.device,
        dtype: torch.dtype,
        world_size: int,
        notify: Callable[[str], None],
    ) -> None:
        self._graph, self._device, self._dtype = graph, device, dtype
        self._world_size, self._notify = world_size, notify
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._measured: tuple[float, float] | None = None  # operations of a sample, and possible operations a second
        self._earlier_peak_bytes = 0
        self._is_checked = False

    def see(self, batch: Batch) -> None:
        """Notes the shapes of a batch; only its number of samples may change."""
        shapes = {name: tuple(array.shape) for name, array in batch.features.items()}
        if self._shapes is None:
            self._shapes = shapes
        elif shapes != self._shapes and _of_samples(shapes) != _of_samples(self._shapes):
            self._measured = _OFF

    def mfu(self, samples_per_second: float, train_seconds: float) -> float | None:
        """MFU at this throughput of all processes; None: not measured yet, or it cannot be known."""
        if self._measured is None and train_seconds >= MEASURED_FROM_SECONDS and self._shapes is not None:
            self._measured = self._measure(self._shapes)
        if self._measured is None or self._measured == _OFF:
            return None
        share = self._share(samples_per_second)
        if share > 1 and not self._is_checked:
            share = self._check(samples_per_second)
        return share

    def known_mfu(self, samples_per_second: float) -> float | None:
        """MFU at this throughput where it was measured before."""
        return None if self._measured is None or self._measured == _OFF else self._share(samples_per_second)

    def peak_memory_bytes(self) -> int:
        """The most that torch has allocated on the GPU so far; on a CPU what the process held, libraries included."""
        if self._device.type == "cuda":
            return max(self._earlier_peak_bytes, torch.cuda.max_memory_allocated(self._device))
        return peak_memory_bytes()

    def _share(self, samples_per_second: float) -> float:
        operations, possible = self._measured or _OFF
        return operations * samples_per_second / self._world_size / possible

    def _measure(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[float, float]:
        operations = operations_of_sample(self._graph, shapes)
        possible = None if not operations else self._matmul_rate()
        return _OFF if not operations or possible is None else (operations, possible)

    def _matmul_rate(self) -> float | None:
        """What the device does in a second; None: there is no memory left for such a product."""
        self._earlier_peak_bytes = self.peak_memory_bytes()
        try:
            return matmul_rate(self._device, self._dtype, MATMUL_SECONDS)
        except torch.OutOfMemoryError:
            self._notify("MFU is not shown: the GPU has no memory left in which to measure a large matmul.")
            return None
        finally:
            if self._device.type == "cuda":  # its matrices are not the run's
                torch.cuda.reset_peak_memory_stats(self._device)

    def _check(self, samples_per_second: float) -> float:
        """Measures again what the device can do: it may have been busy with something else. Above 100 % is reported."""
        self._is_checked = True
        operations, possible = self._measured or _OFF
        self._measured = (operations, max(possible, self._matmul_rate() or 0.0))
        share = self._share(samples_per_second)
        if share > 1:
            kind = str(self._dtype).removeprefix("torch.")
            self._notify(
                f"MFU is {share:.0%}, above 100%: the model does {format_operations(operations)} a sample, more in a "
                f"second than one large {kind} matmul here ({format_operations(self._measured[1])}/s). Other "
                "work slowed the measurement down, or the model's layers have faster algorithms; compare throughput "
                "instead."
            )
        return share


def operations_of_sample(graph: TrainingGraph, shapes: Mapping[str, tuple[int, ...]]) -> float | None:
    """Operations of matrix products and convolutions for a sample, forward and backward; None: unknown.

    Args:
        graph: with its loss.
        shapes: of every feature of a batch, samples first.
    """
    sizes = _sizes(graph, shapes)
    if sizes is None:
        return None
    try:
        costs = measure_costs(graph, sizes)
    except OnwardError:
        return None  # inputs with sizes that the graph contradicts are refused elsewhere
    if costs.uncounted:
        return None
    total = costs.total(costs.nodes)
    samples = next((shape[0] for shape in shapes.values() if shape), 1)
    return (total.forward + total.backward_input + total.backward_weight) / samples


def _sizes(graph: TrainingGraph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int] | None:
    """Symbolic dimension of the inputs -> its size in a batch; None: a feature is missing or does not fit."""
    _, expected = input_types(graph)
    sizes: dict[str, int] = {}
    for name, shape in expected.items():
        found = shapes.get(name)
        if found is None:
            return None
        sample = fit_sample_shape(found[1:], shape[1:]) if found and shape else ()
        if sample is None:
            return None
        for size, known in zip(shape, (*found[:1], *sample), strict=True):
            if isinstance(size, str) and sizes.setdefault(size, known) != known:
                return None
    return sizes


def _of_samples(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: shape[1:] for name, shape in shapes.items()}
