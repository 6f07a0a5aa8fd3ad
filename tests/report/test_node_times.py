"""How time is given to nodes, on events made by hand, so that a GPU's kernels are covered without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onward.lowering.program import NodeLabel
from onward.report.node_times import NodeCall, ProfileReport, Times, attribute_times

LARGE, SMALL = NodeLabel("large", "MatMul"), NodeLabel("small", "Relu")
LABELS = {"onnx::MatMul::large": LARGE, "onnx::Relu::small": SMALL}
BACKWARD = "autograd::engine::evaluate_function: "


def _event(
    name: str,
    host: float,
    parent: Any = None,
    kernels: float = 0.0,
    sequence: int = -1,
    on: str = "CPU",
    start: float = 0.0,
) -> Any:
    """An event as torch gives it: times in microseconds, `kernels` those that it launched itself."""
    start = start if parent is None else parent.time_range.start
    event = SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=on),
        kernels=[SimpleNamespace(duration=kernels)] if kernels else [],
        device_time_total=kernels,
        cpu_parent=parent,
        sequence_nr=sequence,
        time_range=SimpleNamespace(elapsed_us=lambda: host, start=start, end=start + host),
    )
    while parent is not None:
        parent.device_time_total += kernels
        parent = parent.cpu_parent
    return event


def _step(gpu: bool, start: float = 0.0) -> list[Any]:
    """One step: forward of two nodes, backward of both, recomputation of the large one within the small one's."""
    step = _event("ProfilerStep*", 1000.0, start=start)
    forward = _event("onward::forward", 100.0, step)
    large = _event("onnx::MatMul::large", 60.0, forward)
    product = _event("aten::mm", 50.0, large, 400.0 if gpu else 0.0)
    small = _event("onnx::Relu::small", 20.0, forward, 30.0 if gpu else 0.0, sequence=8)
    small_back = _event(f"{BACKWARD}ReluBackward0", 90.0, step, 20.0 if gpu else 0.0, sequence=8)
    again = _event("onnx::MatMul::large", 55.0, small_back, 410.0 if gpu else 0.0)
    large_back = _event(f"{BACKWARD}MmBackward0", 70.0, step, 800.0 if gpu else 0.0, sequence=7)
    added = _event(f"{BACKWARD}torch::autograd::AccumulateGrad", 5.0, step, 2.0 if gpu else 0.0)
    scaling = _event(f"{BACKWARD}MulBackward0", 4.0, step, 1.0 if gpu else 0.0, sequence=9)
    on_gpu = _event("onnx::MatMul::large", 400.0, on="CUDA")
    return [step, forward, large, product, small, small_back, again, large_back, added, scaling, on_gpu]


CALLS = [NodeCall("onnx::MatMul::large", 7, 8), NodeCall("onnx::Relu::small", 8, 9)]


def _times(gpu: bool) -> tuple[Times, dict[str, Any]]:
    times = attribute_times(_step(gpu), LABELS, CALLS, {"onnx::MatMul::large": 4096})
    return times, {row.name: row for row in times.nodes}


def _microseconds(*seconds: float) -> list[float]:
    return [pytest.approx(value) for value in (1e6 * s for s in seconds)]


def test_on_the_cpu_the_clock_counts() -> None:
    times, rows = _times(gpu=False)
    assert times.device == "cpu"
    assert _microseconds(times.step_seconds, times.forward_seconds, times.backward_seconds) == [1000, 100, 169]
    assert _microseconds(rows["large"].forward_seconds, rows["large"].backward_seconds) == [60, 70 + 55]
    assert _microseconds(rows["small"].forward_seconds, rows["small"].backward_seconds) == [20, 90 - 55]
    assert _microseconds(rows["(outside nodes)"].forward_seconds, rows["(outside nodes)"].backward_seconds) == [20, 4]
    assert _microseconds(rows["(gradient accumulation)"].backward_seconds) == [5]
    assert (rows["large"].calls, rows["small"].calls, rows["large"].result_bytes) == (1, 1, 4096)
    assert rows["large"].backward_host_seconds == rows["large"].backward_seconds


