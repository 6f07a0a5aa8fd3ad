"""Files of scikit-learn, from the file to the trained file: outputs, notes, training, what export leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingClassifier,
)
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, SGDClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Binarizer, MinMaxScaler, Normalizer, OneHotEncoder, PolynomialFeatures, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC

import onward
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError
from onward.lowering.inspection import describe
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.fitted_models import SAMPLES, convert, flowers, nodes_of, run
from tests.mlp import ON_ONE_THREAD
from tests.watching import Recorder

pytest.importorskip("sklearn", reason="scikit-learn is not installed")


pytest.importorskip("skl2onnx", reason="skl2onnx is not installed")


SHORT = {"max_iter": 3, "random_state": 0}


FEW = {"n_estimators": 5, "random_state": 0}


CLASSIFIERS: dict[str, Any] = {
    "logistic": lambda: LogisticRegression(**SHORT),
    "scaled_logistic": lambda: make_pipeline(StandardScaler(), LogisticRegression(**SHORT)),
    "normalized_logistic": lambda: make_pipeline(Normalizer(), LogisticRegression(**SHORT)),
    "binarized_logistic": lambda: make_pipeline(Binarizer(threshold=2.0), LogisticRegression(**SHORT)),
    "polynomial_logistic": lambda: make_pipeline(PolynomialFeatures(), LogisticRegression(**SHORT)),
    "reduced_logistic": lambda: make_pipeline(MinMaxScaler(), PCA(2), LogisticRegression(**SHORT)),
    "stacked_logistic": lambda: StackingClassifier([("a", LogisticRegression(**SHORT))], LogisticRegression(**SHORT)),
    "mlp": lambda: MLPClassifier((8,), **SHORT),
    "sgd": lambda: make_pipeline(StandardScaler(), SGDClassifier(**SHORT)),
    "sgd_logistic": lambda: make_pipeline(StandardScaler(), SGDClassifier(loss="log_loss", alpha=1.0, **SHORT)),
    "linear_svc": lambda: LinearSVC(**SHORT),
    "svc": lambda: SVC(),
    "svc_linear_kernel": lambda: SVC(kernel="linear"),
    "svc_polynomial": lambda: SVC(kernel="poly", coef0=0.5),
    "naive_bayes": lambda: GaussianNB(),
}


REGRESSORS: dict[str, Any] = {
    "linear": lambda: LinearRegression(),
    "ridge": lambda: make_pipeline(StandardScaler(), Ridge(alpha=50.0)),
    "mlp": lambda: MLPRegressor(hidden_layer_sizes=(8,), **SHORT),
    "svr": lambda: SVR(C=0.1),
    "svr_sigmoid": lambda: make_pipeline(StandardScaler(), SVR(kernel="sigmoid", C=0.1)),
}


FROZEN: dict[str, Any] = {
    "boosted": lambda: GradientBoostingClassifier(**FEW),
    "forest": lambda: RandomForestClassifier(**FEW),
    "neighbors": lambda: KNeighborsClassifier(7),
}


RATES = {"svc": 1e-3, "svc_linear_kernel": 1e-4, "svc_polynomial": 1e-4, "naive_bayes": 1e-4}
"""Learning rates of fitted models whose numbers are large, or near their best; 0.02 for the others."""


TOLERANCES = dict.fromkeys(("svc", "svc_linear_kernel", "svc_polynomial"), 5e-5)
"""onnxruntime sums the decisions of support vectors up in float64; 1e-5 for the others."""


def prediction_of(path: Path) -> str:
    return onnx.load(path).graph.output[-1].name


def assert_same_outputs(path: Path, x: np.ndarray, tolerance: float = 1e-5) -> onward.lowering.module.OnnxModule:
    """Every output that is computed equals onnxruntime's; labels exactly."""
    net = onward.to_torch(path)
    expected = run(path, {"X": x})
    with torch.no_grad():
        results = net(torch.from_numpy(x))
    results = results if isinstance(results, tuple) else (results,)
    names = [str(value.name) for value in net.graph.model.graph.outputs]
    assert names == [name for name in expected if name not in net.graph.left_out]
    for name, result in zip(names, results, strict=True):
        scale = max(1.0, float(np.abs(expected[name]).max()))
        np.testing.assert_allclose(result.numpy(), expected[name], atol=tolerance * scale, rtol=0, err_msg=name)
    return net


def train(path: Path, features: dict[str, np.ndarray], loss: dict[str, Any], rate: float = 0.02) -> list[float]:
    """Thirty steps over all samples at once; the trained model is `fitted_trained.onnx` next to the file."""
    recorder = Recorder()
    sections = {
        "paths": {"model_path": path, "output_dir": path.parent},
        "loss": loss,
        "training": {"batch_size": SAMPLES, "num_train_steps": 30, "display_loss_steps": 1},
        "learning_rate": {"initial_lr": rate},
        "optimizer": {"training_optimizer_name": "Adam"},
    }
    runner = TrainingRunner(Parameters.from_mapping(sections), ON_ONE_THREAD, [recorder])
    runner.initialize()
    runner.run(InMemoryDataLoader(features))
    runner.end_training()
    return recorder.losses


