"""What `onward.export` writes: the user's own graph, the network's numbers in ONNX Runtime, entire files or none."""

from __future__ import annotations

import copy
import errno
import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.errors import StorageError
from onward.graph.losses.spec import LossSpec
from onward.graph.nodes.rearrangement import Rearrangement
from onward.graph.repair.split_weights import Tie
from onward.graph.training_graph import make_training_graph
from onward.graph.writing import model_saving
from onward.lowering.module import OnnxModule
from onward.models import create_model
from tests.initializers import stored_arrays
from tests.models import test_bert, test_gpt2

FLOAT = TensorProto.FLOAT


def run(path: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of a file in ONNX Runtime, after the checker found nothing."""
    onnx.checker.check_model(path, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {value.name: tensor.numpy() for value, tensor in zip(session.get_inputs(), inputs, strict=False)}
    return [torch.from_numpy(np.asarray(array)) for array in session.run(None, feeds)]


def outputs_of(net: OnnxModule, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        results = net.eval()(*inputs)
    return results if isinstance(results, tuple) else (results,)


def assert_file_computes_like(net: OnnxModule, path: Path, *inputs: torch.Tensor) -> None:
    """To 1e-5 of the largest value of an output."""
    expected, actual = outputs_of(net, *inputs), run(path, *inputs)
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= 1e-5 * float(one.abs().max())


def train(net: OnnxModule, *inputs: torch.Tensor, steps: int = 3) -> None:
    """A few steps of Adam, in training mode, towards outputs of -1 and +1."""
    torch.manual_seed(0)
    before = {name: weight.detach().clone() for name, weight in net.weights.items()}
    optimizer = torch.optim.Adam(net.weights.values(), lr=1e-2)
    net.train()
    for _ in range(steps):
        results = net(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(
            (r - torch.sign(torch.arange(r.numel()).reshape(r.shape) % 2 - 0.5)).square().mean() for r in results
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    assert all(not torch.equal(before[name], weight) for name, weight in net.weights.items() if weight.grad is not None)


def move_weights(net: OnnxModule, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.weights.values():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator).to(weight.dtype))


def array(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def model_of(
    nodes: list[onnx.NodeProto],
    initializers: dict[str, np.ndarray],
    shape: tuple[Any, ...] = ("batch", 4),
    outputs: tuple[str, ...] = ("y",),
    opset: int = 18,
    ir_version: int = 8,
    **options: Any,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version, **options)
    return onnx.shape_inference.infer_shapes(model)


def two_layers() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="first"),
        helper.make_node("Tanh", ["h"], ["t"], name="bend"),
        helper.make_node("MatMul", ["t", "w2"], ["u"], name="second"),
        helper.make_node("Add", ["u", "b"], ["y"], name="shift"),
    ]
    # Above 256 bytes each, so that they become external where a model has external data.
    return model_of(nodes, {"w1": array(4, 32), "w2": array(32, 32, seed=1), "b": array(32, seed=2)})


# ------------------------------------------------------------------------------------------------ the user's own graph


def with_everything() -> onnx.ModelProto:
    """A model with one of everything that a file can say in addition to computing."""
    model = two_layers()
    model.graph.node[0].doc_string = "what the first node is for"
    helper.set_model_props(model, {"author": "someone", "empty": ""})
    model.doc_string, model.domain, model.model_version = "a model", "org.example", 7
    model.producer_name, model.producer_version = "somebody's tool", "1.2"
    model.graph.doc_string = "a graph"
    model.graph.input[0].doc_string = "an input"
    model.graph.initializer[0].doc_string = "a weight"
    model.graph.initializer.append(helper.make_tensor("unused", TensorProto.INT64, [3], [1, 2, 3]))
    body = [helper.make_node("Mul", ["a", "a"], ["b"])]
    model.functions.append(helper.make_function("local", "square", ["a"], ["b"], body, [helper.make_opsetid("", 18)]))
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.graph.node.append(helper.make_node("square", ["y"], ["z"], name="call", domain="local"))
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, ["batch", 32]))
    model.ir_version = 10
    for part in (
        model.graph,
        model.graph.node[1],
        model.graph.input[0],
        model.graph.initializer[0],
        model.functions[0],
    ):
        entry = part.metadata_props.add()
        entry.key, entry.value = "who", "knows"
    info = model.training_info.add()
    info.algorithm.name = "an algorithm"
    info.algorithm.node.append(helper.make_node("Identity", ["w1"], ["w1_new"]))
    info.update_binding.add().key = "w1"
    info.update_binding[0].value = "w1_new"
    return model


def as_stored(message: Any) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def test_untrained_export_is_the_same_model(tmp_path: Path) -> None:
    model = with_everything()
    onnx.save(model, tmp_path / "model.onnx")
    onward.export(onward.to_torch(tmp_path / "model.onnx"), tmp_path / "again.onnx")
    again = onnx.load(tmp_path / "again.onnx")
    for field in ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
        assert getattr(again, field) == getattr(model, field), field
    assert {o.domain: o.version for o in again.opset_import} == {o.domain: o.version for o in model.opset_import}
    for field in ("metadata_props", "functions", "training_info"):
        assert list(map(as_stored, getattr(again, field))) == list(map(as_stored, getattr(model, field))), field
    assert again.graph.name == model.graph.name
    assert again.graph.doc_string == model.graph.doc_string
    for field in ("node", "input", "output", "metadata_props"):
        assert list(map(as_stored, getattr(again.graph, field))) == list(map(as_stored, getattr(model.graph, field)))
    # onnx-ir also writes types and shapes of initializers, which say nothing new; all others are the source's.
    initializers = {tensor.name for tensor in model.graph.initializer}
    infos = {v.name: as_stored(v) for v in again.graph.value_info if v.name not in initializers}
    assert infos == {v.name: as_stored(v) for v in model.graph.value_info if v.name != "y"}  # an output says it itself
    assert [t.name for t in again.graph.initializer] == [t.name for t in model.graph.initializer]
    for one, other in zip(again.graph.initializer, model.graph.initializer, strict=True):
        assert (one.data_type, one.dims) == (other.data_type, other.dims)
        assert numpy_helper.to_array(one).tobytes() == numpy_helper.to_array(other).tobytes()
    assert as_stored(model) == as_stored(with_everything()), "the model that was given must stay as it was"


def test_export_keeps_what_a_trained_weight_says_beside_its_numbers(tmp_path: Path) -> None:
    onnx.save(with_everything(), tmp_path / "model.onnx")
    net = onward.to_torch(tmp_path / "model.onnx")
    move_weights(net)
    onward.export(net, tmp_path / "again.onnx")
    again = onnx.load(tmp_path / "again.onnx")
    weight = again.graph.initializer[0]
    assert np.array_equal(numpy_helper.to_array(weight), net.weights["w1"].detach().numpy())
    assert weight.doc_string == "a weight"
    assert [(p.key, p.value) for p in weight.metadata_props] == [("who", "knows")]


# ------------------------------------------------------------------------------------------------ the reference models


def images(size: int, channels: int = 1) -> torch.Tensor:
    return torch.randn(3, channels, size, size, generator=torch.Generator().manual_seed(0))


def tokens(below: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, below, (2, 16), generator=torch.Generator().manual_seed(seed))


REFERENCES: dict[str, Callable[[], tuple[ir.Model, tuple[torch.Tensor, ...]]]] = {
    "gpt2": lambda: (create_model("gpt2", dropout=0.1, **test_gpt2.SMALL), (tokens(61),)),
    "bert": lambda: (
        create_model("bert", dropout=0.1, **test_bert.SMALL),
        (tokens(61), tokens(2), torch.ones(2, 16, dtype=torch.int64)),
    ),
    "squeezenet": lambda: (
        create_model("squeezenet", image_size=16, channels=1, classes=10, batch_norm=True),
        (images(16),),
    ),
    "mnist": lambda: (create_model("mnist", variant="conv", image_size=9, dropout=0.1), (images(9),)),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_trained_reference_models_compute_the_same_in_onnxruntime(tmp_path: Path, name: str) -> None:
    model, inputs = REFERENCES[name]()
    before = ir.to_proto(model)
    net = onward.to_torch(model)
    statistics = {state: net.tensors_by_name()[state].clone() for state in net.graph.states}
    assert bool(statistics) == (name in ("squeezenet", "mnist"))
    train(net, *inputs)
    assert all(not torch.equal(value, net.tensors_by_name()[state]) for state, value in statistics.items())
    onward.export(net, tmp_path / "trained.onnx")
    assert_file_computes_like(net, tmp_path / "trained.onnx", *inputs)
    after = onnx.load(tmp_path / "trained.onnx")
    assert [n.name for n in after.graph.node] == [n.name for n in before.graph.node]
    stored = stored_arrays(after)
    for name in (*net.graph.weights, *net.graph.states):
        assert np.array_equal(stored[name], net.tensors_by_name()[name].detach().numpy()), name
    for tensor in before.graph.initializer:
        if tensor.name not in (*net.graph.weights, *net.graph.states):
            assert numpy_helper.to_array(tensor).tobytes() == stored[tensor.name].tobytes()


# ---------------------------------------------------------------------------------------------- where weights are kept


def test_weights_as_constant_nodes(tmp_path: Path) -> None:
    """Stored as a tensor and as a list of floats; both keep their node."""
    nodes = [
        helper.make_node("Constant", [], ["w"], name="w_node", value=numpy_helper.from_array(array(4, 3), "inner")),
        helper.make_node("Constant", [], ["b"], name="b_node", value_floats=[0.5, 1.5, 2.5]),
        helper.make_node("MatMul", ["x", "w"], ["u"], name="product"),
        helper.make_node("Add", ["u", "b"], ["y"], name="shift"),
    ]
    net = onward.to_torch(model_of(nodes, {}))
    assert set(net.weights) == {"w", "b"}
    move_weights(net)
    onward.export(net, tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx").graph
    assert [node.name for node in written.node] == ["w_node", "b_node", "product", "shift"]
    assert not written.initializer
    assert_file_computes_like(net, tmp_path / "trained.onnx", torch.randn(2, 4))


@pytest.mark.parametrize("ir_version", [3, 8])
def test_weights_as_fills(tmp_path: Path, ir_version: int) -> None:
    """A `ConstantOfShape` that training gave many values becomes an initializer of its name."""
    nodes = [
        helper.make_node("ConstantOfShape", ["sizes"], ["w"], value=helper.make_tensor("v", FLOAT, [1], [0.25])),
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
    ]
    model = model_of(nodes, {"sizes": np.array([4, 3])}, opset=9, ir_version=ir_version)
    if ir_version == 3:
        model.graph.input.append(helper.make_tensor_value_info("sizes", TensorProto.INT64, [2]))
    net = onward.to_torch(model)
    assert tuple(net.weights) == ("w",)
    move_weights(net)
    onward.export(net, tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx").graph
    assert [node.name for node in written.node] == ["product"]
    assert "w" in {tensor.name for tensor in written.initializer}
    assert_file_computes_like(net, tmp_path / "trained.onnx", torch.randn(2, 4))


def test_initializers_that_are_inputs_too(tmp_path: Path) -> None:
    """Until IR version 4 they all were; the trained model still lists them."""
    model = two_layers()
    model.ir_version = 3
    model.opset_import[0].version = 8
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, FLOAT, tensor.dims))
    net = onward.to_torch(model)
    move_weights(net)
    onward.export(net, tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx")
    assert [value.name for value in written.graph.input] == ["x", "w1", "w2", "b"]
    assert written.ir_version == 3
    assert_file_computes_like(net, tmp_path / "trained.onnx", torch.randn(2, 4))


def test_a_weight_that_two_layers_share_is_written_once_untied_it_is_written_twice(tmp_path: Path) -> None:
    """A table of zeros that an exporter merged is untied into weights of their own, which differ after training.

    With one matrix before both it looks like the bias of a layer that is called twice, unless the user knows better.
    """
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node("Add", ["h", "zeros"], ["a"], name="first_bias"),
        helper.make_node("MatMul", ["a", "w"], ["i"], name="second"),
        helper.make_node("Add", ["i", "zeros"], ["y"], name="second_bias"),
    ]
    model = model_of(nodes, {"w": array(4, 4), "zeros": np.zeros(4, np.float32)}, producer_name="pytorch")
    notes = onward.to_torch(model).graph.notes
    assert any("list 'zeros' in training.untied_weights" in note for note in notes)
    net = onward.to_torch(model, untied_weights=["zeros"])
    biases = [name for name in net.weights if name != "w"]
    assert len(biases) == 2
    train(net, torch.randn(5, 4))
    assert not torch.equal(net.weights[biases[0]], net.weights[biases[1]])
    onward.export(net, tmp_path / "trained.onnx")
    assert_file_computes_like(net, tmp_path / "trained.onnx", torch.randn(2, 4))


def test_copies_that_an_exporter_folded_follow_their_weight(tmp_path: Path) -> None:
    """A tied GPT-2 by torch's exporter: embedding and its folded transpose are one weight, in both places."""
    pytest.importorskip("transformers")
    from tests.lowering.test_exports import exported

    _, model = exported("gpt2", 18, optimize=True)
    net = onward.to_torch(model)
    assert list(net.graph.ties.values()) == [Tie("inner.lm_head.weight", Rearrangement((1, 0)))]
    train(net, tokens(50))
    onward.export(net, tmp_path / "trained.onnx")
    stored = stored_arrays(tmp_path / "trained.onnx")
    for name, tie in net.graph.ties.items():
        assert np.array_equal(stored[name], stored[tie.weight].transpose(tie.how.permutation))
    assert_file_computes_like(net, tmp_path / "trained.onnx", tokens(50, seed=3))


def tied_model() -> onnx.ModelProto:
    table = array(9, 4)
    nodes = [
        helper.make_node("Cast", ["x"], ["ids"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "ids"], ["e"], name="embed"),
        helper.make_node("MatMul", ["e", "table_transposed"], ["y"], name="out"),
    ]
    initializers = {"table": table, "table_transposed": table.T.copy()}
    return model_of(nodes, initializers, shape=("n",), producer_name="pytorch")


def test_a_folded_transpose_is_written_like_its_weight(tmp_path: Path) -> None:
    net = onward.to_torch(tied_model())
    assert set(net.graph.ties) | set(net.weights) == {"table", "table_transposed"}
    assert len(net.weights) == 1
    move_weights(net)
    onward.export(net, tmp_path / "trained.onnx")
    stored = stored_arrays(tmp_path / "trained.onnx")
    assert np.array_equal(stored["table"], stored["table_transposed"].T)
    assert not np.array_equal(stored["table"], array(9, 4))
    assert_file_computes_like(net, tmp_path / "trained.onnx", torch.arange(9).float())


def test_a_tie_of_a_weight_that_does_not_train_stays_as_it_is(tmp_path: Path) -> None:
    net = onward.to_torch(tied_model(), weights_not_to_train=["table*"])
    assert not net.weights
    onward.export(net, tmp_path / "same.onnx")
    stored = stored_arrays(tmp_path / "same.onnx")
    assert np.array_equal(stored["table"], array(9, 4))
    assert np.array_equal(stored["table_transposed"], array(9, 4).T)


@pytest.mark.parametrize("moved_to", [None, torch.float32, torch.bfloat16])
def test_a_weight_keeps_the_type_it_has_in_the_file(tmp_path: Path, moved_to: torch.dtype | None) -> None:
    """float16 initializers and Constant nodes stay float16, also from a network that was moved to another type."""
    constant = numpy_helper.from_array(array(3, dtype=np.float16, seed=1), "inner")
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["half", "w"], ["u"]),
        helper.make_node("Constant", [], ["b"], value=constant),
        helper.make_node("Add", ["u", "b"], ["s"]),
        helper.make_node("Cast", ["s"], ["y"], to=FLOAT),
    ]
    model = model_of(nodes, {"w": array(4, 3, dtype=np.float16)})
    del model.graph.value_info[:]
    net = onward.to_torch(model)
    move_weights(net)
    if moved_to is not None:
        net.to(moved_to)
    onward.export(net, tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx").graph
    (weight,) = written.initializer
    assert weight.data_type == TensorProto.FLOAT16
    assert np.array_equal(numpy_helper.to_array(weight), net.weights["w"].detach().to(torch.float16).numpy())
    assert written.node[2].attribute[0].t.data_type == TensorProto.FLOAT16
    run(tmp_path / "trained.onnx", torch.ones(1, 4))


def test_a_bfloat16_weight_keeps_its_bits(tmp_path: Path) -> None:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = onnx.TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[4, 3])
    weight.raw_data = values.view(torch.int16).numpy().tobytes()
    nodes = [helper.make_node("Cast", ["w"], ["wide"], to=FLOAT), helper.make_node("MatMul", ["x", "wide"], ["y"])]
    model = model_of(nodes, {})
    model.graph.initializer.append(weight)
    net = onward.to_torch(model)
    onward.export(net, tmp_path / "same.onnx")
    (written,) = onnx.load(tmp_path / "same.onnx").graph.initializer
    assert (written.data_type, written.raw_data) == (TensorProto.BFLOAT16, weight.raw_data)


