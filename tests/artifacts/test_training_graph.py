"""Training graphs run by stock onnxruntime: loss, gradients and running statistics equal to training's own."""

from __future__ import annotations

import functools
import io
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from onward.artifacts.training_graph import build_training_graph, write_train_step, write_training_graph
from onward.data.batches import Batch, DataCursor
from onward.engine.gradient_reduction import GradientReduction
from onward.engine.inputs.loss_normalization import LossNormalization
from onward.engine.micro_batches import SequentialMicroBatches
from onward.engine.network.forward import Forward
from onward.engine.network.local_weights import local_weights
from onward.engine.network.network import unsplit_network
from onward.engine.network.precision import Precision
from onward.engine.state import TrainState
from onward.engine.steps import Steps, WatchedNames
from onward.errors import ModelError, ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.optim.building import make_optimizer
from onward.parallel.launch.process import in_world_of_one
from onward.parameters import AttributeRule, Loss, MixedPrecision, Optimizer, Training
from onward.parameters.distributed import Distributed
from tests.artifacts.plain_runtime import autograd_gradients, call, largest_error, open_session
from tests.initializers import stored_arrays

Features = dict[str, torch.Tensor]


class ResidualNet(nn.Module):
    """ResNet's parts: strided stem with batch norm, overlapping maximum pooling, two residual blocks, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 7, 2, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.first = nn.Sequential(nn.Conv2d(6, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6))
        self.second = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.shortcut = nn.Sequential(nn.Conv2d(6, 8, 1, 2, bias=False), nn.BatchNorm2d(8))
        self.classes = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(images))
        x = torch.relu(x + self.first(x))
        x = torch.relu(self.shortcut(x) + self.second(x))
        return self.classes(x.mean((2, 3)))


class LSTMNet(nn.Module):
    """An embedding, an LSTM and a projection at every step of time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.classes = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.classes(self.lstm(self.embedding(tokens))[0])


class OddConvolutions(nn.Module):
    """Depthwise, grouped, dilated and transposed convolutions, average pooling, resizing, group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4)
        self.dilated = nn.Conv2d(8, 8, 3, dilation=2, padding=2, groups=2)
        self.norm = nn.GroupNorm(2, 8)
        self.transposed = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.inner, self.outer = nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AvgPool2d(3, 2, 1, ceil_mode=True)
        self.strided = nn.Conv2d(6, 6, 5, stride=3)
        self.classes = nn.Linear(6, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.depthwise(images))
        x = self.transposed(nn.functional.gelu(self.norm(self.dilated(x))))
        x = self.inner(x) + self.outer(x)[:, :, :5, :5]
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.classes(self.strided(x).mean((2, 3)))


class LargestOfEqualOnes(nn.Module):
    """Which of two equal values comes first decides what it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shares = nn.Linear(6, 5), nn.Parameter(torch.randn(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = self.first(x).repeat(1, 2).topk(5, -1)
        return values * self.shares[places]


def export(module: nn.Module, example: torch.Tensor) -> onnx.ModelProto:
    """By torch's exporter, batch normalization left as it is."""
    stored = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this exporter is deprecated; the other one folds batch normalization away
        torch.onnx.export(
            module,
            (example,),
            stored,
            dynamo=False,
            opset_version=17,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=["X"],
            output_names=["Y"],
            dynamic_axes={"X": {0: "batch"}},
        )
    return onnx.load_model_from_string(stored.getvalue())


def cross_entropy(prediction: str) -> LossSpec:
    return LossSpec(type="softmax_cross_entropy", prediction=prediction, label="labels")


@dataclass(frozen=True)
class Written:
    """A network, its training graph, and a function that draws features for a batch size."""

    net: OnnxModule
    path: Path
    draw: Callable[[int], Features]


def images(*shape: int, labels: int) -> Callable[[int], Features]:
    return lambda batch: {"X": torch.randn(batch, *shape), "labels": torch.randint(0, labels, (batch,))}


def tokens(name: str, count: int, length: int, labels: int) -> Callable[[int], Features]:
    def draw(batch: int) -> Features:
        return {
            name: torch.randint(0, count, (batch, length)),
            "labels": torch.randint(0, labels, (batch, length)),
        }

    return draw


def make_case(name: str) -> tuple[OnnxModule, Callable[[int], Features]]:
    torch.manual_seed(4)
    if name == "gpt2":
        model = create_model("gpt2", layers=1, width=16, heads=2, vocab_size=13, context_length=12, dropout=0.0)
        spec, draw = cross_entropy("logits"), tokens("input_ids", 13, 9, 13)
    elif name == "mnist":
        model = create_model("mnist", variant="conv", image_size=6, hidden=8, dropout=0.0)
        spec, draw = cross_entropy("predictions"), images(1, 6, 6, labels=10)
    else:
        modules = {
            "resnet": (ResidualNet, images(3, 20, 20, labels=5)),
            "lstm": (LSTMNet, tokens("X", 11, 3, 5)),
            "largest": (LargestOfEqualOnes, images(6, labels=5)),
            "convolutions": (OddConvolutions, images(4, 9, 9, labels=5)),
        }
        module, draw = modules[name]
        model, spec = export(module(), draw(2)["X"]), cross_entropy("Y")
    graph = make_training_graph(model, loss=spec)
    assert graph.loss is not None
    return OnnxModule(graph, (graph.loss,)).train(), draw


@functools.cache
def written(name: str) -> Written:
    """A case, its graph written with every size open."""
    net, draw = make_case(name)
    path = Path(tempfile.mkdtemp()) / f"{name}.onnx"
    write_training_graph(net, path)
    return Written(net, path, draw)


SHORT = "mnist"
CASES = (
    SHORT,
    "largest",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "resnet", "lstm", "convolutions")),
)
"""A network takes some seconds to be traced and translated: the short run has two, with a convolution and pooling, and
with sorting."""


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_training_for_any_batch_size(name: str) -> None:
    case = written(name)
    session = open_session(case.path)
    for batch in (1, 5):
        torch.manual_seed(batch)
        features = case.draw(batch)
        own = case.net.tensors_by_name()
        states = {state: own[state].clone() for state in case.net.graph.states}
        results = call(session, {**features, **states})
        expected = autograd_gradients(case.net, features)
        assert results.keys() == expected.keys()
        for output, tensor in expected.items():
            assert largest_error(results[output], tensor) < 2e-5, output


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_valid_and_of_the_standard_alone(name: str) -> None:
    model = onnx.load(written(name).path)
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    assert model.ir_version <= 10


