"""Linear regressors and classifiers of ai.onnx.ml against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest

import onward
from onward.errors import ModelError
from tests.one_classical_node import TRANSFORMS, X, check, model_of


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
