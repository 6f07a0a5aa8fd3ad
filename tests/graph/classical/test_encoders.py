"""Encoders, scalers and imputers of ai.onnx.ml against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onward
from onward.errors import ModelError, NodeError
from tests.fitted_models import run
from tests.one_classical_node import X, check, model_of


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
