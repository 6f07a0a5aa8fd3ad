"""Written `TrainingInfoProto`s: run by onward against torch's optimizers, and by the standard's reference evaluator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.aionnx_preview_training import op_adam
from torch import nn

from onward.artifacts.run_graphs import export_graphs
from onward.artifacts.training_info import write_training_info
from onward.cli import main
from onward.errors import ModelError, ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.lowering.training_info import load_training_info
from onward.models import create_model
from onward.parameters import AttributeRule, Optimizer
from tests.artifacts.plain_runtime import largest_error
from tests.initializers import stored_arrays
from tests.mlp import build_mlp, data, save_mlp, write_adam_run

DOMAIN = "ai.onnx.preview.training"
SPEC = LossSpec(type="softmax_cross_entropy", prediction="logits", label="label")
RATES = (0.1, 0.05, 0.2, 0.1)
STEPS = 20


def rule(**attributes: Any) -> AttributeRule:
    return AttributeRule(**attributes)


def write(source: Any, optimizer: Optimizer, path: Path, loss: LossSpec = SPEC, **options: Any) -> tuple[str, ...]:
    graph = make_training_graph(source, loss=loss, **options)
    stored = {name: value.const_value for name, value in graph.model.graph.initializers.items()}
    return write_training_info(graph, lambda name: torch.tensor(stored[name].numpy()), optimizer, path)


def batch(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in data(8, seed=step).items() if name in ("x", "label")}


class Original(nn.Module):
    """The same network in torch; its parameters are called as the model's initializers are."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        for tensor in model.graph.initializer:
            value = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
            if tensor.name.startswith("running"):
                self.register_buffer(tensor.name, value)
            else:
                self.register_parameter(tensor.name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.w1 + self.b1
        if hasattr(self, "scale"):
            h = self.norm(h)
        return torch.relu(h) @ self.w2 + self.b2

    def norm(self, h: torch.Tensor) -> torch.Tensor:
        """The running variance is the population's in ONNX, torch keeps the unbiased one: here by the formula."""
        mean, variance = h.mean(0), h.var(0, correction=0)
        with torch.no_grad():
            self.running_mean.copy_(0.9 * self.running_mean + 0.1 * mean)
            self.running_var.copy_(0.9 * self.running_var + 0.1 * variance)
        return (h - mean) / torch.sqrt(variance + 1e-5) * self.scale + self.shift


CASES: dict[str, tuple[Optimizer, Callable[[list[nn.Parameter]], torch.optim.Optimizer], set[str], str]] = {
    "SGD": (
        Optimizer(training_optimizer_name="SGDOptimizer", optimizer_attributes=(rule(lambda_=0.1),)),
        lambda weights: torch.optim.SGD(weights, weight_decay=0.1),
        {"Gradient"},
        "weights updated by arithmetic: 4; without momentum it is one subtraction.",
    ),
    "momentum": (
        Optimizer(training_optimizer_name="SGDOptimizer", optimizer_attributes=(rule(momentum=0.9, lambda_=0.01),)),
        lambda weights: torch.optim.SGD(weights, momentum=0.9, weight_decay=0.01),
        {"Gradient", "Momentum"},
        "weights updated by the standard's Momentum: 4.",
    ),
    "Nesterov": (
        Optimizer(training_optimizer_name="SGDOptimizer", optimizer_attributes=(rule(momentum=0.9, nesterov=True),)),
        lambda weights: torch.optim.SGD(weights, momentum=0.9, nesterov=True),
        {"Gradient", "Momentum"},
        "weights updated by the standard's Momentum: 4.",
    ),
    "Adam": (
        Optimizer(training_optimizer_name="Adam", optimizer_attributes=(rule(lambda_=0.1, epsilon=0.0),)),
        lambda weights: torch.optim.Adam(weights, weight_decay=0.1, eps=0.0),
        {"Gradient", "Adam"},
        "weights updated by the standard's Adam: 4.",
    ),
    "Adam with epsilon": (
        Optimizer(training_optimizer_name="Adam", optimizer_attributes=(rule(epsilon=1e-3),)),
        lambda weights: torch.optim.Adam(weights, eps=1e-3),
        {"Gradient"},
        "weights updated by arithmetic: 4; the standard's Adam adds epsilon to the uncorrected second moment, torch's "
        "to the corrected one.",
    ),
    "AdamW": (
        Optimizer(training_optimizer_name="AdamW", max_norm_clip=0.5, optimizer_attributes=(rule(lambda_=0.1),)),
        lambda weights: torch.optim.AdamW(weights, weight_decay=0.1),
        {"Gradient"},
        "weights updated by arithmetic: 4; the decay of the standard's Adam is not scaled by the learning rate, "
        "AdamW's is.",
    ),
}


def follow(original: Original, optimizer: torch.optim.Optimizer, clip: float | None, path: Path) -> None:
    """Twenty steps of torch next to twenty of the file."""
    training = load_training_info(path)
    training.initialize()
    assert training.inputs == ("x", "label", "learning_rate")
    for step in range(STEPS):
        features, rate = batch(step), RATES[step % len(RATES)] / 10
        results = training.step({**features, "learning_rate": torch.tensor(rate)})
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(original(features["x"]), features["label"])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(original.parameters(), clip)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert float(results["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, tensor in (*original.named_parameters(), *original.named_buffers()):
        assert largest_error(training.variables[name], tensor.detach()) < 1e-5, name
    assert int(training.variables["update_count"]) == STEPS


def nodes_in(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """With those of nested graphs: an update is a branch of one If, which skips it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_in(attribute.g)


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_equal_those_of_torchs_optimizer(name: str, tmp_path: Path) -> None:
    optimizer, make, operators, note = CASES[name]
    model = build_mlp()
    assert write(model, optimizer, tmp_path / "m.onnx") == (note,)
    written = onnx.load(tmp_path / "m.onnx")
    used = {node.op_type for node in nodes_in(written.training_info[0].algorithm) if node.domain == DOMAIN}
    assert used == operators
    original = Original(model)
    follow(original, make(list(original.parameters())), optimizer.max_norm_clip, tmp_path / "m.onnx")


def test_batch_normalization_trains_and_gives_its_running_statistics(tmp_path: Path) -> None:
    """The inference graph normalizes by running statistics, so the algorithm computes its own from there on."""
    model = build_mlp(normalized=True)
    optimizer = Optimizer(training_optimizer_name="SGDOptimizer", optimizer_attributes=(rule(momentum=0.9),))
    write(model, optimizer, tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    own = [node.op_type for node in written.training_info[0].algorithm.node]
    assert own.count("BatchNormalization") == 1
    assert own.count("Gemm") == 1, "the first Gemm is the inference graph's"
    assert [a.name for node in written.graph.node for a in node.attribute if a.name == "training_mode" and a.i] == []
    original = Original(model)
    follow(original, torch.optim.SGD(original.parameters(), momentum=0.9), None, tmp_path / "m.onnx")


def combined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inference graph and algorithm, as the standard combines them."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    del whole.training_info[:]
    algorithm = model.training_info[0].algorithm
    for field in ("node", "initializer", "input", "output", "value_info"):
        getattr(whole.graph, field).extend(getattr(algorithm, field))
    return whole


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", ["momentum", "Adam", "AdamW"])
def test_the_parts_are_valid_models(name: str, normalized: bool, tmp_path: Path) -> None:
    write(build_mlp(dropout=0.1, normalized=normalized), CASES[name][0], tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    onnx.checker.check_model(combined(model), full_check=True)
    start = onnx.ModelProto()
    start.CopyFrom(model)
    start.graph.CopyFrom(model.training_info[0].initialization)
    onnx.checker.check_model(start, full_check=True)
    bound = [entry.key for entry in model.training_info[0].update_binding]
    assert len(bound) == len(set(bound))
    assert model.ir_version >= 7


@pytest.mark.parametrize("name", ["momentum", "Adam", "AdamW"])
def test_the_reference_evaluator_computes_the_same_step(name: str, tmp_path: Path) -> None:
    """onnx's own evaluator knows no Gradient: torch's gradients are put in its node's place, five steps long."""
    optimizer, make, _, _ = CASES[name]
    model = build_mlp()
    write(model, optimizer, tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    evaluator = ReferenceEvaluator(without_gradient(written), new_ops=[Adam])
    original = Original(model)
    torchs = make(list(original.parameters()))
    binding = {entry.key: entry.value for entry in written.training_info[0].update_binding}
    state = initial_state(written)
    for step in range(5):
        features = batch(step)
        torchs.zero_grad()
        loss = nn.functional.cross_entropy(original(features["x"]), features["label"])
        loss.backward()
        gradients = {f"{n}_grad": w.grad.numpy().copy() for n, w in original.named_parameters()}
        feeds = {n: t.numpy() for n, t in features.items()} | gradients | state
        feeds["learning_rate"] = np.array(0.01, np.float32)
        results = dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))
        if optimizer.max_norm_clip is not None:
            nn.utils.clip_grad_norm_(original.parameters(), optimizer.max_norm_clip)
        torchs.param_groups[0]["lr"] = 0.01
        torchs.step()
        assert float(results["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
        state = {variable: results[value] for variable, value in binding.items()}
        for n, weight in original.named_parameters():
            assert largest_error(torch.from_numpy(state[n]), weight.detach()) < 1e-5


class Adam(OpRun):
    """The evaluator's own, whose results are float64 whatever goes in; the standard says the type of the weight."""

    op_domain = DOMAIN

    def _run(self, r: Any, t: Any, x: Any, *rest: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
        results = op_adam.Adam.eval(r, t, x, *rest, n_outputs=3, **attributes)
        return tuple(np.asarray(result, x.dtype) for result in results)


def without_gradient(model: onnx.ModelProto) -> onnx.ModelProto:
    """The combined graph; variables and gradients are inputs."""
    whole = combined(model)
    node = next(node for node in whole.graph.node if node.op_type == "Gradient")
    types = {tensor.name: tensor for tensor in whole.graph.initializer}
    for x, gradient in zip(node.input, node.output, strict=False):
        info = onnx.helper.make_tensor_value_info(gradient, types[x].data_type, types[x].dims)
        whole.graph.input.append(info)
    whole.graph.node.remove(node)
    for entry in model.training_info[0].update_binding:
        tensor = types[entry.key]
        whole.graph.input.append(onnx.helper.make_tensor_value_info(entry.key, tensor.data_type, tensor.dims))
        whole.graph.initializer.remove(tensor)
    return whole


def initial_state(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Stored weights, and what the initialization graph computes, by the reference evaluator."""
    start = onnx.ModelProto()
    start.CopyFrom(model)
    start.graph.CopyFrom(model.training_info[0].initialization)
    evaluator = ReferenceEvaluator(start)
    values = dict(zip(evaluator.output_names, evaluator.run(None, {}), strict=True))
    stored = stored_arrays(model)
    changed = {entry.key for entry in model.training_info[0].update_binding}
    first = {entry.key: values[entry.value] for entry in model.training_info[0].initialization_binding}
    return {name: array for name, array in stored.items() if name in changed} | first


def test_inference_is_as_before_and_any_runtime_reads_the_file(tmp_path: Path) -> None:
    model = build_mlp(dropout=0.3, normalized=True)
    write(model, CASES["momentum"][0], tmp_path / "m.onnx")
    x = data(8)["x"]
    before, after = (
        onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for source in (model.SerializeToString(), tmp_path / "m.onnx")
    )
    np.testing.assert_array_equal(before, after)


def test_dropout_is_on_in_the_algorithm_alone(tmp_path: Path) -> None:
    write(build_mlp(dropout=0.5), CASES["momentum"][0], tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    assert [len(node.input) for node in model.graph.node if node.op_type == "Dropout"] == [2]
    own = [node for node in model.training_info[0].algorithm.node if node.op_type == "Dropout"]
    assert [len(node.input) for node in own] == [3]
    training = load_training_info(tmp_path / "m.onnx")
    feeds = {**batch(0), "learning_rate": torch.tensor(0.0)}
    torch.manual_seed(0)
    losses = {float(training.step(feeds)["loss"]) for _ in range(4)}
    assert len(losses) == 4, "another mask at every step"


def test_weights_that_are_constant_nodes_become_initializers(tmp_path: Path) -> None:
    """Bindings can name initializers alone."""
    model = build_mlp()
    w1 = next(tensor for tensor in model.graph.initializer if tensor.name == "w1")
    model.graph.initializer.remove(w1)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w1"], value=w1))
    write(model, CASES["momentum"][0], tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    assert "w1" in {tensor.name for tensor in written.graph.initializer}
    original = Original(build_mlp())
    follow(original, CASES["momentum"][1](list(original.parameters())), None, tmp_path / "m.onnx")


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """An embedding and its transposed copy, which projects: the copy is assigned with the embedding."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (int64[n] x) => (float[n, 5] y) {
            h = Gather(w, x)
            y = MatMul(h, wt)
        }"""
    )
    w = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    model.graph.initializer.extend([onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(w.T, "wt")])
    loss = LossSpec(type="softmax_cross_entropy", prediction="y", label="label")
    write(model, CASES["momentum"][0], tmp_path / "m.onnx", loss)
    training = load_training_info(tmp_path / "m.onnx")
    features = {"x": torch.arange(5), "label": torch.tensor([1, 2, 3, 4, 0])}
    weight = torch.from_numpy(w.copy()).requires_grad_()
    torchs = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(5):
        training.step({**features, "learning_rate": torch.tensor(0.1)})
        torchs.zero_grad()
        nn.functional.cross_entropy(weight @ weight.T, features["label"]).backward()
        torchs.step()
    assert largest_error(training.variables["w"], weight.detach()) < 1e-5
    assert torch.equal(training.variables["wt"], training.variables["w"].T)


def test_repetitions_of_a_bias_stay_tied(tmp_path: Path) -> None:
    """A bias and what an exporter repeated of it for two samples: one weight, and both are assigned."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x) => (float[2, 3] y)
        <float[3] b = {1, 2, 3}, float[2, 3] r = {1, 2, 3, 1, 2, 3}> { h = Mul(x, b) y = Add(h, r) }"""
    )
    repeated = onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, [2, 3])
    repeated.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value="['b', 'w']")
    model.graph.value_info.append(repeated)
    loss = LossSpec(type="mean_squared_error", prediction="y", label="label")
    write(model, CASES["momentum"][0], tmp_path / "m.onnx", loss)
    training = load_training_info(tmp_path / "m.onnx")
    features = {"x": torch.randn(2, 3), "label": torch.randn(2, 3)}
    bias = torch.tensor([1.0, 2, 3], requires_grad=True)
    torchs = torch.optim.SGD([bias], lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        training.step({**features, "learning_rate": torch.tensor(0.1)})
        torchs.zero_grad()
        nn.functional.mse_loss(features["x"] * bias + bias, features["label"]).backward()
        torchs.step()
    assert largest_error(training.variables["b"], bias.detach()) < 1e-5
    assert torch.equal(training.variables["r"], training.variables["b"].expand(2, 3))


def test_a_transformer_trains_as_onward_trains_it(tmp_path: Path) -> None:
    """GPT-2 of one layer: what the file's training gives is what autograd gives for the same model."""
    model = create_model("gpt2", layers=1, width=16, heads=2, vocab_size=13, context_length=12, dropout=0.0)
    loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    optimizer = Optimizer(training_optimizer_name="AdamW", optimizer_attributes=(rule(lambda_=0.1),))
    write(model, optimizer, tmp_path / "m.onnx", loss)
    graph = make_training_graph(model, loss=loss)
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,)).train()
    torchs = torch.optim.AdamW(net.weights.values(), lr=0.01, weight_decay=0.1)
    training = load_training_info(tmp_path / "m.onnx")
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        features = {name: torch.randint(0, 13, (2, 7), generator=generator) for name in ("input_ids", "labels")}
        results = training.step({**features, "learning_rate": torch.tensor(0.01)})
        torchs.zero_grad()
        expected = net(**features)
        expected.backward()
        torchs.step()
        assert float(results["loss"]) == pytest.approx(float(expected.detach()), rel=1e-5)
    # Adam divides by the gradient's size: what rounding leaves of a gradient of zero moves a weight, too.
    moved = [largest_error(training.variables[name], weight.detach()) for name, weight in net.weights.items()]
    assert sorted(moved)[-2] < 1e-4


# ---------------------------------------------------------------------- what cannot be written


def test_an_opset_before_training_info_is_refused(tmp_path: Path) -> None:
    model = build_mlp()
    model.opset_import[0].version = 11
    with pytest.raises(ModelError, match=r"needs opset 12 or newer; the model is of opset 11\. Convert it with"):
        write(model, CASES["momentum"][0], tmp_path / "m.onnx")


def test_batch_normalization_of_an_old_opset_is_refused(tmp_path: Path) -> None:
    model = build_mlp(normalized=True)
    model.opset_import[0].version = 13
    with pytest.raises(ModelError, match=r"node 'norm' \(BatchNormalization\) is of opset 13; .* only from opset 14"):
        write(model, CASES["momentum"][0], tmp_path / "m.onnx")


def test_a_type_that_gradient_does_not_take_is_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (bfloat16[n, 2] x) => (bfloat16[n, 2] y) { y = Mul(x, w) }"""
    )
    model.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, [2], [1.0, 2.0]))
    loss = LossSpec(type="mean_squared_error", prediction="y", label="label")
    with pytest.raises(ModelError, match=r"the weight 'w' is BFLOAT16; the standard's Gradient takes FLOAT16, FLOAT"):
        write(model, CASES["momentum"][0], tmp_path / "m.onnx", loss)


def test_a_row_that_is_stored_for_each_sample_is_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 17]> g (float[2, 3] x) => (float[2, 3] y)
        <float[2, 3] expand = {1, 2, 3, 1, 2, 3}> { y = Mul(x, expand) }"""
    )
    row = onnx.helper.make_tensor_value_info("expand", onnx.TensorProto.FLOAT, [2, 3])
    row.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value="['net.token']")
    model.graph.value_info.append(row)
    loss = LossSpec(type="mean_squared_error", prediction="y", label="label")
    with pytest.raises(ModelError, match=r"the weight 'expand' is one row that the model stores once for each sample"):
        write(model, CASES["momentum"][0], tmp_path / "m.onnx", loss)


def test_a_name_that_the_model_has_already_is_named(tmp_path: Path) -> None:
    model = build_mlp()
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = "w1_momentum_buffer" if name == "active" else name
    with pytest.raises(ModelError, match=r"needs the name 'w1_momentum_buffer', which is already a value of the model"):
        write(model, CASES["momentum"][0], tmp_path / "m.onnx")


def test_a_weight_of_a_nested_graph_is_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (bool c, float[n, 2] x) => (float[n, 2] y) {
            y = If(c) <
                then_branch = t () => (float[n, 2] a) { w = Constant<value = float[2] {1.0, 2.0}>() a = Mul(x, w) },
                else_branch = e () => (float[n, 2] b) { b = Identity(x) }
            >
        }"""
    )
    loss = LossSpec(type="mean_squared_error", prediction="y", label="label")
    with pytest.raises(ModelError, match=r"the weight 'w' belongs to a nested graph .* Put it in weights_not_to_train"):
        write(model, CASES["momentum"][0], tmp_path / "m.onnx", loss, weights_to_train=("w",))


def test_moments_that_no_file_can_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.artifacts.training_info._LARGEST_MOMENTS_BYTES", 100)
    with pytest.raises(ModelError, match=r"the moments of this optimizer take 376 bytes, .* 100 bytes are the most"):
        write(build_mlp(), CASES["momentum"][0], tmp_path / "m.onnx")


# ---------------------------------------------------------------------- the command line


def test_the_command_line_writes_it_and_says_what_it_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run, path = save_mlp(tmp_path), write_adam_run(tmp_path), tmp_path / "carrying.onnx"
    assert main(["export", str(model), "--run", str(run), "--training-info", str(path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("weights updated by arithmetic: 4; the standard's Adam adds epsilon")
    assert second == f"wrote {path}"
    assert load_training_info(path).inputs == ("x", "label", "learning_rate")


def test_it_does_not_accumulate_gradients(tmp_path: Path) -> None:
    model, run = save_mlp(tmp_path), write_adam_run(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(ParametersError, match=r"steps is 2; a TrainingInfoProto updates the weights at every call"):
        export_graphs(model, run, training_info=tmp_path / "m.onnx")