def test_on_a_gpu_its_kernels_count_and_the_clock_stands_beside() -> None:
    times, rows = _times(gpu=True)
    assert times.device == "cuda"
    assert _microseconds(times.step_seconds, times.forward_seconds, times.backward_seconds) == [1000, 430, 1233]
    assert _microseconds(rows["large"].forward_seconds, rows["large"].backward_seconds) == [400, 800 + 410]
    assert _microseconds(rows["small"].forward_seconds, rows["small"].backward_seconds) == [30, 20]
    assert _microseconds(rows["large"].forward_host_seconds, rows["large"].backward_host_seconds) == [60, 70 + 55]
    assert sum(row.seconds for row in times.nodes) == pytest.approx(times.forward_seconds + times.backward_seconds)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_time_a_step_is_a_mean_as_the_passes_are(gpu: bool) -> None:
    """Steps of a pipeline that compute nothing until the update's last one: a median would be nearly 0."""
    short = [_event("ProfilerStep*", 2.0, start=start) for start in (0.0, 10.0, 20.0)]
    times = attribute_times([*_step(gpu, 30.0), *short], LABELS, CALLS, {})
    assert _microseconds(times.step_seconds) == [1006 / 4]


def test_only_what_runs_in_the_counted_steps_is_counted() -> None:
    """Neither evaluation and callbacks between two steps, nor a step that failed, nor the profiler's preparation."""
    steps = [*_step(False, 0.0), *_step(False, 5000.0)]
    failed = _step(False, 8000.0)
    between = _event("onward::forward", 70.0, start=2000.0)
    node = _event("onnx::MatMul::large", 60.0, between)
    backward = _event(f"{BACKWARD}MmBackward0", 50.0, sequence=7, start=3000.0)
    preparation = _event("onward::profiler_preparation", 300.0, steps[0])
    times = attribute_times([*steps, *failed, between, node, backward, preparation], LABELS, CALLS, {}, 2)
    assert _microseconds(times.step_seconds, times.forward_seconds, times.backward_seconds) == [850, 200, 338]
    rows = {row.name: row for row in times.nodes}
    assert rows["large"].calls == 2


def test_an_update_of_several_steps_is_printed_too(tmp_path: Path) -> None:
    times = attribute_times(_step(False), LABELS, CALLS, {})
    text = ProfileReport(
        first_step=5,
        last_step=8,
        times=times,
        trace_path=tmp_path / "trace",
        table_path=tmp_path / "table",
        gradient_accumulation_steps=4,
    ).table()
    assert text.startswith("profile of steps 5 to 8: 1.000 ms a step, 4.000 ms an update of 4 steps; on the cpu ")


def test_nothing_recorded_makes_an_empty_table(tmp_path: Path) -> None:
    times = attribute_times([], {}, [], {})
    assert times == Times(device="cpu", step_seconds=0.0, forward_seconds=0.0, backward_seconds=0.0, nodes=())
    text = ProfileReport(
        first_step=1, last_step=1, times=times, trace_path=tmp_path / "trace", table_path=tmp_path / "table"
    ).table()
    assert text.startswith("profile of step 1: 0.000 ms a step")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_gives_kernel_times(tmp_path: Path) -> None:
    """The kernels of a large product, seen by the profiler, against CUDA's own event clock: within 20%."""
    import onward
    from onward.report.profiler import NodeProfiler
    from tests.one_node import make_model

    size = 4096
    model = make_model("MatMul", {"x": torch.zeros(size, size), "w": None}, initializers={"w": torch.ones(size, size)})
    net = onward.to_torch(model).cuda()
    x = torch.ones(size, size, device="cuda")
    profiler = NodeProfiler(2, 4, tmp_path)
    report, clock = None, 0.0
    for step in range(1, 5):
        profiler.before_step(step)
        program, tensors = profiler.instrument(net.program), net.tensors_by_name()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        (y,) = program(True, net.device, (x,), tensors)
        end.record()
        torch.cuda.synchronize()
        clock += begin.elapsed_time(end) * 1e-3 if profiler.active else 0.0
        y.sum().backward()
        report = profiler.after_step(step)
    assert report is not None
    assert report.times.device == "cuda"
    product = next(row for row in report.times.nodes if row.op_type == "MatMul")
    assert product.forward_seconds == pytest.approx(clock, rel=0.2)
    assert product.backward_seconds > 0.8 * product.forward_seconds
