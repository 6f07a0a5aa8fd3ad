import json

import pytest

from onward.data.manifest import Manifest, ShardEntry, read_manifest
from onward.errors import DataError

MANIFEST = Manifest(
    source="a.npz",
    kind="arrays",
    options={"seed": 0},
    features={"x": {"dtype": "int64", "shape": []}},
    sample_count=3,
    shards=(ShardEntry("a.pb", 3, 90),),
)


def test_a_manifest_comes_back(tmp_path):
    assert read_manifest(tmp_path) is None
    (tmp_path / "pack.json").write_text(MANIFEST.to_json())
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "is not onward's list of packed shards"),
        ({"version": 3}, "has version 3, this onward reads 1 to 2: update onward"),
        ({"shards": [{"file": "a.pb"}]}, "is damaged"),
        ({"surplus": 1}, "is damaged"),
    ],
)
def test_what_is_no_manifest_is_named(tmp_path, change, words):
    (tmp_path / "pack.json").write_text(json.dumps({**json.loads(MANIFEST.to_json()), **change}))
    with pytest.raises(DataError, match=rf"pack\.json' {words}"):
        read_manifest(tmp_path)


def test_broken_json_is_named(tmp_path):
    (tmp_path / "pack.json").write_text("{")
    with pytest.raises(DataError, match=r"pack\.json' cannot be read: .*Pack the data again, or delete the file"):
        read_manifest(tmp_path)