def assert_exported_as_trained(path: Path, x: np.ndarray, tolerance: float = 1e-5) -> None:
    """The trained file runs in onnxruntime, equals its net, and has nodes and outputs of the user's own file."""
    trained = path.with_name("fitted_trained.onnx")
    assert_same_outputs(trained, x, tolerance)
    before, after = onnx.load(path), onnx.load(trained)
    assert [one.SerializeToString() for one in before.graph.output] == [
        one.SerializeToString() for one in after.graph.output
    ]
    assert [(n.op_type, list(n.input), list(n.output)) for n in before.graph.node] == [
        (n.op_type, list(n.input), list(n.output)) for n in after.graph.node
    ]
    numbers = {"coefficients", "intercepts", "offset", "scale", "support_vectors", "rho"}
    for old, new, bytes_before, bytes_after in zip(
        before.graph.node, after.graph.node, nodes_of(before), nodes_of(after), strict=True
    ):
        assert bytes_before == bytes_after or any(a.name in numbers for a in old.attribute), old.op_type
        assert [a.name for a in old.attribute] == [a.name for a in new.attribute]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_computes_trains_and_exports(name: str, tmp_path: Path) -> None:
    x, classes, _ = flowers()
    path = convert(CLASSIFIERS[name](), classes, tmp_path)
    tolerance = TOLERANCES.get(name, 1e-5)
    assert_same_outputs(path, x, tolerance)
    loss = {"type": "softmax_cross_entropy", "prediction": prediction_of(path), "label": "species"}
    learned = np.roll(classes, 10)  # not the classes that it was fitted to
    losses = train(path, {"X": x, "species": learned}, loss, RATES.get(name, 0.02))
    # The votes of support vectors are steps, at which the loss jumps.
    assert (min(losses) if name.startswith("svc") else losses[-1]) < losses[0]
    assert_exported_as_trained(path, x, tolerance)


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_regressor_computes_trains_and_exports(name: str, tmp_path: Path) -> None:
    x, _, numbers = flowers()
    path = convert(REGRESSORS[name](), numbers[:, 0], tmp_path)
    assert_same_outputs(path, x)
    loss = {"type": "mean_squared_error", "prediction": prediction_of(path), "label": "number"}
    moved = numbers + x[:, 3:]  # fitted to other numbers than it trains on
    losses = train(path, {"X": x, "number": moved}, loss)
    assert losses[-1] < losses[0]
    assert_exported_as_trained(path, x)


@pytest.mark.parametrize("two", [LogisticRegression(**SHORT), MLPClassifier((8,), **SHORT), LinearSVC(**SHORT)])
def test_two_classes(two: Any, tmp_path: Path) -> None:
    x, classes, _ = flowers()
    assert_same_outputs(convert(two, (classes > 0).astype(np.int64), tmp_path), x)


def test_probabilities_of_a_support_vector_machine(tmp_path: Path) -> None:
    """The pairwise coupling stops at a tolerance; a row that stops a round later than in onnxruntime differs by it."""
    x, classes, _ = flowers()
    for target in (classes, (classes > 0).astype(np.int64)):
        net = assert_same_outputs(convert(SVC(probability=True, random_state=0), target, tmp_path), x, 1e-4)
        assert {name.rpartition(".")[2] for name in net.weights} == {
            "support_vectors", "coefficients", "rho", "prob_a", "prob_b",
        }  # fmt: skip


@pytest.mark.parametrize("name", FROZEN)
def test_fitted_trees_and_neighbors_compute_and_stay(name: str, tmp_path: Path) -> None:
    x, classes, _ = flowers()
    path = convert(FROZEN[name](), classes, tmp_path)
    net = assert_same_outputs(path, x)
    assert not net.weights
    onward.export(net, tmp_path / "again.onnx")
    assert_same_outputs(tmp_path / "again.onnx", x)
    if name != "neighbors":
        assert nodes_of(onnx.load(path)) == nodes_of(onnx.load(tmp_path / "again.onnx"))
        assert set(net.graph.frozen.values()) == {"fitted trees, whose splits have no gradient"}


@pytest.mark.parametrize("estimator", [GradientBoostingRegressor(**FEW), RandomForestRegressor(**FEW)])
def test_regression_trees(estimator: Any, tmp_path: Path) -> None:
    x, _, numbers = flowers()
    assert_same_outputs(convert(estimator, numbers[:, 0], tmp_path), x)
    assert_same_outputs(convert(RandomForestRegressor(**FEW), np.hstack([numbers, -numbers]), tmp_path), x)


