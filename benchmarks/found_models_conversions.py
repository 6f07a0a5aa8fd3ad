"""ONNX files by other tools' converters: scikit-learn, LightGBM, XGBoost, Keras and torch's older exporter.

Each group runs in a Python that has its packages (`benchmarks.found_models_tools` makes it) as
`python found_models_conversions.py GROUP FOLDER`, and imports nothing of onward. What is converted was fitted to data
that its own library ships or draws; nothing is written by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
Models = dict[str, Callable[[], Any]]
"""File name without suffix -> what makes the model: a ModelProto, or None where it wrote the file itself."""


def sklearn_models(folder: Path) -> Models:
    import numpy as np
    from skl2onnx import to_onnx
    from sklearn.compose import make_column_transformer
    from sklearn.datasets import load_diabetes, load_digits, load_iris, load_wine
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
    from sklearn.linear_model import ElasticNet, LogisticRegression, SGDClassifier
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, Normalizer, OneHotEncoder, PolynomialFeatures, StandardScaler

    iris, wine = load_iris(return_X_y=True), load_wine(return_X_y=True)
    digits, diabetes = load_digits(return_X_y=True), load_diabetes(return_X_y=True)

    def fitted(estimator: Any, data: tuple[Any, Any], **options: Any) -> Any:
        x = data[0].astype(np.float32)
        return to_onnx(estimator.fit(x, data[1]), x[:1], **options)

    plain = {"zipmap": False}
    mixed = make_column_transformer((OneHotEncoder(), [0]), (StandardScaler(), [1, 2, 3]))
    coarse = iris[0].copy()
    coarse[:, 0] = np.round(coarse[:, 0])
    return {
        "logistic_zipmap": lambda: fitted(make_pipeline(StandardScaler(), LogisticRegression()), iris),
        "logistic": lambda: fitted(LogisticRegression(max_iter=2000), wine, options=plain),
        "sgd_classifier": lambda: fitted(SGDClassifier(loss="log_loss"), iris, options=plain),
        "mlp_classifier": lambda: fitted(MLPClassifier((32, 16), max_iter=50), digits, options=plain),
        "mlp_classifier_zipmap": lambda: fitted(make_pipeline(Normalizer(), MLPClassifier(max_iter=50)), iris),
        "mlp_regressor": lambda: fitted(make_pipeline(MinMaxScaler(), MLPRegressor(max_iter=50)), diabetes),
        "elastic_net": lambda: fitted(make_pipeline(PolynomialFeatures(2), ElasticNet()), diabetes),
        "one_hot_pipeline": lambda: fitted(
            make_pipeline(mixed, LogisticRegression()), (coarse, iris[1]), options={LogisticRegression: plain}
        ),
        "random_forest": lambda: fitted(RandomForestClassifier(10), iris, options=plain),
        "gradient_boosting": lambda: fitted(GradientBoostingRegressor(n_estimators=20), diabetes),
    }


def tree_models(folder: Path) -> Models:
    import lightgbm
    import numpy as np
    import xgboost
    from onnxmltools import convert_lightgbm, convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from sklearn.datasets import load_diabetes, load_iris

    iris, diabetes = load_iris(return_X_y=True), load_diabetes(return_X_y=True)

    def inputs(data: tuple[Any, Any]) -> list[tuple[str, Any]]:
        return [("input", FloatTensorType([None, data[0].shape[1]]))]

    def light() -> Any:
        model = lightgbm.LGBMClassifier(n_estimators=10, verbose=-1).fit(*iris)
        return convert_lightgbm(model, initial_types=inputs(iris), zipmap=False)

    def boosted() -> Any:
        model = xgboost.XGBRegressor(n_estimators=10).fit(diabetes[0].astype(np.float32), diabetes[1])
        return convert_xgboost(model, initial_types=inputs(diabetes))

    return {"lightgbm_classifier": light, "xgboost_regressor": boosted}


def keras_models(folder: Path) -> Models:
    import keras
    import numpy as np
    from keras import layers

    keras.utils.set_random_seed(0)

    def exported(name: str, model: Any, loss: str, **names: int) -> None:
        shape = (64, *model.input_shape[1:])
        x: np.ndarray = np.random.default_rng(0).normal(size=[size or 12 for size in shape]).astype(np.float32)
        if "tokens" in names:
            x = np.random.default_rng(0).integers(0, names["tokens"], (64, 12))
        outputs = np.asarray(model(x[:1])).shape[1:]
        classes = loss == "sparse_categorical_crossentropy"
        y = np.arange(64) % outputs[-1] if classes else np.random.default_rng(1).random((64, *outputs))
        model.compile("adam", loss)
        model.fit(x, y, epochs=2, verbose=0)
        model.export(folder / f"{name}.onnx", format="onnx", verbose=False)

    def convolutional() -> Any:
        image = layers.Input((32, 32, 3))
        value = layers.Conv2D(8, 3, strides=2, use_bias=False)(layers.Rescaling(1 / 255)(image))
        value = layers.ReLU(6.0)(layers.BatchNormalization()(value))
        value = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(value))
        value = layers.GlobalAveragePooling2D()(layers.Activation("swish")(value))
        return keras.Model(image, layers.Dense(10, activation="softmax")(layers.Dropout(0.2)(value)))

    def recurrent() -> Any:
        tokens = layers.Input((None,), dtype="int32")
        value = layers.Embedding(200, 16)(tokens)
        value = layers.Bidirectional(layers.LSTM(12))(value)
        return keras.Model(tokens, layers.Dense(1, activation="sigmoid")(value))

    def attending() -> Any:
        sequence = layers.Input((12, 16))
        attended = layers.MultiHeadAttention(4, 4)(sequence, sequence)
        value = layers.LayerNormalization()(layers.Add()([sequence, attended]))
        return keras.Model(sequence, layers.Dense(4)(layers.GlobalMaxPooling1D()(value)))

    def perceptron() -> Any:
        hidden = [layers.Dense(24, activation="relu"), layers.BatchNormalization(), layers.Dense(24, activation="elu")]
        return keras.Sequential([layers.Input((8,)), *hidden, layers.Dense(3, activation="softmax")])

    def forecast() -> Any:
        return keras.Sequential([layers.Input((12, 4)), layers.GRU(16), layers.Dense(2)])

    classes, squares = "sparse_categorical_crossentropy", "mse"
    return {
        "perceptron": lambda: exported("perceptron", perceptron(), classes),
        "convolutional": lambda: exported("convolutional", convolutional(), classes),
        "lstm_sentiment": lambda: exported("lstm_sentiment", recurrent(), "binary_crossentropy", tokens=200),
        "attention": lambda: exported("attention", attending(), squares),
        "gru_forecast": lambda: exported("gru_forecast", forecast(), squares),
    }


def torch_models(folder: Path) -> Models:
    """torch's exporter up to 2.8 (`dynamo=False`), with transformers where it is installed."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    def exported(name: str, model: nn.Module, *inputs: torch.Tensor, **options: Any) -> None:
        torch.onnx.export(model.eval(), inputs, folder / f"{name}.onnx", dynamo=False, **options)

    def transformer(name: str, kind: str, config: dict[str, Any]) -> None:
        import transformers

        made = getattr(transformers, f"{kind}Config")(**config, attn_implementation="eager", return_dict=False)
        model = getattr(transformers, f"{kind}ForSequenceClassification")(made)
        tokens, mask = torch.randint(5, 90, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
        names = ["input_ids", "attention_mask"]
        axes = {one: {0: "batch", 1: "sequence"} for one in names} | {"logits": {0: "batch"}}
        exported(
            name, model, tokens, mask, input_names=names, output_names=["logits"], dynamic_axes=axes, opset_version=17
        )

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(100, 16), nn.LSTM(16, 12, 2, bidirectional=True, batch_first=True)
            self.out = nn.Linear(24, 7)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.lstm(self.embed(tokens))[0])

    def network() -> nn.Module:
        convolved = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 16, 3, groups=8)]
        return nn.Sequential(*convolved, nn.GroupNorm(4, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))

    tiny = {"vocab_size": 100, "num_labels": 3}
    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **tiny}
    return {
        "tagger_fixed_batch": lambda: exported("tagger_fixed_batch", Tagger(), torch.randint(0, 100, (1, 12))),
        "convolutional_opset11": lambda: exported(
            "convolutional_opset11", network(), torch.randn(1, 3, 32, 32), opset_version=11
        ),
        "bert_classifier": lambda: transformer("bert_classifier", "Bert", bert),
        "albert_classifier": lambda: transformer("albert_classifier", "Albert", {**bert, "embedding_size": 16}),
        "distilbert_classifier": lambda: transformer(
            "distilbert_classifier", "DistilBert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **tiny}
        ),
    }


GROUPS: dict[str, Callable[[Path], Models]] = {
    "sklearn": sklearn_models,
    "trees": tree_models,
    "keras": keras_models,
    "torch": torch_models,
}


def main(group: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in GROUPS[group](folder).items():
        try:
            model = make()
            if model is not None:
                (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
            print(f"{group}/{name}: converted", flush=True)
        except Exception as error:
            print(f"{group}/{name}: not converted: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
