"""How much of the ONNX standard each library passes: `python -m benchmarks.coverage [--match TEXT]`.

With `--gradients` it counts instead the gradients of onward that equal finite differences in float64; with
`--architectures` it compares the gradients of networks of many families with those of their exports, with `--steps` the
training steps of their device bundles in onnxruntime (see `benchmarks.step_coverage`).

The backend tests of the onnx package, run against onward, onnxruntime and onnx2torch by the same runner with the same
tolerances. "Tensor cases" leave out the cases whose inputs or outputs are strings, and the domain ai.onnx.ml.
onnx2torch is optional (`pip install --no-deps onnx2torch`); torchvision, which it asks for, is stubbed out, so its
RoiAlign and NonMaxSuppression cases count as failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from tests.conformance.cases import KINDS, Case, load_cases
from tests.conformance.checking import check, compare, to_torch_value
from tests.conformance.gradients import check_all

from benchmarks.step_coverage import compare_all_steps

_TYPE_CODES = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, onnx.TensorProto.BFLOAT16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, onnx.TensorProto.FLOAT8E4M3FN),
    np.dtype(ml_dtypes.float8_e4m3fnuz): (np.uint8, onnx.TensorProto.FLOAT8E4M3FNUZ),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, onnx.TensorProto.FLOAT8E5M2),
    np.dtype(ml_dtypes.float8_e5m2fnuz): (np.uint8, onnx.TensorProto.FLOAT8E5M2FNUZ),
}


def is_tensor_case(case: Case) -> bool:
    """No strings, and not the domain of classical machine learning."""
    if any(o.domain == "ai.onnx.ml" for o in case.model.opset_import):
        return False
    values = [*case.model.graph.input, *case.model.graph.output]
    return not any(_element_type(v.type) == onnx.TensorProto.STRING for v in values)


def _element_type(kind: onnx.TypeProto) -> int:
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        return kind.tensor_type.elem_type
    if which in ("sequence_type", "optional_type"):
        return _element_type(getattr(kind, which).elem_type)
    return 0


def check_onnxruntime(case: Case) -> None:
    """Through an inference session; types that numpy lacks go in and come out as raw bits."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(case.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    for inputs, outputs in case.data_sets:
        feeds = {name: _ort_value(onnxruntime, value) for name, value in zip(names, inputs, strict=False)}
        feeds = {name: value for name, value in feeds.items() if value is not None}
        if all(isinstance(value, onnxruntime.OrtValue) for value in feeds.values()):
            results = [_from_ort(r, o) for r, o in zip(session.run_with_ort_values(None, feeds), outputs, strict=True)]
        else:
            results = session.run(
                None, {k: v.numpy() if isinstance(v, onnxruntime.OrtValue) else v for k, v in feeds.items()}
            )
        for index, (expected, actual) in enumerate(zip(outputs, results, strict=True)):
            compare(expected, actual, case.rtol, case.atol, f"output {index}")


def _ort_value(onnxruntime: Any, value: Any) -> Any:
    if value is None or isinstance(value, list):
        return value
    array = np.asarray(value)
    if array.dtype in _TYPE_CODES:
        bits, code = _TYPE_CODES[array.dtype]
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.array(array).view(bits), code)
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.array(array, order="C"))


def _from_ort(value: Any, expected: Any) -> Any:
    if not value.is_tensor():
        return value._ortvalue.to_python_obj() if hasattr(value._ortvalue, "to_python_obj") else value.numpy()
    array = np.asarray(expected)
    if array.dtype in _TYPE_CODES:
        raw = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
        return raw.to(torch.float32).numpy()
    return value.numpy()


