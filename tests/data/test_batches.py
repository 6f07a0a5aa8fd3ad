import json

import numpy as np
import pytest

from onward.data.batches import START, Batch, BatchSource, DataCursor
from onward.data.in_memory import InMemoryDataLoader
from onward.data.loader import DataLoader
from onward.errors import CheckpointError


def test_a_cursor_survives_json():
    cursor = DataCursor(epoch=3, sample=20, file=2, file_sample=5, fingerprint="abc")
    assert DataCursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor
    assert DataCursor.from_dict(json.loads(json.dumps(START.to_dict()))) == START


@pytest.mark.parametrize(
    "change", [{"epoch": -1}, {"sample": 1.5}, {"file": True}, {"fingerprint": 3}, {"other": 1}, {"epoch": None}]
)
def test_a_damaged_cursor_is_refused(change):
    words = "has the fields .*'sample'.*, not .*'other'" if "other" in change else "fields are counts from 0, not {.*"
    with pytest.raises(CheckpointError, match=f"a data cursor('s)? {words}"):
        DataCursor.from_dict({**START.to_dict(), **change})


def test_both_loaders_are_batch_sources():
    def use(source: BatchSource) -> Batch:
        return next(source.batches(2))

    assert use(InMemoryDataLoader({"x": np.zeros(2)})).sample_count == 2
    for name in ("batches", "one_pass", "feature_specs", "close"):
        assert callable(getattr(DataLoader, name))
        assert callable(getattr(InMemoryDataLoader, name))
