"""Inputs that hold one number for every batch: equal to ONNX Runtime fed with them, trained by a run, exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError
from onward.graph.repair.fixed_inputs import note_on_inputs, propose_fixed_inputs
from onward.lowering.inspection import describe
from onward.parameters import Parameters
from tests.genai_models import feeds, genai_model
from tests.initializers import stored_arrays

HIDDEN, FEATURES, STEPS = 5, 3, 4


def voice_model(state: tuple[object, ...] = (1, "batch", HIDDEN)) -> onnx.ModelProto:
    """A recurrent network with its state and sampling rate as inputs, as voice activity detectors have them."""
    rng = np.random.default_rng(0)

    def stored(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((rng.standard_normal(shape) * 0.5).astype(np.float32), name)

    def branch(name: str, weight: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node("MatMul", ["last", weight], [f"{name}_out"])], name, [], [out])

    then, otherwise = branch("fast", "head_16k"), branch("slow", "head_8k")
    nodes = [
        helper.make_node("GRU", ["x", "W", "R", "", "", "state"], ["", "state_out"], hidden_size=HIDDEN),
        helper.make_node("Squeeze", ["state_out", "zero"], ["last"]),
        helper.make_node("Equal", ["sr", "rate"], ["is_16k"]),
        helper.make_node("If", ["is_16k"], ["speech"], then_branch=then, else_branch=otherwise),
    ]
    inputs = [("x", TensorProto.FLOAT, [STEPS, "batch", FEATURES]), ("sr", TensorProto.INT64, [])]
    graph = helper.make_graph(
        nodes,
        "voice",
        [helper.make_tensor_value_info(*one) for one in (*inputs, ("state", TensorProto.FLOAT, list(state)))],
        [helper.make_tensor_value_info("speech", TensorProto.FLOAT, ["batch", 1])],
        [
            stored("W", 1, 3 * HIDDEN, FEATURES),
            stored("R", 1, 3 * HIDDEN, HIDDEN),
            stored("head_16k", HIDDEN, 1),
            stored("head_8k", HIDDEN, 1),
            numpy_helper.from_array(np.array([0]), "zero"),
            numpy_helper.from_array(np.array(16000), "rate"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batch_first(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same network for samples as data have them."""
    model.graph.input[0].type.tensor_type.shape.CopyFrom(
        helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", STEPS, FEATURES]).tensor_type.shape
    )
    model.graph.node[0].input[0] = "time_first"
    model.graph.node.insert(0, helper.make_node("Transpose", ["x"], ["time_first"], perm=[1, 0, 2]))
    return model


