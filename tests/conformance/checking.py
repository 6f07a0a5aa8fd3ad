"""Runs one case of the standard through `onward.to_torch` and compares with what the standard expects."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

import onward
from onward.lowering.context import ExecutionContext
from onward.lowering.module import OnnxModule
from tests.conformance.cases import Case
from tests.conformance.exceptions import CHANNELS_FIRST

_VIEWS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e4m3fnuz): (np.uint8, torch.float8_e4m3fnuz),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
    np.dtype(ml_dtypes.float8_e5m2fnuz): (np.uint8, torch.float8_e5m2fnuz),
    np.dtype(ml_dtypes.float8_e8m0fnu): (np.uint8, torch.float8_e8m0fnu),
}
_UNPACKED = {
    np.dtype(ml_dtypes.int4): np.int8,
    np.dtype(ml_dtypes.uint4): np.uint8,
    np.dtype(ml_dtypes.int2): np.int8,
    np.dtype(ml_dtypes.uint2): np.uint8,
}
_SMALL_FLOATS = tuple(np.dtype(d) for d in (ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn))
"""Floats of fewer than 8 bits: onward holds them in float8_e4m3fn."""


def to_torch_value(value: Any) -> Any:
    """A case's input as onward takes it; lists and absent optionals stay what they are."""
    if value is None:
        return None
    if isinstance(value, list):
        return [to_torch_value(item) for item in value]
    array = np.asarray(value)
    if array.dtype in _SMALL_FLOATS:
        array = array.astype(ml_dtypes.float8_e4m3fn)
    if array.dtype in _VIEWS:
        view, dtype = _VIEWS[array.dtype]
        return torch.from_numpy(np.array(array, order="C").view(view)).view(dtype)
    if array.dtype in _UNPACKED:
        array = array.astype(_UNPACKED[array.dtype])
    return torch.from_numpy(np.array(array, order="C"))


def _to_numpy(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [_to_numpy(item) for item in value]
    tensor = torch.as_tensor(value).detach()
    if tensor.dtype in (torch.bfloat16, *(d for _, d in _VIEWS.values())):
        return tensor.to(torch.float32).numpy()
    return tensor.numpy()


def compare(expected: Any, actual: Any, rtol: float, atol: float, where: str) -> None:
    """Raises AssertionError where two results differ in structure, shape, type or beyond the tolerance."""
    if expected is None:
        assert actual is None, f"{where}: expected an absent optional"
        return
    if isinstance(expected, list):
        assert isinstance(actual, list), f"{where}: expected a sequence, got {type(actual)}"
        assert len(expected) == len(actual), f"{where}: {len(actual)} elements, expected {len(expected)}"
        for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
            compare(left, right, rtol, atol, f"{where}[{index}]")
        return
    array = np.asarray(expected)
    assert actual.shape == array.shape, f"{where}: shape {actual.shape}, expected {array.shape}"
    if array.dtype in _VIEWS or array.dtype in _SMALL_FLOATS:
        # The standard's own runner allows two bfloat16 ULPs.
        rtol = max(rtol, 2**-6) if array.dtype == ml_dtypes.bfloat16 else rtol
        array = array.astype(np.float32)
    elif array.dtype in _UNPACKED:
        array = array.astype(_UNPACKED[array.dtype])
    assert actual.dtype == array.dtype, f"{where}: type {actual.dtype}, expected {array.dtype}"
    np.testing.assert_allclose(actual, array, rtol=rtol, atol=atol, err_msg=where)


def net_of(case: Case) -> OnnxModule:
    """The case's network; as ONNX lays images where channels-last convolutions miss the standard's bounds."""
    context = ExecutionContext(channels_last_images=case.name not in CHANNELS_FIRST)
    return OnnxModule(onward.to_torch(case.model).graph, context=context)


def check(case: Case) -> None:
    """Runs every data set of a case; raises on the first difference."""
    net = net_of(case)
    for inputs, outputs in case.data_sets:
        with torch.no_grad():
            results = net.run(tuple(to_torch_value(value) for value in inputs), net.tensors_by_name())
        assert len(results) == len(outputs), f"{len(results)} outputs, expected {len(outputs)}"
        for index, (expected, actual) in enumerate(zip(outputs, results, strict=True)):
            compare(expected, _to_numpy(actual), case.rtol, case.atol, f"output {index}")
