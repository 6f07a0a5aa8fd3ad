"""A new last layer: the same network with another head, as torch computes it; what has none is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import onward
from onward.artifacts.trained_model import export_checkpoint
from onward.errors import ModelError, ParametersError
from onward.graph.new_head import replace_head
from onward.graph.reading.model_file import read_model
from tests.graph.exported import export
from tests.initializers import stored_arrays

IMAGES = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)),)
TOKENS = (torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2)),)


def pooled() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))


def convolved() -> nn.Sequential:
    """As SqueezeNet ends: classes by a convolution, then their mean over the image."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def tagger() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 10), nn.LogSoftmax(-1))


class Reshaped(nn.Module):
    """The number of classes stands in a constant shape; zero biases of two layers are one in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 10), nn.Linear(10, 10)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(x))).reshape(-1, 10)


CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...], Any]] = {
    "pooled": (pooled, IMAGES, lambda m: m[4]),
    "convolved": (convolved, IMAGES, lambda m: m[2]),
    "tagger": (tagger, TOKENS, lambda m: m[2]),
    "reshaped": (Reshaped, TOKENS, lambda m: m.head),
}


@pytest.mark.parametrize("dynamo", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("case", CASES)
def test_the_network_computes_as_one_with_another_head(case: str, dynamo: bool, tmp_path: Path) -> None:
    make, inputs, head_of = CASES[case]
    torch.manual_seed(0)
    module = make().eval()
    model = read_model(export(module, inputs, tmp_path / "m.onnx", 18 if dynamo else 17, dynamo))
    output = str(model.graph.outputs[0].name)
    done = replace_head(model, output, 4, seed=3)
    weight = model.graph.initializers[done.names[0]].const_value
    assert weight is not None
    drawn = np.array(weight.numpy())
    inner = head_of(module)
    bound = 1 / np.sqrt(np.prod(inner.weight.shape[1:]))
    assert np.abs(drawn).max() <= bound
    assert drawn.std() == pytest.approx(bound / np.sqrt(3), rel=0.3), "uniform, as torch.nn.Linear begins"
    is_transposed = drawn.shape[0] != 4
    inner.weight = nn.Parameter(torch.from_numpy(drawn.T.copy() if is_transposed else drawn))
    inner.bias = nn.Parameter(torch.zeros(4))
    if case == "reshaped":
        module.forward = lambda x: module.head(torch.tanh(module.hidden(x))).reshape(-1, 4)
    ir.save(model, tmp_path / "new.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "new.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "new.onnx")
    assert session.get_outputs()[0].shape[-1] == 4
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs[0].numpy()})
    np.testing.assert_allclose(found, module(*inputs).detach().numpy(), rtol=1e-5, atol=1e-6)
    again = read_model(tmp_path / "new.onnx")
    assert replace_head(again, output, 4).note == (
        "head.num_classes is 4, which the last layer has already; it is kept."
    )


def trained(path: Path, folder: Path, **sections: Any) -> Any:
    data = {"input": np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32), "label": np.arange(8) % 4}
    return onward.fit(
        str(path), data, loss="softmax_cross_entropy", steps=4, batch_size=8, learning_rate=0.1, output_dir=folder,
        progress=False, parameters={"head": {"num_classes": 4}, **sections},
    )  # fmt: skip


def test_a_run_trains_the_new_head_and_exports_its_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = export(pooled(), IMAGES, tmp_path / "m.onnx", 18, True)
    trained(path, tmp_path / "out", checkpoint={"checkpoints_dir": str(tmp_path / "kept")})
    export_checkpoint(path, tmp_path / "kept", tmp_path / "again.onnx")
    stored = [stored_arrays(file) for file in (tmp_path / "out" / "m_trained.onnx", tmp_path / "again.onnx")]
    assert stored[0]["4.weight"].shape == (4, 6)
    assert np.abs(stored[0]["4.bias"]).min() > 0, "trained, for it began at zero"
    assert all((stored[0][name] == stored[1][name]).all() for name in stored[0])


def test_a_head_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    path = export(pooled(), IMAGES, tmp_path / "m.onnx", 18, True)
    with pytest.raises(ParametersError) as caught:
        trained(path, tmp_path / "out", training={"weights_not_to_train": ["4.*"]})
    assert str(caught.value) == (
        "head.num_classes gives '4.weight' or '4.bias' new values, but they are not trained. Add them to "
        "adapter.train_too or training.weights_to_train, or take them out of weights_not_to_train."
    )


def graph_of(nodes: list[onnx.NodeProto], **arrays: np.ndarray) -> ir.Model:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [info("x", onnx.TensorProto.FLOAT, ["N", 6])], [info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )  # fmt: skip
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))


node = helper.make_node
REFUSED: dict[str, Any] = {
    "x is an input": (
        [node("Relu", ["x"], ["y"], name="r")], {},
        "'y' is not computed by a Gemm, MatMul or Conv whose weight the file stores, with what is done class by class "
        "after it: it is an input. Set loss.prediction to the scores of the last layer, or replace",
    ),
    "a norm": (
        [node("MatMul", ["x", "w"], ["h"]), node("LayerNormalization", ["h", "s"], ["y"], name="norm")],
        {"w": np.ones((6, 3)), "s": np.ones(3)}, "after it: before it is LayerNormalization 'norm'. Set",
    ),
    "shared": (
        [node("MatMul", ["x", "w"], ["h"], name="a"), node("MatMul", ["h", "w"], ["y"], name="b")],
        {"w": np.ones((6, 6))}, "is 4, but 'w', the weight of the last layer, is read by 'a' too. Export the model",
    ),
    "another bias": (
        [node("MatMul", ["x", "w"], ["h"], name="a"), node("Add", ["h", "b"], ["y"], name="add")],
        {"w": np.ones((6, 3)), "b": np.ones((2, 3))}, "'add' adds 6 numbers to the 3 outputs of 'a'. Replace",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_layer_to_replace_is_refused_by_name(case: str) -> None:
    nodes, arrays, words = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        replace_head(graph_of(nodes, **arrays), "y", 4)
    assert words in str(caught.value)


def test_an_unknown_prediction_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^loss\.prediction is 'z', which no node of the model computes\.$"):
        replace_head(graph_of([node("Relu", ["x"], ["y"])]), "z", 4)
