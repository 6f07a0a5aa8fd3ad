"""Operators of ai.onnx.ml: every attribute against onnxruntime, gradients against finite differences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onward
from onward.errors import ModelError, NodeError, OperatorError
from tests.fitted_models import run

X = np.array([[0.3, 0.1], [-0.2, 0.4], [0.0, 0.0], [2.0, -3.0]], np.float32)
SCORES_OF = {"LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"}
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")


def model_of(
    op_type: str, x: np.ndarray = X, version: int = 1, label_type: int = TensorProto.INT64, **attributes: Any
) -> onnx.ModelProto:
    """One node over an input `x`."""
    outputs = ["label", "scores"] if op_type in SCORES_OF else ["y"]
    node = helper.make_node(op_type, ["x"], outputs, name="node", domain="ai.onnx.ml", **attributes)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    inputs = [helper.make_tensor_value_info("x", kind, ["n", *x.shape[1:]])]
    types = {"label": label_type, "scores": TensorProto.FLOAT}
    infos = [helper.make_tensor_value_info(name, types.get(name, TensorProto.UNDEFINED), None) for name in outputs]
    if len(outputs) == 1:
        infos = [onnx.ValueInfoProto(name="y")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", version)]
    return helper.make_model(helper.make_graph([node], "g", inputs, infos), opset_imports=opsets, ir_version=8)


def check(
    op_type: str, x: np.ndarray = X, tolerance: float = 2e-6, **attributes: Any
) -> onward.lowering.module.OnnxModule:
    """What a node gives equals what onnxruntime gives, in value, shape and type."""
    model = model_of(op_type, x, **attributes)
    expected = run(model, {"x": x})
    net = onward.to_torch(model)
    with torch.no_grad():
        results = net(torch.from_numpy(x))
    for (name, array), result in zip(
        expected.items(), results if isinstance(results, tuple) else (results,), strict=True
    ):
        assert result.numpy().dtype == array.dtype, name
        np.testing.assert_allclose(result.numpy(), array, rtol=tolerance, atol=tolerance, err_msg=name)
    return net


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 2])
def test_linear_regressor(transform: str, targets: int) -> None:
    numbers = {"coefficients": [1.0, 0.2, -0.5, 0.3][: 2 * targets], "intercepts": [0.4, 0.5][:targets]}
    x = np.abs(X) / 10 + 0.1 if transform == "PROBIT" else X
    # onnxruntime's formula of PROBIT loses digits around 0.5, where its two terms are equal.
    tolerance = 1e-4 if transform == "PROBIT" else 2e-6
    check("LinearRegressor", x, tolerance, targets=targets, post_transform=transform, **numbers)


def test_linear_regressor_without_intercepts() -> None:
    net = check("LinearRegressor", coefficients=[1.0, 2.0, 3.0, 4.0], targets=2)
    assert list(net.weights) == ["node.coefficients"]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("classes", [1, 2, 3])
def test_linear_classifier(transform: str, classes: int) -> None:
    numbers = {"coefficients": [1.0, 0.2, -0.5, 0.3, 0.3, 0.2][: 2 * classes], "intercepts": [0.4, 0.5, 0.6][:classes]}
    labels = {"classlabels_ints": [5, 7, 9][: max(classes, 2)]}
    x = np.abs(X) / 10 + 0.1 if transform == "PROBIT" else X
    if (transform, classes) == ("PROBIT", 1):
        with pytest.raises(ModelError, match="post_transform PROBIT and a single score"):
            onward.to_torch(model_of("LinearClassifier", x, post_transform=transform, **numbers, **labels))
        return
    tolerance = 1e-4 if transform == "PROBIT" else 1e-5
    check("LinearClassifier", x, tolerance, post_transform=transform, **numbers, **labels)


def test_coefficients_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"node 'node' \(LinearRegressor\): its 3 coefficients cannot be divided among 2"
    ):
        onward.to_torch(model_of("LinearRegressor", coefficients=[1.0, 2.0, 3.0], targets=2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
def test_scaler(dtype: type) -> None:
    x = (X * 10).astype(dtype)
    check("Scaler", x, offset=[1.0, 2.0], scale=[0.5, 3.0])
    check("Scaler", x, offset=[1.0], scale=[0.5])


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer(norm: str) -> None:
    check("Normalizer", norm=norm)
    check("Normalizer", (X * 10).astype(np.int64), norm=norm)


@pytest.mark.parametrize("missing", [float("nan"), 2.0, 0.0])
def test_imputer(missing: float) -> None:
    x = X.copy()
    x[1, 0], x[2, 1] = np.nan, 2.0
    check("Imputer", x, imputed_value_floats=[7.0, 8.0], replaced_value_float=missing)
    check("Imputer", x, imputed_value_floats=[7.0], replaced_value_float=missing)
    whole = np.array([[1, 2], [3, 1]])
    check("Imputer", whole, imputed_value_int64s=[7, 8], replaced_value_int64=1)


def test_binarizer() -> None:
    check("Binarizer", threshold=0.2)
    check("Binarizer")


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_one_hot_encoder(dtype: type) -> None:
    x = np.array([[3, 9], [4, 3], [8, 8]]).astype(dtype)
    check("OneHotEncoder", x, cats_int64s=[3, 4, 9], zeros=1)
    check("OneHotEncoder", x, cats_int64s=[3, 4, 8, 9], zeros=0)
    with pytest.raises(NodeError, match="the category 9, which is none of its 3"):
        onward.to_torch(model_of("OneHotEncoder", x, cats_int64s=[3, 4, 8], zeros=0))(torch.from_numpy(x))


def test_label_encoder() -> None:
    whole = np.array([[3, 9], [4, 3], [8, -1]])
    check("LabelEncoder", whole, version=2, keys_int64s=[9, 3, 4], values_floats=[0.5, 1.5, 2.5], default_float=-1.0)
    check("LabelEncoder", whole, version=2, keys_int64s=[9, 3, 4], values_int64s=[5, 6, 7], default_int64=99)
    floats = np.array([[0.5, np.nan], [2.0, 0.25]], np.float32)
    check("LabelEncoder", floats, version=2, keys_floats=[2.0, 0.5, np.nan], values_int64s=[5, 6, 7])
    check("LabelEncoder", floats, version=4, keys_floats=[2.0, 0.5, np.nan], values_int64s=[5, 6, 7])
    check("LabelEncoder", floats, version=2, keys_floats=[2.0, 0.5], values_floats=[5.0, 6.0])
    with pytest.raises(ModelError, match="2 numeric keys for 1 values"):
        onward.to_torch(model_of("LabelEncoder", whole, version=2, keys_int64s=[1, 2], values_int64s=[3]))


def test_array_feature_extractor_and_feature_vectorizer() -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]> g (float[n, 3] x, float[n, 2] z) => '
        "(float[n, k] y, float[a, b] w, float[n, c] v) <int64[2] i = {2, 0}, float[3] t = {7, 8, 9}> "
        "{ y = ai.onnx.ml.ArrayFeatureExtractor(x, i) w = ai.onnx.ml.ArrayFeatureExtractor(t, i) "
        "v = ai.onnx.ml.FeatureVectorizer <inputdimensions = [3, 2]> (x, z) }"
    )
    model = onnx.parser.parse_model(text)
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "z": X[:2]}
    expected = run(model, feeds)
    results = onward.to_torch(model)(*map(torch.from_numpy, feeds.values()))
    for array, result in zip(expected.values(), results, strict=True):
        np.testing.assert_array_equal(result.detach().numpy(), array)


SVM = {"kernel_params": [0.7, 0.3, 2.0], "support_vectors": [0.1, 0.2, -0.4, 1.0, 0.5, 0.6], "rho": [0.3]}


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("one_class", [0, 1])
def test_svm_regressor(kernel: str, one_class: int) -> None:
    check("SVMRegressor", kernel_type=kernel, coefficients=[0.5, -1.0, 2.0], n_supports=3, one_class=one_class, **SVM)


def test_svm_without_vectors() -> None:
    plain = {"kernel_type": "LINEAR", "kernel_params": [0.0, 0.0, 0.0], "rho": [0.3]}
    check("SVMRegressor", coefficients=[0.5, -1.0], n_supports=0, **plain)
    for coefficients in ([0.5, -1.0, 0.25, 0.5], [0.5, 1.0, 0.25, 0.5]):
        two = {**plain, "classlabels_ints": [3, 4], "post_transform": "LOGISTIC"}
        check("SVMClassifier", coefficients=coefficients, **two)
    three = {**plain, "classlabels_ints": [3, 4, 8]}
    check("SVMClassifier", coefficients=[0.5, -1.0, 0.2, 0.1, 0.3, 0.4], **three)


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("likely", [False, True])
def test_svm_classifier(kernel: str, transform: str, classes: int, likely: bool) -> None:
    pairs = classes * (classes - 1) // 2
    chances = {"prob_a": [-1.5, -0.5, -1.0][:pairs], "prob_b": [0.1, -0.2, 0.3][:pairs]} if likely else {}
    check(
        "SVMClassifier",
        tolerance=1e-5,
        kernel_type=kernel,
        kernel_params=SVM["kernel_params"],
        support_vectors=[0.1, 0.2, -0.4, 1.0, 0.5, 0.6, -1.0, 0.3],
        coefficients=[0.5, -1.0, 2.0, 0.25, -0.5, 0.75, 1.25, -2.0][: 4 * (classes - 1)],
        rho=[0.1, -0.2, 0.3][:pairs],
        vectors_per_class=[2, 2] if classes == 2 else [1, 2, 1],
        classlabels_ints=[3, 4, 8][:classes],
        post_transform=transform,
        **chances,
    )


NODES = {
    "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1],
    "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 0, 1, 0, 0, 1, 0, 0],
    "nodes_values": [0.1, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 3, 0, 0, 1, 0, 0],
    "nodes_falsenodeids": [2, 0, 4, 0, 0, 2, 0, 0],
}
LEAVES = ((0, 1), (0, 3), (0, 4), (1, 1), (1, 2))


def modes(branch: str) -> list[str]:
    return [branch, "LEAF", branch, "LEAF", "LEAF", branch, "LEAF", "LEAF"]


@pytest.mark.parametrize("branch", ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"])
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_tree_regressor(branch: str, aggregate: str) -> None:
    x = np.concatenate([X, np.array([[0.1, 0.1], [np.nan, 0.2], [0.4, np.nan]], np.float32)])
    for targets in (1, 2):
        ids = [leaf % targets for leaf in range(5)]
        base = {"base_values": [0.5, -0.25][:targets]}
        for options in ({}, base, {"nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 1, 0, 0]}):
            check(
                "TreeEnsembleRegressor",
                x,
                n_targets=targets,
                aggregate_function=aggregate,
                nodes_modes=modes(branch),
                target_treeids=[tree for tree, _ in LEAVES],
                target_nodeids=[node for _, node in LEAVES],
                target_ids=ids,
                target_weights=[0.5, -1.0, 2.0, 0.75, -0.5],
                post_transform="NONE",
                **NODES,
                **options,
            )


def test_a_file_of_trees_is_not_told_to_list_weights() -> None:
    """No rule makes the thresholds of a tree trainable."""
    leaves = {
        "target_treeids": [tree for tree, _ in LEAVES], "target_nodeids": [node for _, node in LEAVES],
        "target_ids": [0] * 5, "target_weights": [0.5, -1.0, 2.0, 0.75, -0.5],
    }  # fmt: skip
    model = model_of("TreeEnsembleRegressor", n_targets=1, nodes_modes=modes("BRANCH_LEQ"), **NODES, **leaves)
    expected = (
        "The model has no trainable weights. Its tensors are: 2 x fitted trees, whose splits have no gradient "
        "(node/thresholds, node/leaf_weights; 13 parameters, 52 bytes). No rule makes them trainable. Fit them again "
        "with the library that made them, or train layers that compute with their results."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(expected)}$"):
        onward.to_torch(model)


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
@pytest.mark.parametrize(("ids", "weights"), [
    ((0, 0, 0, 0, 0), (0.5, 0.1, 0.2, 0.3, 0.4)),
    ((0, 0, 0, 0, 0), (0.5, -0.1, 0.2, -0.9, 0.4)),
    ((1, 1, 1, 1, 1), (0.5, 0.1, 0.2, 0.3, 0.4)),
    ((1, 1, 1, 1, 1), (0.5, -0.1, 0.2, -0.9, 0.4)),
    ((0, 1, 0, 1, 1), (0.5, 0.1, 0.2, 0.3, 0.4)),
    ((0, 1, 2, 1, 2), (0.5, 0.1, -0.2, 0.3, 0.4)),
])  # fmt: skip
def test_tree_classifier(transform: str, ids: tuple[int, ...], weights: tuple[float, ...]) -> None:
    classes = 3 if 2 in ids else 2
    for base in ({}, {"base_values": [0.1, 0.2, 0.3][:classes]}):
        check(
            "TreeEnsembleClassifier",
            nodes_modes=modes("BRANCH_LEQ"),
            class_treeids=[tree for tree, _ in LEAVES],
            class_nodeids=[node for _, node in LEAVES],
            class_ids=list(ids),
            class_weights=list(weights),
            classlabels_int64s=[3, 4, 8][:classes],
            post_transform=transform,
            **NODES,
            **base,
        )


def test_trees_that_contradict_themselves_are_refused() -> None:
    leaves = {"target_treeids": [0], "target_nodeids": [1], "target_ids": [0], "target_weights": [1.0]}
    with pytest.raises(ModelError, match=r"attributes of unequal lengths .*nodes_modes 7"):
        onward.to_torch(model_of("TreeEnsembleRegressor", nodes_modes=modes("BRANCH_LEQ")[:7], **NODES, **leaves))
    circle = {**NODES, "nodes_truenodeids": [2, 0, 0, 0, 0, 1, 0, 0]}
    with pytest.raises(ModelError, match="its nodes form a cycle"):
        onward.to_torch(model_of("TreeEnsembleRegressor", nodes_modes=modes("BRANCH_LEQ"), **circle, **leaves))
    lost = {**NODES, "nodes_truenodeids": [7, 0, 3, 0, 0, 1, 0, 0]}
    with pytest.raises(ModelError, match="refers to node 7 of tree 0, which it does not have"):
        onward.to_torch(model_of("TreeEnsembleRegressor", nodes_modes=modes("BRANCH_LEQ"), **lost, **leaves))


TRAINED: dict[str, dict[str, Any]] = {
    "Scaler": {"offset": [1.0, 2.0], "scale": [0.5, 3.0]},
    "LinearRegressor": {"coefficients": [1.0, 0.2, -0.5, 0.3], "intercepts": [0.4, 0.5], "targets": 2},
    "LinearClassifier": {
        "coefficients": [1.0, 0.2, -0.5, 0.3], "intercepts": [0.4, 0.5], "classlabels_ints": [3, 4],
        "post_transform": "SOFTMAX",
    },
    "SVMRegressor": {"kernel_type": "RBF", "coefficients": [0.5, -1.0, 2.0], "n_supports": 3, **SVM},
    "Normalizer": {"norm": "L2"},
}  # fmt: skip


@pytest.mark.parametrize("op_type", TRAINED)
def test_gradients_by_finite_differences_in_onnxruntime(op_type: str, tmp_path: Path) -> None:
    """The gradient of every attribute: the attribute moved in the file itself, and computed by onnxruntime."""
    model = model_of(op_type, **TRAINED[op_type])
    net = onward.to_torch(model)
    attributes = [name for name in TRAINED[op_type] if f"node.{name}" in net.weights]
    assert {f"node.{name}" for name in attributes} == set(net.weights)
    output = "scores" if op_type in SCORES_OF else "y"
    x = torch.from_numpy(X).requires_grad_()
    results = net(x)
    result = results[-1] if isinstance(results, tuple) else results
    direction = torch.from_numpy(np.random.default_rng(0).standard_normal(result.shape).astype(np.float32))
    gradients = torch.autograd.grad((result * direction).sum(), [x, *net.weights.values()])

    def total(changed: onnx.ModelProto, features: np.ndarray = X) -> float:
        return float((run(changed, {"x": features})[output].astype(np.float64) * direction.numpy()).sum())

    step = 1e-2
    for name, gradient in zip(net.weights, gradients[1:], strict=True):
        attribute = name.removeprefix("node.")
        for place, number in enumerate(gradient.reshape(-1)):
            moved = []
            for sign in (1, -1):
                numbers = list(TRAINED[op_type][attribute])
                numbers[place] += sign * step
                moved.append(total(model_of(op_type, **{**TRAINED[op_type], attribute: numbers})))
            assert float(number) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=5e-3, abs=5e-3), name
    for place in np.ndindex(X.shape):
        if op_type == "Normalizer" and not X[place[0]].any():
            continue  # a row of zeros, where the norm has no gradient
        ahead, behind = X.copy(), X.copy()
        ahead[place] += step / 10
        behind[place] -= step / 10
        slope = (total(model, ahead) - total(model, behind)) / (step / 5)
        assert float(gradients[0][place]) == pytest.approx(slope, rel=1e-2, abs=1e-2)


def test_trained_attributes_are_written_back(tmp_path: Path) -> None:
    model = model_of("LinearRegressor", **TRAINED["LinearRegressor"])
    net = onward.to_torch(model)
    with torch.no_grad():
        net.weights["node.coefficients"].copy_(torch.arange(4.0).reshape(2, 2))
    onward.export(net, tmp_path / "out.onnx")
    node = onnx.load(tmp_path / "out.onnx").graph.node[0]
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert found["coefficients"] == [0.0, 1.0, 2.0, 3.0]
    assert found["intercepts"] == pytest.approx([0.4, 0.5])
    np.testing.assert_allclose(
        run(onnx.load(tmp_path / "out.onnx"), {"x": X})["y"], net(torch.from_numpy(X)).detach(), rtol=1e-6
    )


def test_attributes_choose_and_freeze_like_other_weights() -> None:
    model = model_of("LinearRegressor", **TRAINED["LinearRegressor"])
    assert list(onward.to_torch(model, weights_not_to_train=["*.intercepts"]).weights) == ["node.coefficients"]


@pytest.mark.parametrize("op_type", ["DictVectorizer", "CastMap"])
def test_maps_as_inputs_are_refused(op_type: str) -> None:
    kind = onnx.TypeProto()
    kind.map_type.key_type = TensorProto.INT64
    kind.map_type.value_type.tensor_type.elem_type = TensorProto.FLOAT
    attributes: dict[str, Any] = {"int64_vocabulary": [0, 1]} if op_type == "DictVectorizer" else {}
    node = helper.make_node(op_type, ["x"], ["y"], name="node", domain="ai.onnx.ml", **attributes)
    inputs = [onnx.ValueInfoProto(name="x", type=kind)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    with pytest.raises(OperatorError, match=rf"{op_type}.*it computes with maps"):
        onward.to_torch(helper.make_model(graph, opset_imports=opsets, ir_version=8))
