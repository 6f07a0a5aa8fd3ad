"""Support vector machines of ai.onnx.ml against onnxruntime."""

from __future__ import annotations

import pytest

from tests.one_classical_node import SVM, check


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
