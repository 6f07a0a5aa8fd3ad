"""Features of a batch: what fits becomes tensors of the model's types, what does not is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.data.shard import FeatureSpec
from onward.engine.inputs.features import FeatureReader
from onward.errors import DataError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.losses.labels import LabelRange
from tests.mlp import CROSS_ENTROPY, FEATURES, build_mlp


def reader(**options: Any) -> FeatureReader:
    graph = make_training_graph(build_mlp(), loss=LossSpec(**CROSS_ENTROPY))
    return FeatureReader(graph, ("x", "label"), torch.device("cpu"), **options)


def features(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": np.ones((3, FEATURES), np.float32), "label": np.array([0, 3, 1]), "other": np.zeros(3), **changes}


def test_types_are_those_of_the_model_and_what_it_does_not_read_is_left_out() -> None:
    found = reader().to_tensors(features(x=np.full((3, FEATURES), 2, np.float16)))
    assert list(found) == ["x", "label"]
    assert found["x"].dtype == torch.float32
    assert found["x"].tolist() == [[2.0] * FEATURES] * 3
    assert found["label"].dtype == torch.int64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": np.ones((3, 7), np.float32)}, ["feature 'x' has shape [7] per sample; the model expects [6]. Only"]),
        ({"x": np.ones(3, np.float32)}, ["feature 'x' has one number per sample; the model expects [6]. Only"]),
        ({"x": np.ones((3, FEATURES), np.complex64)}, ["feature 'x' is complex64", "expects float32", "pack the data"]),
        ({"x": np.ones((3, FEATURES), bool)}, ["feature 'x' is bool"]),
        ({"label": np.array([0, 4, 9])}, ["label 4", "0 to 3", "2 of the 3 labels", "the first at [1]", "4 classes"]),
        ({"label": np.array([-1, 0, 0])}, ["label -1", "ignore_index"]),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_does_not_fit_is_refused(is_first: bool, changes: dict[str, np.ndarray], words: list[str]) -> None:
    """Also after batches that fit, twice in a row."""
    one = reader(feature_ranges={"label": LabelRange(4)})
    for _ in range(0 if is_first else 2):
        one.to_tensors(features())
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            one.to_tensors(features(**changes))
    assert all(word in str(caught.value) for word in words), caught.value


def test_class_numbers_for_a_loss_of_numbers_get_a_hint() -> None:
    squared = LossSpec(type="mean_squared_error", prediction=CROSS_ENTROPY["prediction"], label="label")
    graph = make_training_graph(build_mlp(), loss=squared)
    wrong = FeatureReader(graph, ("x", "label"), torch.device("cpu"))
    classes = FeatureSpec((), np.dtype(np.int64))
    with pytest.raises(DataError) as caught:
        wrong.check_specs({"x": FeatureSpec((FEATURES,), np.dtype(np.float32)), "label": classes})
    assert str(caught.value).startswith(
        "feature 'label' has one number per sample; the loss expects [4]. For labels that are class numbers, set "
        "loss.type to softmax_cross_entropy, without dense_labels. Only axes of size 1"
    )


def test_the_label_that_does_not_count_may_be_anything() -> None:
    ranges = {"label": LabelRange(4, ignored=-100)}
    assert reader(feature_ranges=ranges).to_tensors(features(label=np.array([-100, 0, 3])))["label"].tolist() == [
        -100,
        0,
        3,
    ]
    with pytest.raises(DataError, match="or -100, which does not count"):
        reader(feature_ranges=ranges).to_tensors(features(label=np.array([-1, 0, 3])))


def test_a_missing_feature_is_named_with_those_that_are_there() -> None:
    with pytest.raises(DataError, match=r"have no feature 'label'.+they have 'x'.+input_name_map"):
        reader().to_tensors({"x": features()["x"]})


def test_sizes_of_dimensions_that_are_asked_for() -> None:
    with pytest.raises(DataError, match=r"has shape \[3, 6\].+expects \[4, 6\]"):
        reader(dimensions={"batch": 4}).to_tensors(features())


def test_what_a_source_says_is_checked_before_any_batch() -> None:
    specs = {"x": FeatureSpec((FEATURES,), np.dtype(np.float32)), "label": FeatureSpec((), np.dtype(np.int64))}
    reader().check_specs(specs)
    with pytest.raises(DataError, match="'x' has shape"):
        reader().check_specs({**specs, "x": FeatureSpec((2,), np.dtype(np.float32))})


def test_tensors_of_a_caller_are_taken_as_they_are(tmp_path: Path) -> None:
    x = torch.ones(3, FEATURES)
    found = reader().to_tensors({"x": x, "label": torch.tensor([0, 1, 2])})
    assert found["x"] is x
