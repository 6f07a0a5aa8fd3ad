"""Weights in external data are read one at a time: turning a model into a torch module costs its weights once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

SIDE = 3500
LAYERS = 6
WEIGHT_BYTES = LAYERS * SIDE * SIDE * 4
BOUND = 1.6
"""Peak growth allowed, in sizes of the weights: the module itself, and the mapped pages of one weight at a time."""

PROGRAM = """
import onward
from onward.graph.reading.model_file import read_model
from onward.lowering.registry import find_lowering
read_model({small!r})  # whatever is imported on the first call
find_lowering("", "MatMul", 13)  # loads the operators

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts from here
before = kilobytes("VmRSS")
{action}
print((kilobytes("VmHWM") - before) * 1024)
"""


def _write(path: Path, side: int = SIDE) -> None:
    """A chain of matrix products, its first weight read twice; 294 MB of random weights in one file at full size."""
    nodes, tensors = [], []
    with open(path.with_suffix(".data"), "wb") as file:
        rng = np.random.default_rng(0)
        for layer in range(LAYERS):
            tensor = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[side, side])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", path.with_suffix(".data").name), ("offset", str(file.tell()))):
                tensor.external_data.add(key=key, value=value)
            file.write(rng.standard_normal((side, side), dtype=np.float32).tobytes())
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"h{layer + 1}"]))
    nodes.append(helper.make_node("Add", ["h0", "w0"], ["masked"]))
    ends = [("h0", ["N", side]), (f"h{LAYERS}", ["N", side]), ("masked", ["N", side])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], tensors)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]).SerializeToString())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.onnx"
    _write(path)
    return path


def _peak_growth_bytes(model: Path, action: str) -> int:
    """Growth of the process's largest resident set, file pages included: the strictest of the kernel's measures."""
    small = model.with_name("small.onnx")
    _write(small, side=4)
    code = PROGRAM.format(action=action, small=str(small))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def test_reading_touches_no_weights(model: Path):
    """Reading and checking take under 1% of the weights' size."""
    growth = _peak_growth_bytes(model, f"m = read_model({str(model)!r})")
    assert growth < 0.01 * WEIGHT_BYTES


def test_to_torch_costs_the_weights_once(model: Path):
    growth = _peak_growth_bytes(model, f"net = onward.to_torch({str(model)!r})")
    assert WEIGHT_BYTES < growth < BOUND * WEIGHT_BYTES, f"{growth / WEIGHT_BYTES:.2f} times the weights"
