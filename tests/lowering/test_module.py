"""The module of an ONNX graph: any name, inputs by place and name, torch's own verbs, words for mistakes, memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.errors import ModelError, NodeError
from tests.initializers import stored_arrays

FLOAT = TensorProto.FLOAT
NAMES = (
    "plain", "train", "forward", "weights", "graph", "program", "training", "device", "input_dtypes", "_parameters",
    "a", "a.b", "a..b", ".b", "b.", ".", "a/b", "/model/layer.0/w", "x.training", "x.train", "_modules.c", "__class__",
    "self", "torch", "lambda", "in", "None", "inf", "float", "v_lambda", "0", "12.5", "²", "é", "two words", "a-b",
    "a_b",
)  # fmt: skip
"""Names with dots, slashes and empty parts, attributes of modules, words of Python, and what is no identifier."""


def sum_of(names: tuple[str, ...], input_name: str = "x.in", output_name: str = "y") -> onnx.ModelProto:
    values = {name: np.full(3, 2.0**-i, np.float32) for i, name in enumerate(names)}
    steps = [*(f"step{i}" for i in range(len(names) - 1)), output_name]
    nodes = [
        helper.make_node("Add", [before, name], [after])
        for before, name, after in zip([input_name, *steps], names, steps, strict=False)
    ]
    graph = helper.make_graph(
        nodes,
        "sum",
        [helper.make_tensor_value_info(input_name, FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info(output_name, FLOAT, ["batch", 3])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


# --------------------------------------------------------------------------------------------------------------- names


def test_any_name_is_a_weight() -> None:
    net = onward.to_torch(sum_of(NAMES))
    assert tuple(net.weights) == NAMES
    assert set(net.state_dict()) == set(NAMES)
    assert set(dict(net.named_parameters())) == set(NAMES)
    assert torch.allclose(net(torch.zeros(2, 3)), torch.full((2, 3), sum(2.0**-i for i in range(len(NAMES)))))
    for i, name in enumerate(NAMES):
        assert net.weights[name][0] == 2.0**-i
    with pytest.raises(KeyError):
        net.weights["nothing"]
    with pytest.raises(KeyError):
        net.weights["a.nothing"]
    assert "nothing" not in net.weights
    assert "a..b" in net.weights
    assert repr(net.weights).startswith("weights(plain, train, ")


def test_a_state_dict_goes_back_and_forth() -> None:
    net, other = onward.to_torch(sum_of(NAMES)), onward.to_torch(sum_of(NAMES))
    with torch.no_grad():
        for weight in other.weights.values():
            weight.zero_()
    assert not other(torch.zeros(1, 3)).any()
    result = other.load_state_dict(net.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(other(torch.zeros(1, 3)), net(torch.zeros(1, 3)))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**net.state_dict(), ".c": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({name: value for name, value in net.state_dict().items() if name != ".b"})


def test_running_statistics_are_in_the_state_dict_and_constants_are_not() -> None:
    net = normalizing()
    assert set(net.state_dict()) == {"s", "b", "m", "v"}
    assert {name for name, _ in net.named_buffers()} >= {"m", "v"}


@pytest.mark.parametrize("name", ["training", "device", "self", "x", "class", "torch"])
def test_any_name_is_an_input(name: str) -> None:
    net = onward.to_torch(sum_of(("w",), input_name=name))
    assert torch.equal(net(torch.zeros(1, 3)), torch.ones(1, 3))
    if name != "self":
        assert torch.equal(net(**{name: torch.zeros(1, 3)}), torch.ones(1, 3))


def test_torch_moves_modules_with_such_names() -> None:
    net = onward.to_torch(sum_of(NAMES))
    assert net.train() is net
    assert net.training
    assert not net.eval().training
    assert net.to(torch.float64).weights["training"].dtype is torch.float64
    assert len(list(net.parameters())) == len(NAMES)
    few = onward.to_torch(sum_of(("training", "a", "a.b", "torch")))
    assert torch.equal(
        torch.compile(few, fullgraph=True, backend="aot_eager")(torch.zeros(1, 3)), few(torch.zeros(1, 3))
    )


# ---------------------------------------------------------------------------------------------------- inputs, outputs


def two_inputs(outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="embed"),
        helper.make_node("MatMul", ["e", "x"], ["y"], name="product"),
        helper.make_node("Neg", ["y"], ["z"], name="minus"),
    ]
    graph = helper.make_graph(
        nodes,
        "two",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
            helper.make_tensor_value_info("x", FLOAT, [3, "m"]),
        ],
        [helper.make_tensor_value_info(name, FLOAT, ["n", "m"]) for name in outputs],
        [numpy_helper.from_array(np.arange(15, dtype=np.float32).reshape(5, 3) / 10, "table")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_inputs_by_place_and_by_name() -> None:
    net = onward.to_torch(two_inputs())
    ids, x = torch.tensor([1, 4]), torch.randn(3, 2)
    expected = net.weights["table"][ids] @ x
    for result in (net(ids, x), net(ids, x=x), net(x=x, ids=ids), net(ids.numpy(), x.numpy()), net([1, 4], x)):
        assert torch.equal(result, expected)


def test_one_output_is_a_tensor_several_are_a_tuple() -> None:
    ids, x = torch.tensor([1, 4]), torch.randn(3, 2)
    assert isinstance(onward.to_torch(two_inputs())(ids, x), torch.Tensor)
    results = onward.to_torch(two_inputs(("z", "y")))(ids, x)
    assert isinstance(results, tuple)
    assert torch.equal(results[0], -results[1])


IDS, X = torch.tensor([1, 4]), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("inputs", "named", "words"),
    [
        ((IDS,), {}, "the model takes 2 inputs; missing: x."),
        ((), {}, "the model takes 2 inputs; missing: ids, x."),
        ((IDS, X, X), {}, "the model takes 2 inputs (ids, x); 3 were given."),
        ((IDS,), {"X": X}, "the model has no input 'X'; it has: ids, x."),
        ((IDS, X), {"x": X}, "input 'x' was given twice, by place and by name."),
        ((IDS.int(), X), {}, "input 'ids' is int32; the model expects int64. Convert it with .to(torch.int64)."),
        ((IDS, X.double()), {}, "input 'x' is float64; the model expects float32. Convert it with .to(torch.float32)."),
        ((IDS, np.zeros((3, 2))), {}, "input 'x' is float64; the model expects float32."),
        ((IDS.float(), X), {}, "input 'ids' is float32; the model expects int64."),
    ],
)
def test_inputs_that_do_not_fit(inputs: tuple[Any, ...], named: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        onward.to_torch(two_inputs())(*inputs, **named)
    assert words in str(caught.value)


def test_a_failing_node_is_named_with_its_operator_and_the_shapes_it_got() -> None:
    with pytest.raises(NodeError) as caught:
        onward.to_torch(two_inputs())(IDS, torch.zeros(4, 2))
    said = str(caught.value)
    assert said.startswith("node 'product' (MatMul) failed on inputs ([2, 3] float32, [4, 2] float32): ")
    assert "While executing" not in said
    with pytest.raises(NodeError, match=r"node 'embed' \(Gather\) failed on inputs \(\[5, 3\] float32, \[2\] int64\)"):
        onward.to_torch(two_inputs())(torch.tensor([1, 99]), X)


# ------------------------------------------------------------------------------------------------------- torch's verbs


def normalizing() -> onward.lowering.module.OnnxModule:  # type: ignore[name-defined]
    values = {"s": np.ones(4), "b": np.zeros(4), "m": np.zeros(4), "v": np.ones(4)}
    nodes = [
        helper.make_node("BatchNormalization", ["x", *values], ["n"], name="norm"),
        helper.make_node("Dropout", ["n"], ["d"], name="drop"),
        helper.make_node("Mul", ["d", "two"], ["y"], name="double"),
    ]
    graph = helper.make_graph(
        nodes,
        "normalizing",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 4])],
        [
            *(numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()),
            numpy_helper.from_array(np.array([2.0], np.float32), "two"),
        ],
    )
    return onward.to_torch(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))


def test_modes() -> None:
    """Evaluation repeats itself and changes nothing; training drops and updates the running statistics."""
    net, x = normalizing(), torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    assert not net.training
    assert torch.equal(net(x), net(x))
    assert not net.get_buffer("m").any()
    net.train()
    assert (net(x) == 0).sum() > 64
    torch.testing.assert_close(net.get_buffer("m"), 0.1 * x.mean(0))
    torch.testing.assert_close(net.get_buffer("v"), 0.9 + 0.1 * x.var(0, unbiased=False))
    assert torch.equal(net.eval()(x), net(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moved_to_another_type(dtype: torch.dtype) -> None:
    net, x = normalizing(), torch.randn(8, 4)
    expected = net(x)
    net.to(dtype)
    assert {tensor.dtype for tensor in net.state_dict().values()} == {dtype}
    result = net(x.to(dtype))
    assert result.dtype is dtype
    torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(ModelError, match="input 'x' is float16; the model expects float32"):
        net(x.half())


def test_a_deep_copy_is_a_network_of_its_own(tmp_path: Path) -> None:
    net = onward.to_torch(sum_of(("a", "a.b", "weights")))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.weights["a"].fill_(5)
    assert net.weights["a"][0] == 1
    assert other(torch.zeros(1, 3))[0, 0] == net(torch.zeros(1, 3))[0, 0] + 4
    onward.export(other, tmp_path / "copy.onnx")
    stored = stored_arrays(tmp_path / "copy.onnx")
    assert stored["a"][0] == 5


def test_a_plain_training_loop() -> None:
    """torch's own optimizer over `net.weights.values()` finds the least squares that numpy finds."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((50, 3)).astype(np.float32), random.standard_normal((50, 2)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in (("w", (3, 2)), ("b", (2,)))],
    )
    net = onward.to_torch(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)).train()
    optimizer = torch.optim.SGD(net.weights.values(), lr=0.3)
    for _ in range(200):
        optimizer.zero_grad()
        (net(torch.from_numpy(x)) - torch.from_numpy(y)).square().mean().backward()
        optimizer.step()
    solution, *_ = np.linalg.lstsq(np.c_[x, np.ones(50)], y, rcond=None)
    np.testing.assert_allclose(net.weights["w"].detach(), solution[:3], atol=1e-5)
    np.testing.assert_allclose(net.weights["b"].detach(), solution[3], atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- memory

MEASURE = """
import sys, threading, time
import onward, onward.artifacts.inference_model, onward.lowering.conversion
def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.base = self.peak = anonymous_bytes()
        self.done = False
    def run(self):
        while not self.done:
            self.look()
            time.sleep(0.001)
    def look(self):
        self.peak = max(self.peak, anonymous_bytes())
peak = Peak()
peak.start()
net = onward.to_torch(sys.argv[1])
peak.look()  # on a busy machine the thread may be late
loaded, peak.peak = peak.peak, 0
onward.export(net, sys.argv[2])
peak.look()
peak.done = True
print(loaded - peak.base, peak.peak - peak.base)
"""


def test_memory_of_reading_and_writing_is_the_weights_and_little_more(tmp_path: Path) -> None:
    """400 MB of external weights: at most 1.5 times as much, at the peak of `to_torch` and of `export`.

    Measured is anonymous memory (RssAnon), sampled every millisecond: what the process asked for. The resident size
    that `ru_maxrss` gives also counts pages of the mapped file, which are the kernel's cache and go when it needs them.
    """
    size, count = 3600, 8
    names = [f"w{i}" for i in range(count)]
    steps = ["x", *(f"h{i}" for i in range(count - 1)), "y"]
    nodes = [helper.make_node("MatMul", [steps[i], names[i]], [steps[i + 1]]) for i in range(count)]
    stored = []
    with (tmp_path / "weights.bin").open("wb") as file:
        for name in names:
            tensor = onnx.TensorProto(name=name, data_type=FLOAT, dims=[size, size], data_location=1)
            places = {"location": "weights.bin", "offset": file.tell(), "length": 4 * size * size}
            tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in places.items())
            stored.append(tensor)
            file.write(np.random.default_rng(len(stored)).random((size, size), dtype=np.float32).tobytes())
    infos = [helper.make_tensor_value_info(name, FLOAT, ["n", size]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "large", infos[:1], infos[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model.onnx"), str(tmp_path / "trained.onnx")]
    reading, writing = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    weights = 4 * size * size * count
    assert weights <= reading <= 1.5 * weights
    assert weights <= writing <= 1.5 * weights
    assert (tmp_path / "trained.onnx.data").stat().st_size == weights