def make_onnx2torch_check() -> Callable[[Case], None] | None:
    """A checker over onnx2torch, or None where it is not installed."""
    stub = types.ModuleType("torchvision")
    stub.ops = types.ModuleType("torchvision.ops")  # type: ignore[attr-defined]
    for name in ("roi_align", "nms", "batched_nms", "deform_conv2d"):
        setattr(stub.ops, name, None)
    sys.modules.setdefault("torchvision", stub)
    sys.modules.setdefault("torchvision.ops", stub.ops)
    try:
        convert = importlib.import_module("onnx2torch").convert
    except ImportError:
        return None

    def run(case: Case) -> None:
        net = convert(case.model)
        for inputs, outputs in case.data_sets:
            with torch.no_grad():
                results = net(*(to_torch_value(value) for value in inputs))
            results = results if isinstance(results, list | tuple) and len(outputs) > 1 else [results]
            for index, (expected, actual) in enumerate(zip(outputs, results, strict=True)):
                actual = actual.numpy() if isinstance(actual, torch.Tensor) else actual
                compare(expected, actual, case.rtol, case.atol, f"output {index}")

    return run


def count_gradients(match: str) -> None:
    """Prints how many gradients equal finite differences, by domain, and which do not."""
    result = check_all(match)
    print(f"{'gradients checked':26} {'operators':>10} {'versions':>10} {'combinations':>13}")
    for domain in sorted({one[0] for one in result.checked}):
        here = [one for one in result.checked if one[0] == domain]
        operators, versions = len({one[1] for one in here}), len({one[1:3] for one in here})
        print(f"{domain or 'ai.onnx':26} {operators:10} {versions:10} {len(here):13}")
    operators, versions = len({one[:2] for one in result.checked}), len({one[:3] for one in result.checked})
    print(f"{'all':26} {operators:10} {versions:10} {len(result.checked):13}")
    print(f"lowering functions: {len(result.lowerings)}; failed: {', '.join(result.failed) or 'none'}")


def compare_architectures(match: str) -> None:
    """Prints for every architecture how far its export's gradients are from the module's, relative to the largest."""
    from tests.lowering.architectures import ARCHITECTURES
    from tests.lowering.test_architectures import RELATIVE, compare

    differences: dict[str, float] = {}
    for one in ARCHITECTURES:
        if match in one.name:
            try:
                differences[one.name] = compare(one)
                print(f"{one.name:28} {differences[one.name]:8.1e}", flush=True)
            except Exception as error:
                print(f"{one.name:28} {type(error).__name__}: {str(error)[:150]}", flush=True)
    worst = max(differences, key=differences.__getitem__, default="none")
    print(f"{len(differences)} equal within {RELATIVE:g}; the largest is {worst}, {differences.get(worst, 0):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="")
    parser.add_argument("--gradients", action="store_true", help="count checked gradients instead")
    parser.add_argument("--architectures", action="store_true", help="compare gradients of exported networks instead")
    parser.add_argument("--steps", action="store_true", help="compare training steps of their device bundles instead")
    parser.add_argument("--again", action="store_true", help="with --steps: also those that were compared already")
    options = parser.parse_args()
    if options.steps:
        compare_all_steps(options.match, options.again)
        return
    if options.architectures:
        compare_architectures(options.match)
        return
    if options.gradients:
        count_gradients(options.match)
        return
    checks: dict[str, Callable[[Case], None] | None] = {
        "onward": check,
        "onnxruntime": check_onnxruntime,
        "onnx2torch": make_onnx2torch_check(),
    }
    passed: dict[str, Counter[str]] = {name: Counter() for name in checks}
    total: Counter[str] = Counter()
    for kind in KINDS:
        for case in load_cases(kind, options.match):
            groups = ["all", kind] + (["tensor cases"] if is_tensor_case(case) else [])
            total.update(groups)
            for name, one in checks.items():
                if one is None:
                    continue
                try:
                    one(case)
                except Exception:
                    continue
                passed[name].update(groups)
    names = [name for name, one in checks.items() if one is not None]
    print(f"{'':20} {'cases':>7}" + "".join(f"{name:>13}" for name in names))
    for group in ("tensor cases", "all", *(kind for kind in KINDS if total[kind])):
        print(f"{group:20} {total[group]:7}" + "".join(f"{passed[name][group]:13}" for name in names))


if __name__ == "__main__":
    main()
