"""The ONNX standard's node cases on the fake GPU: what fails there, and for which operators the host waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.conformance.cases import Case, load_cases
from tests.conformance.checking import _to_numpy, compare, net_of, to_torch_value
from tests.conformance.exceptions import reason_for
from tests.fake_gpu.tensors import WAITS, GpuTensor, fake_gpu


def run_all(share: int, shares: int, gpu: Callable[[], AbstractContextManager[object]] = fake_gpu) -> dict[str, Any]:
    """Every `shares`-th case that is not the expansion of another one; `gpu` makes the GPU, if it must be made."""
    cases = [case for case in load_cases("node") if reason_for(case.name) is None and "_expanded" not in case.name]
    failed: dict[str, str] = {}
    waits: dict[str, list[str]] = {}
    for case in cases[share::shares]:
        try:
            with gpu():
                _check(case)
        except Exception as error:
            failed[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
        for what, place in WAITS.take():
            waits.setdefault(f"{what} at {place}", []).append(case.name)
    return {"count": len(cases[share::shares]), "failed": failed, "waits": waits}


def _check(case: Case) -> None:
    net = net_of(case).to("cuda")
    for inputs, outputs in case.data_sets:
        given = tuple(_moved(to_torch_value(value)) for value in inputs)
        is_there = any(
            isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in tree_leaves((given, net.tensors_by_name()))
        )
        WAITS.take()
        with torch.no_grad():
            results = net.run(given, net.tensors_by_name())
        assert len(results) == len(outputs)
        for index, (expected, actual) in enumerate(zip(outputs, results, strict=True)):
            compare(expected, _to_numpy(_back(actual, is_there)), case.rtol, case.atol, f"output {index}")


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(item) for item in value]
    return value.to("cuda") if isinstance(value, torch.Tensor) else value


def _back(value: Any, is_there: bool) -> Any:
    """The numbers of results; all of them are on the GPU where anything was."""
    if isinstance(value, list | tuple):
        return [_back(item, is_there) for item in value]
    if isinstance(value, torch.Tensor):
        assert value.is_cuda or not is_there, "a result is in host memory"
        return value.numbers if isinstance(value, GpuTensor) else value.cpu()
    return value
