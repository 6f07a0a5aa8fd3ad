"""Files whose export fixed the batch train with any: graphs of both exporters, proven and compared with torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

import onward
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError, ParametersError
from tests.mlp import build_mlp, data, start, weights_of


def _fixed_mlp(folder: Path, samples: int = 1, mixed: bool = False, **options: bool) -> Path:
    """`mlp.onnx` for a fixed number of samples, its input reshaped to stored sizes on the way."""
    model = build_mlp(**options)  # type: ignore[arg-type]
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = samples
    model.graph.node[0].input[0] = "flat"
    model.graph.node.insert(0, helper.make_node("Reshape", ["x", "sizes"], ["flat"], name="flatten"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([samples, 6], np.int64), "sizes"))
    if mixed:
        model.graph.node[-1].output[0] = "scores"
        model.graph.node.append(helper.make_node("Softmax", ["scores"], ["shares"], axis=0, name="over_samples"))
        model.graph.node.append(helper.make_node("Identity", ["shares"], ["logits"]))
    onnx.save(model, folder / "mlp.onnx")
    return folder / "mlp.onnx"


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_run_with_another_batch_is_that_of_a_file_without_a_fixed_one(
    samples: int, normalized: bool, tmp_path: Path
) -> None:
    """Bit for bit, batch normalization in training mode included; the exported file keeps its own sizes."""
    fixed, free = tmp_path / "fixed", tmp_path / "free"
    results = []
    for folder in (fixed, free):
        folder.mkdir()
        if folder is fixed:
            _fixed_mlp(folder, samples, normalized=normalized)
        else:
            onnx.save(build_mlp(normalized=normalized), folder / "mlp.onnx")
        runner, recorder = start(folder, paths={"output_dir": folder / "out"})
        runner.run(InMemoryDataLoader(data(32)), InMemoryDataLoader(data(11, seed=1)))
        runner.end_training(InMemoryDataLoader(data(11, seed=1)))
        results.append((weights_of(runner), [report.loss for report in recorder.steps], runner))
    assert results[0][1] == results[1][1]
    for name, tensor in results[1][0].items():
        assert torch.equal(results[0][0][name], tensor), name
    notes = results[0][2].graph.notes
    assert notes[0].startswith(f"the batch size in the model is fixed to {samples}; for training the graph was ")
    assert notes[0].endswith("The exported model keeps its batch size.")
    trained = onnx.load(fixed / "out" / "mlp_trained.onnx")
    assert trained.graph.input[0].type.tensor_type.shape.dim[0].dim_value == samples
    session = onnxruntime.InferenceSession(fixed / "out" / "mlp_trained.onnx")
    assert session.run(None, {"x": data(samples)["x"]})[0].shape == (samples, 4)


def test_a_run_that_cannot_have_another_batch_says_what_to_do(tmp_path: Path) -> None:
    _fixed_mlp(tmp_path, mixed=True)
    with pytest.raises(ParametersError) as raised:
        start(tmp_path)
    text = str(raised.value)
    assert text.startswith(
        "training.batch_size is 4, but the batch size in the model is fixed to 1, and the graph cannot be rewritten "
        "for another, because its samples are not independent: 'logits' differs by "
    )
    assert (
        "Set training.batch_size and training.eval_batch_size to 1 and training.gradient_accumulation_steps to 4, "
        "which makes the same updates, or export the model with a dynamic batch axis" in text
    )
    runner, _ = start(tmp_path, training={"batch_size": 1, "gradient_accumulation_steps": 4, "num_train_steps": 8})
    runner.run(InMemoryDataLoader(data(32)))


def test_a_run_with_the_batch_of_the_file_is_left_alone(tmp_path: Path) -> None:
    _fixed_mlp(tmp_path, 4)
    runner, _ = start(tmp_path)
    assert runner.graph.rebatching is None


def test_to_torch_offers_any_batch_size(tmp_path: Path) -> None:
    """Outputs and gradients of a batch are those of a file with an open batch; the exported file keeps its own size."""
    model = _fixed_mlp(tmp_path)
    net, free = onward.to_torch(model, any_batch_size=True), onward.to_torch(build_mlp())
    x = torch.from_numpy(data(7)["x"])
    torch.testing.assert_close(net(x), free(x), rtol=0, atol=0)
    for one in (net, free):
        one(x).square().mean().backward()
    for name, weight in free.weights.items():
        torch.testing.assert_close(net.weights[name].grad, weight.grad, rtol=0, atol=0)
    onward.export(net, tmp_path / "exported.onnx")
    exported = onnx.load(tmp_path / "exported.onnx")
    assert exported.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    with pytest.raises(ModelError, match=r"shape \[7, 6\]|expects \[1, 6\]|\[1, 6\]"):
        onward.to_torch(model)(x)
    assert onward.to_torch(build_mlp(), any_batch_size=True)(x).shape == (7, 4)


def test_to_torch_refuses_any_batch_size_where_samples_mix(tmp_path: Path) -> None:
    model = _fixed_mlp(tmp_path, mixed=True)
    with pytest.raises(ModelError) as raised:
        onward.to_torch(model, any_batch_size=True)
    text = str(raised.value)
    assert text.startswith(
        "any_batch_size is set, but the batch size in the model is fixed to 1, and the graph cannot be rewritten for "
        "another, because its samples are not independent: 'logits' differs by "
    )
    assert "Pass batches of 1 and accumulate their gradients, or export the model with a dynamic batch axis" in text
