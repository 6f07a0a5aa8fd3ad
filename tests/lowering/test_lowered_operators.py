"""The list of operators with a lowering is that of the registry, and reading it imports no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from onward.lowering.lowered_operators import FIRST_VERSIONS, has_lowering
from onward.lowering.registry import all_lowerings, find_lowering


def test_the_list_is_that_of_the_registry() -> None:
    registered: dict[tuple[str, str], int] = {}
    for one in all_lowerings():
        if one.domain == "onward.parallel":
            continue  # written by a layout into a graph that was accepted; registered where layouts are imported
        key = (one.domain, one.op_type)
        registered[key] = min(one.since, registered.get(key, one.since))
    wrong = {key: registered.get(key) for key in set(registered.items() ^ FIRST_VERSIONS.items()) for key in [key[0]]}
    assert not wrong, f"write in lowered_operators.py (None: take it out): {wrong}"


def test_an_operator_is_computed_from_its_first_version_on() -> None:
    for domain, op_type, version in (("", "Swish", 23), ("", "Swish", 24), ("", "Relu", 1), ("elsewhere", "Relu", 1)):
        assert has_lowering(domain, op_type, version) == (find_lowering(domain, op_type, version) is not None)


def test_a_model_is_described_without_torch(tmp_path: Path) -> None:
    """`onward inspect` reads a graph and computes nothing; torch takes longer to import than that does."""
    program = (
        "import sys, onnx; from onward.cli import main; "
        'model = onnx.parser.parse_model(\'<ir_version: 8, opset_import: ["": 18]> g (float[n, 2] x) => '
        "(float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { h = MatMul(x, w) y = Relu(h) }'); "
        "onnx.save(model, sys.argv[1]); "
        "code = main(['inspect', sys.argv[1]]); assert not code, code; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "m.onnx")], check=True, capture_output=True)
