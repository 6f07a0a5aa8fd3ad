"""Profiles a range of training steps: a trace for Perfetto and TensorBoard, and the time of every ONNX node.

While it runs, programs are replaced by twins that mark each node's work in torch's profiler; backward work is led
back to the node whose forward pass created it by autograd's sequence numbers.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from onward.engine.loop import StepDone
from onward.engine.state import TrainState
from onward.errors import StorageError
from onward.lowering.kernels.host import to_host, to_tensor
from onward.lowering.program import NodeLabel, Program
from onward.parameters import Parameters
from onward.report.node_times import (
    FORWARD,
    PREPARATION,
    STEP,
    NodeCall,
    ProfileReport,
    attribute_times,
    write_table,
)

_BETWEEN_HOST_AND_DEVICE: dict[Callable[..., Any], str] = {to_tensor: "(to tensor)", to_host: "(to host)"}
"""Steps of a program that are between ONNX nodes; named too, since the second makes the host wait for the device."""


class NodeProfiler:
    """Profiles the weight updates that the steps `first_step` to `last_step` of a round belong to.

    A step of a pipeline passes on a micro-batch, and the last one of an update computes them all: only entire updates
    have a time a step.

    The loop calls `before_step` and `after_step` around every step, and calls `instrument(program)` instead of
    each program; the last profiled step gives the report. A round that ends earlier calls `stop` if `active`.

    Args:
        first_step, last_step: steps of the round, counted from 1.
        trace_dir: where `steps-<first>-<last>.pt.trace.json` and `steps-<first>-<last>.nodes.csv` go; made if need be.
        rank: of this process; it is part of the file names from 1 on.
        gradient_accumulation_steps: steps of an update.
    """

    def __init__(
        self,
        first_step: int,
        last_step: int,
        trace_dir: str | Path,
        rank: int = 0,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        if not 1 <= first_step <= last_step:
            raise ValueError(f"first_step is {first_step} and last_step {last_step}; expected 1 <= first <= last.")
        self.accumulation = gradient_accumulation_steps
        self.first_step = first_step - (first_step - 1) % self.accumulation
        self.last_step = last_step + -last_step % self.accumulation
        self.trace_dir = Path(trace_dir)
        self.rank = rank
        self._profile: profile | None = None
        self._step_range: record_function | None = None
        self._started_at = self._last_done = self.first_step
        self._finished = False
        self._labels: dict[str, NodeLabel] = {}
        self._calls: list[NodeCall] = []
        self._result_bytes: dict[str, int] = {}
        self._twins: dict[int, tuple[Program, Program]] = {}

    @property
    def active(self) -> bool:
        """Whether steps are being profiled."""
        return self._profile is not None

    def instrument(self, program: Program) -> Program:
        """A twin of the program that marks each node, to be called in its place; itself when nothing is profiled.

        Twins are kept until `stop`, so this costs nothing from a program's second call on. They run eagerly.
        """
        if not self.active:
            return program
        if id(program) not in self._twins:
            with record_function(PREPARATION):
                self._twins[id(program)] = (program, self._make_twin(program))
        return self._twins[id(program)][1]

    def before_step(self, step: int) -> None:
        """Starts with the first step of the range (or within it, after a resume) and opens the range of the step."""
        if not self.active and self.first_step <= step <= self.last_step and not self._finished:
            self._start(step)
        if self.active:
            # The name under which TensorBoard's profile page finds steps.
            self._step_range = record_function(f"{STEP}{step}")
            self._step_range.__enter__()  # type: ignore[no-untyped-call]

    def after_step(self, step: int) -> ProfileReport | None:
        """Closes the range of a step; after the last one to profile, stops and gives the report."""
        if not self.active:
            return None
        is_update = step % self.accumulation == 0
        if is_update:
            _wait_for_device()  # the host runs ahead of a GPU, whose work belongs to the step that asked for it
        self._close_range()
        if is_update or self._last_done % self.accumulation:
            self._last_done = step
        return self.stop() if step >= self.last_step else None

    def _start(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        _wait_for_device()
        with _quiet_kineto():
            # The very first profile of a process sets up the tracing libraries; that time is no step's.
            # `acc_events` here too: without it torch 2.11 warns on the console, whatever is profiled.
            with profile(activities=activities, acc_events=True):
                torch.zeros(1)
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()
        self._started_at = self._last_done = step

    def _close_range(self) -> None:
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None

    def stop(self) -> ProfileReport:
        """Ends profiling, also before the last step, and writes trace and table. Only while `active`.

        Raises:
            StorageError: the files cannot be written.
        """
        if self._profile is None:
            raise RuntimeError("nothing is being profiled; stop() belongs after before_step() and before the report")
        self._close_range()
        _wait_for_device()
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._finished = True
        rank = f"-rank{self.rank}" if self.rank else ""
        stem = f"steps-{self._started_at}-{self._last_done}{rank}"
        events = recorded.events()  # type: ignore[no-untyped-call]
        step_count = self._last_done - self._started_at + 1
        times = attribute_times(events, self._labels, self._calls, self._result_bytes, step_count)
        report = ProfileReport(
            first_step=self._started_at,
            last_step=self._last_done,
            times=times,
            trace_path=self.trace_dir / f"{stem}.pt.trace.json",
            table_path=self.trace_dir / f"{stem}.nodes.csv",
            gradient_accumulation_steps=self.accumulation,
        )
        self._twins.clear()
        self._labels.clear()
        self._calls.clear()
        self._result_bytes.clear()
        try:
            self.trace_dir.mkdir(parents=True, exist_ok=True)
            write_table(report)
            with _quiet_kineto():
                recorded.export_chrome_trace(str(report.trace_path))
            if not report.trace_path.is_file():
                raise OSError(f"torch wrote no trace to {report.trace_path}")
        except (OSError, RuntimeError) as error:
            raise StorageError(
                f"cannot write the profile to {self.trace_dir}: {error}. Expected a directory that can be made and "
                "written, with room for about 1 MB per thousand operations; correct `profiler.trace_dir` or make room."
            ) from error
        return report

    def _make_twin(self, program: Program) -> Program:
        code = copy.deepcopy(program.code)
        for module in code.modules():
            if isinstance(module, fx.GraphModule):
                self._mark_nodes(module)
        return _MarkedProgram(
            code=code,
            inputs=program.inputs,
            tensors=program.tensors,
            outputs=program.outputs,
            attribute_tensors=program.attribute_tensors,
        )

    def _mark_nodes(self, code: fx.GraphModule) -> None:
        for node in code.graph.nodes:
            if node.op != "call_function":
                continue
            label = node.meta.get("onnx")
            if label is None and node.target in _BETWEEN_HOST_AND_DEVICE:
                label = NodeLabel(node.name, _BETWEEN_HOST_AND_DEVICE[node.target])
            if label is not None:
                text = f"onnx::{label.op_type}::{label.name}"
                self._labels[text] = label
                node.target = _marked(node.target, text, self._calls, self._result_bytes)
        code.recompile()


@dataclass(frozen=True, kw_only=True)
class _MarkedProgram(Program):
    """A program whose calls are one range of the trace."""

    def __call__(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        with record_function(FORWARD):
            return super().__call__(*arguments, **named)


def _marked(
    function: Callable[..., Any], text: str, calls: list[NodeCall], result_bytes: dict[str, int]
) -> Callable[..., Any]:
    """The function, its time marked in the trace; what it creates, autograd nodes and memory, is noted."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        first = _sequence_number()
        with record_function(text):
            result = function(*arguments, **named)
        calls.append(NodeCall(text, first, _sequence_number()))
        if text not in result_bytes:
            result_bytes[text] = _new_bytes(result, (arguments, named))
        return result

    return call


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _new_bytes(result: Any, given: Any) -> int:
    """Size of the storages that a result holds and its arguments do not: a view takes no memory."""
    sizes = _storage_sizes(result)
    if sizes:
        for storage in _storage_sizes(given):
            sizes.pop(storage, None)
    return sum(sizes.values())