def test_weights_are_inputs_with_their_present_values_as_default() -> None:
    case = written(SHORT)
    model = onnx.load(case.path)
    inputs = {value.name for value in model.graph.input}
    initializers = stored_arrays(model)
    for name, weight in case.net.weights.items():
        assert name in inputs
        assert torch.equal(torch.from_numpy(initializers[name].copy()), weight.detach())
    features = case.draw(2)
    session = open_session(case.path)
    with torch.no_grad():
        moved = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in case.net.weights.items()}
        expected = torch.func.functional_call(case.net, moved, kwargs=features)
    assert float(call(session, {**features, **moved})["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert abs(float(call(session, features)["loss"]) - float(expected)) > 1e-3


@pytest.mark.slow
def test_features_keep_the_models_names_of_their_sizes() -> None:
    graph = onnx.load(written("gpt2").path).graph
    shapes = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert shapes["input_ids"] == ["batch", "sequence"]
    assert shapes["labels"] == ["batch", "sequence"]


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_the_machine_is_in_the_file(name: str) -> None:
    """The exporter notes where in the source every node comes from."""
    data = written(name).path.read_bytes()
    assert b".py" not in data
    assert str(Path(torch.__file__).parent).encode() not in data


def test_dropout_draws_one_mask_for_forward_and_backward_pass() -> None:
    """y = sum(dropout(w * x)): where an element is dropped its gradient is 0, else x / (1 - ratio)."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13]> g (float[n, 4000] x) => (float loss) {
            wx = Mul(x, w)
            d = Dropout(wx, r, t)
            loss = ReduceSum<keepdims=0>(d)
        }"""
    )
    weight = torch.rand(4000) + 0.5
    for name, tensor in (("r", torch.tensor(0.25)), ("t", torch.tensor(True)), ("w", weight)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(tensor.numpy(), name))
    graph = make_training_graph(model, loss=LossSpec(type="output", prediction="loss"))
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,)).train()
    with tempfile.TemporaryDirectory() as folder:
        write_training_graph(net, Path(folder) / "dropout.onnx")
        session = open_session(Path(folder) / "dropout.onnx")
    results = call(session, {"x": torch.full((1, 4000), 3.0)})
    gradient = results["w_grad"]
    kept = gradient != 0
    assert torch.allclose(gradient[kept], torch.tensor(4.0))
    assert 0.22 < float((~kept).float().mean()) < 0.28
    assert float(results["loss"]) == pytest.approx(float((weight * gradient).sum()), rel=1e-5)


# ---------------------------------------------------------------------- the entire step


