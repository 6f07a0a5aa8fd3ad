"""Counts of n-grams against onnxruntime in every mode; n-grams of strings are refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, make_model, run

POOL: dict[str, Any] = {
    "ngram_counts": [0, 4],
    "ngram_indexes": [0, 1, 2, 3, 4, 5, 6],
    "pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7],
}
ROWS = np.array([[1, 1, 3, 3, 3, 7], [8, 6, 7, 5, 6, 8]], np.int64)


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("skips", [0, 5])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("rows", [ROWS, ROWS[1], ROWS.astype(np.int32)], ids=["rows", "one row", "int32"])
def test_like_onnxruntime(mode: str, skips: int, lengths: tuple[int, int], rows: np.ndarray) -> None:
    attributes = {
        **POOL,
        "mode": mode,
        "max_skip_count": skips,
        "min_gram_length": lengths[0],
        "max_gram_length": lengths[1],
        "weights": [0.5, 2.0, 1.0, 3.0, 0.25, 1.5, 4.0],
    }
    check_against_onnxruntime(make_model("TfIdfVectorizer", {"x": rows}, attributes, 9), rows)


def test_strings_are_refused() -> None:
    attributes = {
        "ngram_counts": [0],
        "ngram_indexes": [0],
        "pool_strings": ["a"],
        "mode": "TF",
        "max_skip_count": 0,
        "min_gram_length": 1,
        "max_gram_length": 1,
    }
    with pytest.raises(NodeError, match="n-grams of strings cannot be counted"):
        run(make_model("TfIdfVectorizer", {"x": ROWS}, attributes, 9), ROWS)
