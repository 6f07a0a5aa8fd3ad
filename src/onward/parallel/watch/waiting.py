"""How long this rank computes and how long it waits for others, in a stretch of training that is measured.

Whoever is slow waits least: the time of its own work is what the collectives of an update hide.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

_Mark = float | torch.cuda.Event


class WaitClock:
    """Measures stretches of training: in all, and the part of it in which collectives were waited for.

    On GPUs it measures the device, by events that are read when the times are asked for. Between stretches it costs
    nothing; inside it wraps the waiting of torch's collectives, of this process and for so long.

    Args:
        device: that computes.
        modules: called by training passes; of those that are wrapped by DDP, whose collectives are waited for out of
            Python's sight, the end of each backward pass is observed.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module]) -> None:
        self._device = device
        self._replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._stretches: list[tuple[_Mark, _Mark]] = []
        self._waits: list[tuple[_Mark, _Mark]] = []

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measures what is done inside; stretches add up until `take_seconds`."""
        begin, original = self._mark(), dist.Work.wait

        def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
            if not _is_training_thread():
                return original(work, *arguments, **options)
            started = self._mark()
            try:
                return original(work, *arguments, **options)
            finally:
                self._waits.append((started, self._mark()))

        handles = [module.register_forward_hook(self._observe_backward) for module in self._replicas]
        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            dist.Work.wait = original  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()
            self._stretches.append((begin, self._mark()))

    def take_seconds(self) -> tuple[float, float]:
        """Own work and waiting of what was measured since the last call; waits for the device."""
        total, waited = (sum(map(_seconds, spans)) for spans in (self._stretches, self._waits))
        self._stretches, self._waits = [], []
        return max(total - waited, 0.0), waited

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _observe_backward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Between the end of the backward pass and what DDP does then, it waits for the mean of the gradients."""
        seen: list[None] = []

        def begin(gradient: torch.Tensor) -> None:
            if not seen:
                seen.append(None)
                # Callbacks of a backward pass are called in order when it is done; DDP adds its own during the pass.
                Variable._execution_engine.queue_callback(done)

        def done() -> None:
            started = self._mark()
            Variable._execution_engine.queue_callback(lambda: self._waits.append((started, self._mark())))

        for tensor in _tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]


def _seconds(span: tuple[_Mark, _Mark]) -> float:
    begin, end = span
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    assert not isinstance(end, torch.cuda.Event)
    return end - begin


def _tensors_of(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors_of(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors_of(value)


def _is_training_thread() -> bool:
    """The main thread, or autograd's own; not a thread of ours that writes a checkpoint."""
    current = threading.current_thread()
    return current is threading.main_thread() or isinstance(current, threading._DummyThread)