def test_a_network_with_a_loss_is_written_without_it(tmp_path: Path) -> None:
    spec = LossSpec(type="softmax_cross_entropy", prediction="y", label="labels", class_weights=[1.0, 2.0] * 16)
    net = OnnxModule(make_training_graph(two_layers(), loss=spec, count_correct=True))
    move_weights(net)
    onward.export(net, tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx").graph
    assert [node.name for node in written.node] == ["first", "bend", "second", "shift"]
    assert [value.name for value in (*written.input, *written.output)] == ["x", "y"]
    assert {tensor.name for tensor in written.initializer} == {"w1", "w2", "b"}


# ----------------------------------------------------------------------------------------------- exported for training


def training_nodes() -> list[onnx.NodeProto]:
    return [
        helper.make_node(
            "BatchNormalization",
            ["x", "scale", "shift", "mean", "variance"],
            ["n", "new_mean", "new_variance"],
            name="norm",
            training_mode=1,
        ),
        helper.make_node("Dropout", ["n", "ratio", "training"], ["y", "kept"], name="drop"),
    ]


STATISTICS = {
    "scale": array(4) + 2,
    "shift": array(4, seed=1),
    "mean": array(4, seed=2),
    "variance": array(4, seed=3) ** 2 + 1,
    "ratio": np.array(0.4, np.float32),
    "training": np.array(True),
}


@pytest.mark.parametrize("outputs", [("y",), ("y", "new_mean", "new_variance")])
def test_a_model_exported_in_training_mode_becomes_an_inference_model(tmp_path: Path, outputs: tuple[str, ...]) -> None:
    """Batch statistics and dropout go, also where the graph gives out the updated statistics."""
    net = onward.to_torch(model_of(training_nodes(), STATISTICS, outputs=outputs))
    inputs = torch.randn(8, 4)
    net.train()(inputs)
    onward.export(net, tmp_path / "trained.onnx")
    assert_file_computes_like(net, tmp_path / "trained.onnx", inputs)
    first = run(tmp_path / "trained.onnx", inputs)
    assert torch.equal(first[0], run(tmp_path / "trained.onnx", inputs)[0]), "no random numbers"
    written = {node.name: node for node in onnx.load(tmp_path / "trained.onnx").graph.node}
    assert {a.name: a.i for a in written["norm"].attribute} == {"training_mode": 0}
    assert list(written["norm"].output) == ["n"]
    assert list(written["drop"].input) == ["n", "ratio"]


def test_before_opset_14_further_outputs_are_the_training_mode(tmp_path: Path) -> None:
    names = ["y", "new_mean", "new_variance", "batch_mean", "batch_variance"]
    node = helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], names, name="norm")
    statistics = {name: STATISTICS[name] for name in ("scale", "shift", "mean", "variance")}
    net = onward.to_torch(model_of([node], statistics, opset=9))
    inputs = torch.randn(8, 4)
    net.train()(inputs)
    onward.export(net, tmp_path / "trained.onnx")
    (written,) = onnx.load(tmp_path / "trained.onnx").graph.node
    assert list(written.output) == ["y"]
    assert_file_computes_like(net, tmp_path / "trained.onnx", inputs)


