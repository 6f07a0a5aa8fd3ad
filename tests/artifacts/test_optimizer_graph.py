"""The update graph, run by onnxruntime: clipping, skipping, types, names; `test_update_formulas` has the formulas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from onward.artifacts.optimizer_graph import RATE_SUMS, refuse_average, slot_shapes, write_optimizer_graph
from onward.errors import ModelError, ParametersError
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.optimizers.kind import OptimizerKind
from onward.optimizers.registry import OPTIMIZERS
from onward.parameters import AttributeRule, Optimizer
from tests.artifacts.plain_runtime import call, largest_error, open_session

RATES = (0.01, 0.02, 0.005, 0.01, 0.03)


def make_net() -> OnnxModule:
    model = create_model("mnist", variant="gemm", image_size=3, hidden=8, seed=3)
    return OnnxModule(make_training_graph(model))


def rule(**attributes: Any) -> AttributeRule:
    return AttributeRule(**attributes)


def first_feeds(net: OnnxModule, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    feeds = {"update_count": torch.tensor(0)}
    if optimizer.training_optimizer_name == "AdamWScheduleFree":
        feeds |= dict.fromkeys(RATE_SUMS, torch.tensor(0.0))
    for name, weight in net.weights.items():
        feeds[name] = weight.detach().clone()
        feeds |= {slot: weight.new_zeros(shape) for slot, shape in slot_shapes(optimizer, name, weight.shape).items()}
    return feeds


def next_feeds(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removesuffix("_new"): tensor for name, tensor in results.items() if name.endswith("_new")}


def draw_gradients(net: OnnxModule, update: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    return {f"{name}_grad": torch.randn(w.shape, generator=generator) for name, w in net.weights.items()}


def test_gradients_are_clipped_to_the_global_norm_as_torch_does(tmp_path: Path) -> None:
    optimizer = Optimizer(training_optimizer_name="SGDOptimizer", max_norm_clip=0.5)
    net = make_net()
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    gradients = draw_gradients(net, 0)
    feeds = {**first_feeds(net, optimizer), **gradients, "learning_rate": torch.tensor(0.1)}
    results = call(open_session(tmp_path / "update.onnx"), feeds)
    weights = {n: w.detach().clone().requires_grad_() for n, w in net.weights.items()}
    for n, weight in weights.items():
        weight.grad = gradients[f"{n}_grad"].clone()
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
    torch.optim.SGD(weights.values(), lr=0.1).step()
    assert float(norm) > 0.5
    assert float(results["gradient_norm"]) == pytest.approx(float(norm), rel=1e-6)
    for n, weight in weights.items():
        assert largest_error(results[f"{n}_new"], weight.detach()) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, tmp_path: Path) -> None:
    optimizer = Optimizer(training_optimizer_name="AdamW")
    net = make_net()
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    feeds = {**first_feeds(net, optimizer), **draw_gradients(net, 0), "learning_rate": torch.tensor(0.1)}
    feeds["fc2.bias_grad"][1] = bad
    results = next_feeds(call(open_session(tmp_path / "update.onnx"), feeds))
    for name, tensor in results.items():
        assert torch.equal(tensor, feeds[name]), name


def test_the_model_is_valid_and_of_the_standard_alone(tmp_path: Path) -> None:
    write_optimizer_graph(make_net(), Optimizer(training_optimizer_name="Adam"), tmp_path / "update.onnx")
    model = onnx.load(tmp_path / "update.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    assert {node.domain for node in model.graph.node} == {""}
    assert model.ir_version <= 10


def test_double_weights_are_updated_in_double(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 3))
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (double[2, 3] x) => (double[2, 4] y) {
            wt = Transpose(w)
            y = MatMul(x, wt)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    net = OnnxModule(make_training_graph(ir.from_proto(model)))
    optimizer = Optimizer(training_optimizer_name="Adam")
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    gradient = torch.randn(4, 3, dtype=torch.float64)
    # 2**-7 is the same number in float32, in which the learning rate comes.
    feeds = {**first_feeds(net, optimizer), "w_grad": gradient, "learning_rate": torch.tensor(2.0**-7)}
    results = call(open_session(tmp_path / "update.onnx"), feeds)
    expected = torch.from_numpy(weight).requires_grad_()
    expected.grad = gradient
    torch.optim.Adam([expected], lr=2.0**-7).step()
    assert largest_error(results["w_new"], expected.detach()) < 1e-14


def test_names_that_clash_are_named(tmp_path: Path) -> None:
    model = create_model("mnist", variant="gemm", image_size=3, hidden=8)
    model.graph.initializers["fc1.weight"].name = "fc1.bias_grad"
    net = OnnxModule(make_training_graph(model))
    with pytest.raises(ModelError, match=r"the name 'fc1\.bias_grad' twice.*Rename it in the model"):
        write_optimizer_graph(net, Optimizer(training_optimizer_name="SGDOptimizer"), tmp_path / "update.onnx")


def test_nesterov_without_momentum_is_refused(tmp_path: Path) -> None:
    optimizer = Optimizer(training_optimizer_name="SGDOptimizer", optimizer_attributes=(rule(nesterov=True),))
    with pytest.raises(ParametersError, match="nesterov is true while momentum is 0; set a momentum"):
        write_optimizer_graph(make_net(), optimizer, tmp_path / "update.onnx")


def test_graphs_that_keep_the_weights_themselves_have_no_place_for_an_average() -> None:
    """The standard's TrainingInfoProto and device bundles."""
    words = r"is AdamWScheduleFree, and this form of training graph has no place for its average: .* with --train-step"
    with pytest.raises(ParametersError, match=words):
        refuse_average("AdamWScheduleFree")
    refuse_average("AdamW")


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind.why_no_graph], ids=lambda kind: kind.name)
def test_an_optimizer_that_is_not_written_as_a_graph(kind: OptimizerKind, tmp_path: Path) -> None:
    words = (
        f"optimizer.training_optimizer_name is {kind.name}, whose update cannot be written as an ONNX graph: "
        f"{kind.why_no_graph}. Write the training graph without it (--training-graph), or set one of SGDOptimizer, Adam"
    )
    with pytest.raises(ParametersError, match=re.escape(words)):
        write_optimizer_graph(make_net(), Optimizer(training_optimizer_name=kind.name), tmp_path / "update.onnx")
    assert not (tmp_path / "update.onnx").exists()