def test_a_layer_after_frozen_trees_trains(tmp_path: Path) -> None:
    """A frozen feature extractor: the linear model over a forest's probabilities."""
    x, classes, _ = flowers()
    stacked = StackingClassifier([("forest", RandomForestClassifier(max_depth=1, **FEW))], LogisticRegression(**SHORT))
    path = convert(stacked, classes, tmp_path)
    net = assert_same_outputs(path, x)
    assert {name.rpartition(".")[2] for name in net.weights} == {"coefficients", "intercepts"}
    loss = {"type": "softmax_cross_entropy", "prediction": "output_probability", "label": "label"}
    losses = train(path, {"X": x, "label": classes}, loss)
    assert losses[-1] < losses[0]
    assert_exported_as_trained(path, x)


def test_labels_that_are_strings_are_left_as_they_are(tmp_path: Path) -> None:
    x, classes, _ = flowers()
    path = convert(LogisticRegression(**SHORT), np.array(["iris", "rose", "tulip"])[classes], tmp_path)
    net = assert_same_outputs(path, x)
    assert list(net.graph.left_out) == ["output_label"]
    notes = " ".join(net.graph.notes)
    assert "the output 'output_label' is not computed: " in notes
    assert "It stays unchanged in the exported model." in notes
    assert "'iris', 'rose', 'tulip'" in notes
    loss = {"type": "softmax_cross_entropy", "prediction": "output_probability", "label": "label"}
    losses = train(path, {"X": x, "label": classes}, loss)
    assert losses[-1] < losses[0]
    labels = run(tmp_path / "fitted_trained.onnx", {"X": x})["output_label"]
    assert set(labels) <= {"iris", "rose", "tulip"}
    assert_exported_as_trained(path, x)


def test_a_loss_of_labels_names_what_can_be_trained(tmp_path: Path) -> None:
    x, classes, _ = flowers()
    path = convert(LogisticRegression(**SHORT), np.array(["a", "b", "c"])[classes], tmp_path)
    loss = {"type": "softmax_cross_entropy", "prediction": "output_label", "label": "label"}
    with pytest.raises(
        ModelError, match=r"'output_label', which cannot be computed: .*Set it to .*'output_probability'"
    ):
        train(path, {"X": x, "label": classes}, loss)


def test_inspect_shows_the_file_and_what_trains(tmp_path: Path) -> None:
    _, classes, _ = flowers()
    text = describe(convert(make_pipeline(StandardScaler(), LogisticRegression(**SHORT)), classes, tmp_path))
    for part in (
        "sequence of maps int64 -> float32", "LinearClassifier.coefficients", "Scaler.scale", "ai.onnx.ml.ZipMap 1",
        "a sequence of maps in the file",
    ):  # fmt: skip
        assert part in text
    assert "Cannot be lowered" not in text


def test_columns_of_categories(tmp_path: Path) -> None:
    """Integers in a table of floats: one-hot vectors of some columns next to the others, scaled."""
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.integers(0, 3, (SAMPLES, 2)), generator.standard_normal((SAMPLES, 2))], axis=1)
    x = x.astype(np.float32)
    classes = (x[:, 0] == 1).astype(np.int64)
    columns = ColumnTransformer([("one_hot", OneHotEncoder(), [0, 1]), ("scaled", StandardScaler(), [2, 3])])
    path = convert(make_pipeline(columns, LogisticRegression(**SHORT)), classes, tmp_path, x)
    assert_same_outputs(path, x)
    loss = {"type": "softmax_cross_entropy", "prediction": "output_probability", "label": "label"}
    losses = train(path, {"X": x, "label": classes}, loss)
    assert losses[-1] < losses[0]
    assert_exported_as_trained(path, x)


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
@pytest.mark.parametrize("kind", ["three", "two", "number"])
def test_boosted_trees_of_other_libraries(library: str, kind: str) -> None:
    """Files of onnxmltools: labels exactly, scores to 1e-5."""
    converters = pytest.importorskip("onnxmltools", reason="onnxmltools is not installed")
    boosting = pytest.importorskip(library, reason=f"{library} is not installed")
    types = pytest.importorskip("onnxmltools.convert.common.data_types")
    x, classes, numbers = flowers()
    target = {"three": classes, "two": (classes > 0).astype(np.int64), "number": numbers[:, 0]}[kind]
    name = ("LGBM" if library == "lightgbm" else "XGB") + ("Regressor" if kind == "number" else "Classifier")
    quiet = {"verbose": -1} if library == "lightgbm" else {}
    estimator = getattr(boosting, name)(n_estimators=5, **quiet).fit(x, target)
    model = getattr(converters, f"convert_{library}")(
        estimator, initial_types=[("input", types.FloatTensorType([None, 4]))], target_opset=15
    )
    expected = run(model, {"input": x})
    net = onward.to_torch(model)
    results = net(torch.from_numpy(x))
    for result, array in zip(results if isinstance(results, tuple) else (results,), expected.values(), strict=True):
        np.testing.assert_allclose(result.numpy(), array, atol=1e-5, rtol=0)