def follow(name: str, optimizer: Optimizer, sizes: dict[str, int], tmp_path: Path) -> float:
    """Trains with the step graph in onnxruntime and with onward's own steps; the largest difference of 50 losses."""
    net, draw = make_case(name)
    write_train_step(net, optimizer, tmp_path / "step.onnx", sizes)
    session = open_session(tmp_path / "step.onnx")
    assert net.graph.loss_names is not None
    network = unsplit_network(net)
    mesh = in_world_of_one()
    state = TrainState(
        networks=[network],
        weights=local_weights([network], mesh, {}, {}, {}),
        optimizer=make_optimizer(optimizer, dict(net.weights.items())),
        loss_scale=None,
        mesh=mesh,
    )
    state.train()
    forward = Forward(network, (net.graph.loss_names.loss,), Precision.of(MixedPrecision()))
    reduction = GradientReduction(mesh=state.mesh, distributed=Distributed())
    shares = LossNormalization(state.mesh, Loss(type="output"), net.graph.loss_names, Training(batch_size=4), False)
    training = Steps(
        state, SequentialMicroBatches(forward, shares, reduction), 1, optimizer.max_norm_clip, WatchedNames(), reduction
    )
    batches = [draw(4) for _ in range(5)]
    feeds: Features = {"update_count": torch.tensor(0)}
    for node in session.get_inputs():
        if node.name.endswith(("_exp_avg", "_exp_avg_sq", "_momentum_buffer")):
            feeds[node.name] = torch.zeros(node.shape)
    worst, losses = 0.0, []
    for step in range(50):
        features, rate = batches[step % 5], 0.01 * (1 + step % 3)
        # The first call leaves the weights out: their defaults are the ones the training begins with.
        results = call(session, {**feeds, **features, "learning_rate": torch.tensor(rate)})
        feeds = {name.removesuffix("_new"): t for name, t in results.items() if name.endswith("_new")}
        batch = Batch(
            features={name: t.numpy() for name, t in features.items()}, cursor=DataCursor(), sample_count=4, epoch=0
        )
        own = training.update(batch, rate, watch=False)
        assert float(results["gradient_norm"]) == pytest.approx(own.gradient_norm, rel=1e-3)
        losses.append(training.take_mean_loss())
        worst = max(worst, abs(float(results["loss"]) - losses[-1]))
    assert losses[-1] < 0.7 * losses[0]
    return worst


@pytest.mark.slow
def test_fifty_steps_of_adamw_follow_training(tmp_path: Path) -> None:
    """GPT-2, every size fixed, clipped, decay for some weights."""
    rules = (AttributeRule(lambda_=0.1, beta=0.95), AttributeRule(weights="*ln*", lambda_=0.0))
    optimizer = Optimizer(training_optimizer_name="AdamW", max_norm_clip=1.0, optimizer_attributes=rules)
    assert follow("gpt2", optimizer, {"batch": 4, "sequence": 9}, tmp_path) < 1e-4


def test_fifty_steps_of_momentum_follow_training_with_running_statistics(tmp_path: Path) -> None:
    optimizer = Optimizer(training_optimizer_name="SGDOptimizer", optimizer_attributes=(AttributeRule(momentum=0.9),))
    assert follow("mnist", optimizer, {}, tmp_path) < 1e-4


# ---------------------------------------------------------------------- what cannot be written


def test_a_size_that_no_input_has_is_named() -> None:
    net, _ = make_case("mnist")
    with pytest.raises(ParametersError, match=r"'sequence' is no symbolic dimension .* they have: batch"):
        build_training_graph(net, {"sequence": 3})


DECIDED_BY_A_TABLE = """
    table = Constant<value_ints=[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]>()
    places = Slice(table, zero, time, zero)
    row = Gather<axis=0>(w, places)
    y = Mul(x, row)
"""
DECIDED_BY_A_BRANCH = """
    two = Constant<value_ints=[2]>()
    is_long = Greater(time, two)
    chosen = Squeeze(is_long)
    short = Slice(w, zero, one, zero)
    y = If(chosen)<
        then_branch = a () => (float[batch, time] ya) { ya = Mul(x, short) },
        else_branch = b () => (float[batch, time] yb) { yb = Add(x, short) }
    >
"""


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (DECIDED_BY_A_TABLE, r"cannot leave 'time' open.*Set its size in training\.mapped_dimensions"),
        (
            DECIDED_BY_A_BRANCH,
            r"an? .*If takes one branch or the other by a size that is open.*training\.mapped_dimensions",
        ),
    ],
    ids=["table", "branch"],
)
def test_a_size_that_decides_what_is_computed_must_be_given(nodes: str, words: str) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 14]> g (float[batch, time] x) => (float[batch, time] y) {
            zero = Constant<value_ints=[0]>()
            one = Constant<value_ints=[1]>()
            shape = Shape(x)
            time = Gather<axis=0>(shape, one)"""
        + nodes
        + "}"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(torch.rand(10).numpy(), "w"))
    spec = LossSpec(type="mean_squared_error", prediction="y", label="label")
    graph = make_training_graph(model, loss=spec)
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,)).train()
    with pytest.raises(ModelError, match=words):
        build_training_graph(net)
    assert build_training_graph(net, {"time": 3}).graph.inputs[0].shape == ("batch", 3)


def test_an_operator_without_translation_is_named() -> None:
    """The backward pass of a determinant inverts the matrix, which ONNX cannot."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13]> g (float[batch, 2, 2] x) => (float[batch] y) {
            m = MatMul(x, w)
            y = Det(m)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(torch.rand(2, 2).numpy(), "w"))
    graph = make_training_graph(model, loss=LossSpec(type="output", prediction="y"))
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,)).train()
    with pytest.raises(
        ModelError, match=r"torch's exporter reports: .*aten.*linalg.*Train this model with `onward train`"
    ):
        build_training_graph(net)