def _storage_sizes(value: Any) -> dict[int, int]:
    """Size in bytes of every storage under a value, by its address."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _sequence_number() -> int:
    """The number that this thread's next autograd node gets. Not public, but what `torch.fx` itself reads."""
    return torch._C._autograd._get_sequence_nr()


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keeps the tracing library from writing its stages to the console, unless the user wants to read them."""
    asked = "KINETO_LOG_LEVEL" in os.environ
    if not asked:
        os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        if not asked:
            del os.environ["KINETO_LOG_LEVEL"]


__all__ = ["NodeProfiler", "ProfileReport"]


def profiled(
    parameters: Parameters,
    folder: Path,
    state: TrainState,
    make_steps: Callable[[Callable[[Program], Program] | None], Iterator[StepDone]],
    on_table: Callable[[str], None],
) -> Iterator[StepDone]:
    """The steps of a round, those of the range that the user asked for under a profiler.

    Args:
        parameters: of the round; the range is widened to entire updates.
        folder: where trace and table go, unless `parameters` say where.
        state: of the run.
        make_steps: makes the steps, with what instruments their programs.
        on_table: gets the table when the range is over.
    """
    settings, accumulation = parameters.profiler, parameters.training.gradient_accumulation_steps
    if settings.first_step is None or settings.last_step is None:
        yield from make_steps(None)
        return
    folder = settings.trace_dir or folder
    profiler = NodeProfiler(settings.first_step, settings.last_step, folder, state.mesh.rank, accumulation)
    steps, step, top_nodes = make_steps(profiler.instrument), state.counters.step, settings.top_nodes
    try:
        profiler.before_step(step + 1)
        for done in steps:
            report = profiler.after_step(done.step)
            if report is not None:
                on_table(report.table(top_nodes))
            yield done
            profiler.before_step(done.step + 1)
    finally:
        # The round ended before the range did, or a step failed.
        if profiler.active:
            on_table(profiler.stop().table(top_nodes))