@pytest.mark.parametrize(("rate", "state"), [(16000, 0.0), (8000, 0.25)])
@pytest.mark.parametrize("shape", [(1, "batch", HIDDEN), (1, None, HIDDEN), (1, 2, HIDDEN)])
def test_outputs_are_those_of_the_model_with_these_inputs(
    rate: int, state: float, shape: tuple[object, ...], tmp_path: Path
) -> None:
    model = voice_model(shape)
    net = onward.to_torch(model, fixed_inputs={"sr": rate, "state": state})
    x = np.random.default_rng(1).standard_normal((STEPS, 2, FEATURES)).astype(np.float32)
    feeds = {"x": x, "sr": np.array(rate), "state": np.full((1, 2, HIDDEN), state, np.float32)}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    # The second axis of x is the batch; without a name, the state takes the first, which is wrong here and noted.
    if shape[1] is None:
        note = f"input 'state' is fixed to {state:g}; its open axis 1 has the size of axis 0 of input 'x'."
        assert note in net.graph.notes
        return
    assert [str(value.name) for value in net.graph.model.graph.inputs] == ["x"]
    np.testing.assert_allclose(net(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-6)
    assert sorted(net.weights) == ["R", "W", "head_16k", "head_8k"]
    # What leaves onward is the user's own graph, with all of its inputs.
    onward.export(net, tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    assert [one.name for one in session.get_inputs()] == ["x", "sr", "state"]
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=1e-6)


def test_an_unnamed_open_axis_follows_the_first_axis_of_the_first_input() -> None:
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "bias"], ["y"])],
        "sum",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 3]),
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, [None, 2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 2])],
        [numpy_helper.from_array(np.ones((3, 2), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    net = onward.to_torch(model, fixed_inputs={"bias": 0.5})
    assert "its open axis 0 has the size of axis 0 of input 'x'" in net.graph.notes[0]
    np.testing.assert_allclose(net(torch.ones(4, 3)).detach().numpy(), np.full((4, 2), 3.5))


def _attention_with_a_concatenated_cache() -> onnx.ModelProto:
    """Attention as torch exports it with a past: it is joined in front of the new keys, and its length is counted."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["k"]),
        helper.make_node("Concat", ["past_key_values.0.key", "k"], ["present.0.key"], axis=-2),
        helper.make_node("Transpose", ["present.0.key"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "kt"], ["scores"]),
        helper.make_node("MatMul", ["scores", "present.0.key"], ["attended"]),
        helper.make_node("Shape", ["past_key_values.0.key"], ["past_shape"]),
        helper.make_node("Gather", ["past_shape", "one"], ["past_length"]),
        helper.make_node("Cast", ["past_length"], ["offset"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["attended", "offset"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "attention",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 4]),
            helper.make_tensor_value_info("past_key_values.0.key", TensorProto.FLOAT, ["batch", "past_length", 4]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", 4]),
            helper.make_tensor_value_info("present.0.key", TensorProto.FLOAT, ["batch", "all", 4]),
        ],
        [
            numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), "w"),
            numpy_helper.from_array(np.array(1), "one"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("is_fused", [False, True])
def test_caches_of_keys_and_values_are_empty(is_fused: bool) -> None:
    model = genai_model(is_quantized=False) if is_fused else _attention_with_a_concatenated_cache()
    x = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float32)
    given = feeds() if is_fused else {"x": x, "past_key_values.0.key": np.zeros((2, 0, 4), np.float32)}
    found = propose_fixed_inputs(ir.from_proto(model))
    assert found == dict.fromkeys((name for name in given if name.startswith("past")), 0.0)
    (note,) = note_on_inputs(ir.from_proto(model))
    assert ('{"past_key_values.*": 0}' if is_fused else "{past_key_values.0.key: 0}") in note
    net = onward.to_torch(model, fixed_inputs={"past_key_values.*": 0})
    session = onnxruntime.InferenceSession(model.SerializeToString())
    inputs = [torch.from_numpy(array) for name, array in given.items() if not name.startswith("past")]
    for expected, actual in zip(session.run(None, given), net(*inputs), strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-5)
    assert not any("cache" in name for name in net.weights)  # angles are no weights


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"stat": 0}, r"names 'stat'; the inputs of the model are 'x', 'sr', 'state'\. Did you mean 'state'\?"),
        ({"sr": 0.5}, r"gives 'sr' the value 0\.5, which its type int64 cannot hold\."),
        ({"state": 1e60}, r"gives 'state' the value 1e\+60, which its type float cannot hold\."),
        ({"x": 0, "sr": 16000, "state": 0}, r"names every input of the model \(x, sr, state\); remove at least one\."),
    ],
)
def test_what_cannot_be_fixed_is_refused(fixed: dict[str, float], words: str) -> None:
    with np.errstate(over="ignore"), pytest.raises(ModelError, match=words):
        onward.to_torch(voice_model(), fixed_inputs=fixed)


def test_a_run_trains_with_them(tmp_path: Path) -> None:
    """Without them the data lack what the model reads, and the message says what to do."""
    model = batch_first(voice_model())
    onnx.save(model, tmp_path / "voice.onnx")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((16, STEPS, FEATURES)).astype(np.float32)
    data = InMemoryDataLoader({"x": x, "target": x.sum((1, 2), keepdims=True)[:, :, 0]})
    given = {
        "paths": {"model_path": str(tmp_path / "voice.onnx"), "output_dir": str(tmp_path)},
        "loss": {"type": "mean_squared_error", "prediction": "speech", "label": "target"},
        "training": {"batch_size": 8, "num_train_steps": 40},
        "learning_rate": {"initial_lr": 0.05},
        "optimizer": {"training_optimizer_name": "Adam"},
    }

    def run(**data_section: object) -> tuple[float, float]:
        runner = onward.TrainingRunner(Parameters.from_mapping({**given, "data": data_section}), onward.Environment())
        runner.initialize()
        before = runner.evaluate(data).metrics["loss"]
        runner.run(data)
        after = runner.evaluate(data).metrics["loss"]
        runner.end_training()
        return before, after

    with pytest.raises(
        Exception, match=r"the data have no feature 'sr', 'state', .* with a number in data\.fixed_inputs\."
    ):
        run()
    before, after = run(fixed_inputs={"sr": 16000, "state": 0})
    assert after < 0.5 * before
    trained = onnx.load(tmp_path / "voice_trained.onnx")
    assert [one.name for one in trained.graph.input] == ["x", "sr", "state"]
    weights = stored_arrays(trained)
    first = stored_arrays(model)
    # The branch for 8 kHz was never taken.
    assert np.array_equal(weights["head_8k"], first["head_8k"])
    assert not np.array_equal(weights["head_16k"], first["head_16k"])


FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize(
    ("inputs", "outputs", "proposed"),
    [
        # Silero: batch open without a name, the state's first axis fixed.
        (
            {"input": (FLOAT, [None, None]), "state": (FLOAT, [2, None, 128]), "sr": (INT64, [])},
            {"output": [None, 1], "stateN": [2, None, 128]},
            {"state": 0.0, "sr": 16000.0},
        ),
        # DTLN: everything fixed, names that say nothing; the state comes back.
        (
            {"input_2": (FLOAT, [1, 1, 257]), "input_3": (FLOAT, [1, 2, 128, 2])},
            {"activation": [1, 1, 257], "stack": [1, 2, 128, 2]},
            {"input_3": 0.0},
        ),
        # A state that is called otherwise, its batch second.
        ({"x": (FLOAT, ["batch", 7]), "memory": (FLOAT, [3, "batch", 5])}, {"y": ["batch", 1]}, {"memory": 0.0}),
        # Features: hidden states of another network, a mask, a second picture, an autoencoder's input.
        ({"ids": (INT64, ["n", "s"]), "encoder_hidden_states": (FLOAT, ["n", "s", 8])}, {"y": ["n", 1]}, {}),
        ({"ids": (INT64, ["n", "s"]), "mask": (FLOAT, [1, "s"])}, {"y": ["n", 1]}, {}),
        ({"left": (FLOAT, ["n", 3, 8, 8]), "right": (FLOAT, ["n", 3, 8, 8])}, {"y": ["n", 3, 8, 8]}, {}),
        ({"x": (FLOAT, [1, 3, 8, 8])}, {"y": [1, 3, 8, 8]}, {}),
        ({"prefix": (INT64, ["batch", "t"]), "hidden": (FLOAT, ["batch", 2, 16])}, {"y": ["batch", 9]}, {}),
        # A model of nothing but a state would be left without inputs.
        ({"state": (FLOAT, [1, 5])}, {"y": [1, 5]}, {}),
    ],
)
def test_which_inputs_are_no_feature_of_a_sample(
    inputs: dict[str, tuple[int, list[object]]], outputs: dict[str, list[object]], proposed: dict[str, float]
) -> None:
    first = next(iter(inputs))
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Cast", [first], [name], to=FLOAT) for name in outputs],
            "some",
            [helper.make_tensor_value_info(name, *one) for name, one in inputs.items()],
            [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
        )
    )
    read = ir.from_proto(model)
    assert propose_fixed_inputs(read) == proposed
    assert bool(note_on_inputs(read)) == bool(proposed)


def test_inspection_says_what_to_set(tmp_path: Path) -> None:
    onnx.save(voice_model(), tmp_path / "voice.onnx")
    text = " ".join(describe(tmp_path / "voice.onnx").split())
    assert "inputs 'sr', 'state' look like states or settings that are the same for every sample" in text
    assert "Set data.fixed_inputs: {sr: 16000, state: 0} to train without them in the data." in text