def test_what_the_caller_decides_stays(tmp_path: Path) -> None:
    """A mode, or statistics, that are inputs of the graph; and a dropout that is switched off, or says nothing."""
    nodes = [
        helper.make_node("BatchNormalization", ["x", "scale", "shift", "m", "v"], ["n", "nm", "nv"], training_mode=1),
        helper.make_node("Dropout", ["n", "ratio", "mode"], ["d"]),
        helper.make_node("Dropout", ["d", "ratio", "off"], ["e"]),
        helper.make_node("Dropout", ["e"], ["f"]),
        helper.make_node("Mul", ["f", "w"], ["y"]),
    ]
    initializers = {name: STATISTICS[name] for name in ("scale", "shift", "ratio")}
    model = model_of(nodes, {**initializers, "off": np.array(False), "w": array(4)})
    for name, dtype, shape in (("m", FLOAT, [4]), ("v", FLOAT, [4]), ("mode", TensorProto.BOOL, [])):
        model.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))
    onward.export(onward.to_torch(model), tmp_path / "same.onnx")
    written = onnx.load(tmp_path / "same.onnx")
    assert list(map(as_stored, written.graph.node)) == list(map(as_stored, model.graph.node))


def test_torch_exports_in_training_mode(tmp_path: Path) -> None:
    """`torch.onnx.export` of a network in training mode; the trained file computes like the network in evaluation."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Dropout(0.5)
    ).train()
    inputs = images(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(network, (inputs,), dynamo=True, opset_version=18, optimize=False, verbose=False)
    assert program is not None
    net = onward.to_torch(program.model_proto)
    train(net, inputs)
    onward.export(net, tmp_path / "trained.onnx")
    assert_file_computes_like(net, tmp_path / "trained.onnx", inputs)
    assert torch.equal(run(tmp_path / "trained.onnx", inputs)[0], run(tmp_path / "trained.onnx", inputs)[0])


# ------------------------------------------------------------------------------------------------------- external data


def save_external(model: onnx.ModelProto, path: Path, data: str) -> None:
    onnx.save(copy.deepcopy(model), path, save_as_external_data=True, location=data, size_threshold=256)


def locations(path: Path) -> set[str]:
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def test_external_data_stay_external_beside_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    save_external(two_layers(), tmp_path / "model.onnx", "weights.bin")
    source = (tmp_path / "weights.bin").read_bytes()
    net = onward.to_torch(tmp_path / "model.onnx")
    move_weights(net)
    onward.export(net, tmp_path / "there" / "trained.onnx")
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["trained.onnx", "trained.onnx.data"]
    assert locations(tmp_path / "there" / "trained.onnx") == {"trained.onnx.data"}
    assert (tmp_path / "weights.bin").read_bytes() == source
    assert_file_computes_like(net, tmp_path / "there" / "trained.onnx", torch.randn(2, 4))


def test_a_model_written_over_its_own_files(tmp_path: Path) -> None:
    """Twice, with a weight that does not train in the same data file, whose place in it changes."""
    path = tmp_path / "model.onnx"
    model = two_layers()
    model.graph.initializer.insert(0, numpy_helper.from_array(array(50, 50, seed=9), "unused"))
    save_external(model, path, "model.onnx.data")
    net = onward.to_torch(path, weights_not_to_train=["w2"])
    frozen = net.tensors_by_name()["w2"].clone()
    for seed in (1, 2):
        move_weights(net, seed)
        onward.export(net, path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
        assert_file_computes_like(net, path, torch.randn(2, 4))
        stored = stored_arrays(path)
        assert np.array_equal(stored["w2"], frozen.numpy())
        assert np.array_equal(stored["unused"], array(50, 50, seed=9))
    onward.export(net, tmp_path / "elsewhere.onnx")
    assert_file_computes_like(net, tmp_path / "elsewhere.onnx", torch.randn(2, 4))


def test_large_models_get_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_saving, "EXTERNAL_ABOVE_BYTES", 4000)
    net = onward.to_torch(two_layers())
    move_weights(net)
    onward.export(net, tmp_path / "trained.onnx")
    assert locations(tmp_path / "trained.onnx") == {"trained.onnx.data"}
    assert (tmp_path / "trained.onnx.data").stat().st_size >= 4 * (32 * 32 + 4 * 32)
    assert_file_computes_like(net, tmp_path / "trained.onnx", torch.randn(2, 4))


def test_external_tensors_of_constant_nodes(tmp_path: Path) -> None:
    """They are written into the model: the format of external data is for files next to it."""
    constant = onnx.helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(array(32, seed=5), "inner"))
    model = two_layers()
    model.graph.node.insert(0, constant)
    model.graph.node.append(helper.make_node("Sub", ["y", "c"], ["z"], name="last"))
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, ["batch", 32]))
    onnx.save(
        model,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="all.bin",
        size_threshold=0,
        convert_attribute=True,
    )
    (tmp_path / "there").mkdir()
    for not_trained in (["c"], []):
        net = onward.to_torch(tmp_path / "model.onnx", weights_not_to_train=not_trained)
        move_weights(net)
        onward.export(net, tmp_path / "there" / "trained.onnx")
        assert_file_computes_like(net, tmp_path / "there" / "trained.onnx", torch.randn(2, 4))


# ------------------------------------------------------------------------------------------------- files that refuse


def previous(tmp_path: Path) -> tuple[OnnxModule, Path, dict[str, bytes]]:
    """A network with external data, exported once; what is on the disk then."""
    save_external(two_layers(), tmp_path / "model.onnx", "weights.bin")
    net = onward.to_torch(tmp_path / "model.onnx")
    target = tmp_path / "out" / "trained.onnx"
    onward.export(net, target)
    move_weights(net)
    return net, target, {p.name: p.read_bytes() for p in target.parent.iterdir()}


def assert_untouched(target: Path, before: dict[str, bytes]) -> None:
    assert {p.name: p.read_bytes() for p in target.parent.iterdir()} == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    net, target, before = previous(tmp_path)

    def fill(*arguments: Any, **options: Any) -> None:
        path = Path(arguments[1])
        path.write_bytes(b"half a mod")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(ir, "save", fill)
    with pytest.raises(StorageError, match=r"'.*trained.onnx' needs about 4,736 bytes; the disk has [\d,]+ free. Free"):
        onward.export(net, target)
    assert_untouched(target, before)


@pytest.mark.parametrize("failing", ["trained.onnx.data", "trained.onnx"])
def test_a_move_that_fails_brings_the_previous_files_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    net, target, before = previous(tmp_path)
    replace = os.replace

    def refuse(source: Any, to: Any) -> None:
        if Path(source).name == failing and Path(to).name == failing:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        replace(source, to)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match="cannot be written: Operation not permitted"):
        onward.export(net, target)
    assert_untouched(target, before)


def test_a_full_filesystem_for_real(tmp_path: Path) -> None:
    """The kernel's limit on the size of a file stands in for the end of a disk: the write itself fails half-way."""
    net = onward.to_torch(two_layers())
    target = tmp_path / "trained.onnx"
    target.write_bytes(b"the previous one")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            onward.export(net, target)
        except StorageError as error:
            (tmp_path / "said").write_text(str(error))
        os._exit(0)
    os.waitpid(child, 0)
    said = (tmp_path / "said").read_text()
    assert "trained.onnx' cannot be written: File too large. Choose another path" in said
    assert_untouched(target, {"trained.onnx": b"the previous one", "said": said.encode()})


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    net = onward.to_torch(two_layers())
    with pytest.raises(StorageError, match=r"'.*' cannot be written: it is a directory. Choose another path"):
        onward.export(net, tmp_path)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=r"cannot be written: (Not a directory|File exists)"):
        onward.export(net, tmp_path / "file" / "trained.onnx")
    with pytest.raises(StorageError, match="cannot be written"):
        onward.export(net, "/proc/trained.onnx")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    net, target, before = previous(tmp_path)
    target.parent.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be written: Permission denied"):
        onward.export(net, target)
    assert_untouched(target, before)
