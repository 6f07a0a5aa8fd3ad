"""X"""

import json
import re

import numpy as np
import onnx_ir as ir
import pyarrow
import pyarrow.parquet
import pytest
import sklearn.datasets

from onward.cli import main
from onward.data.manifest import read_manifest
from onward.errors import DataError, ParametersError
from tests.data.packing.packed_tables import pack_table
from tests.plan.staged_models import Sketch

HEADER = ["height", "width", "count", "species"]
ROWS = [(1.5 + k, k / 4, k, ["cat", "dog", "ant"][k % 3]) for k in range(3000)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The same rows in every format."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "a.csv").write_text("\n".join(",".join(map(str, row)) for row in [HEADER, *ROWS]) + "\n")
    (folder / "a.tsv").write_text("\n".join("\t".join(map(str, row)) for row in [HEADER, *ROWS]) + "\n")
    records = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "a.parquet", row_group_size=700)
    return folder


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_every_format_gives_the_same_features(tables, tmp_path, suffix):
    features = pack_table(tables / f"a.{suffix}", tmp_path / "out", categories=("species",))
    assert list(features) == HEADER
    assert {name: str(array.dtype) for name, array in features.items()} == {
        "height": "float32", "width": "float32", "count": "int64", "species": "int64",
    }  # fmt: skip
    for k, name in enumerate(HEADER[:3]):
        np.testing.assert_array_equal(features[name], np.array([row[k] for row in ROWS], features[name].dtype))
    np.testing.assert_array_equal(features["species"], [[1, 2, 0][k % 3] for k in range(3000)])
    assert read_manifest(tmp_path / "out").details == {"categories": {"species": ["ant", "cat", "dog"]}}


def test_columns_are_grouped(tables, tmp_path):
    columns = (("x", "*h*t,width"), ("label", "species"))
    features = pack_table(tables / "a.csv", tmp_path / "out", columns=columns, categories=("species",))
    assert set(features) == {"x", "label"}
    np.testing.assert_array_equal(features["x"], np.array([row[:2] for row in ROWS], np.float32))
    with pytest.raises(DataError, match=r"has no column 'weight'; it has 'height', 'width', 'count', 'species'"):
        pack_table(tables / "a.csv", tmp_path / "no", columns=(("x", "weight"),))
    with pytest.raises(DataError, match="has no column 'kind'"):
        pack_table(tables / "a.csv", tmp_path / "no", categories=("kind",))


@pytest.mark.parametrize("categories", [("species",), ("spec*",)])
def test_a_category_that_no_feature_reads_is_a_feature_of_its_own(tables, tmp_path, categories):
    features = pack_table(tables / "a.csv", tmp_path / "out", columns=(("x", "height,width"),), categories=categories)
    assert list(features) == ["x", "species"]
    np.testing.assert_array_equal(features["species"], [[1, 2, 0][k % 3] for k in range(3000)])
    assert read_manifest(tmp_path / "out").details == {"categories": {"species": ["ant", "cat", "dog"]}}


def test_every_category_has_an_effect_whatever_the_columns(tables, tmp_path):
    """All ways to group the columns with a category by name, by pattern and of numbers."""
    groups = [(), (("x", "height"),), (("x", "*h*t"), ("label", "species")), (("x", "*"),), (("species", "species"),)]
    for number, (columns, name) in enumerate((c, n) for c in groups for n in ("species", "s*", "count")):
        if columns == (("x", "*"),) and name == "count":
            continue  # the words would be in the vector
        options = {"columns": columns, "categories": tuple({name, "species"})}
        features = pack_table(tables / "a.csv", tmp_path / str(number), **options)
        listed = read_manifest(tmp_path / str(number)).details["categories"]
        column = "count" if name == "count" else "species"
        assert column in listed
        readers = [feature for feature in features if feature in (column, "label", "x")]
        classes = np.array([listed[column].index(str(row[HEADER.index(column)])) for row in ROWS])
        assert any(
            np.array_equal(features[reader].reshape(3000, -1)[:, -1], classes)
            or (features[reader].reshape(3000, -1) == classes[:, None]).all(0).any()
            for reader in readers
        ), (columns, name)


@pytest.mark.parametrize(
    ("suffix", "options", "words"),
    [
        ("tsv", {"delimiter": ";"}, r"--delimiter is read of CSV files only, and the files are \.tsv; leave it out"),
        ("jsonl", {"delimiter": ";"}, r"--delimiter is read of CSV files only, and the files are \.jsonl"),
        ("parquet", {"header": False}, r"--no-header is read of CSV and TSV files only, and the files are \.parquet"),
        ("csv", {"columns": (("x", "height"), ("x", "width"))}, r"gives the feature 'x' twice; list all .* x=COLUMN,"),
        (
            "csv",
            {"columns": (("species", "height"),), "categories": ("species",)},
            r"--categories species makes a feature 'species', but .* Pass --columns OTHER=species",
        ),
    ],
)
def test_options_that_would_have_no_effect_are_refused(tables, tmp_path, suffix, options, words):
    with pytest.raises(ParametersError, match=words):
        pack_table(tables / f"a.{suffix}", tmp_path / "out", **options)


def test_words_that_are_no_class_are_refused(tables, tmp_path):
    for suffix in ("csv", "jsonl", "parquet"):
        with pytest.raises(
            DataError, match=r"column 'species' holds 'cat', which is not a number.*--categories species"
        ):
            pack_table(tables / f"a.{suffix}", tmp_path / "out")


def test_whole_and_broken_numbers_in_one_feature_become_a_float_vector(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2.5\n3,4\n")
    features = pack_table(tmp_path / "a.csv", tmp_path / "out", columns=(("x", "a,b"),))
    np.testing.assert_array_equal(features["x"], [[1, 2.5], [3, 4]])
    assert features["x"].dtype == np.float32


def test_lists_keep_their_shape(tmp_path):
    values = np.arange(24).reshape(4, 2, 3)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"x": value.tolist(), "y": 1.5}) + "\n" for value in values))
    features = pack_table(tmp_path / "a.jsonl", tmp_path / "out")
    np.testing.assert_array_equal(features["x"], values)
    assert features["x"].dtype == np.int64
    table = pyarrow.table({"v": pyarrow.array(values.reshape(4, 6).tolist(), pyarrow.list_(pyarrow.float32(), 6))})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    np.testing.assert_array_equal(pack_table(tmp_path / "b.parquet", tmp_path / "out2")["v"], values.reshape(4, 6))


def test_missing_values_are_named_or_left_out(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,\n5,6\n")
    with pytest.raises(DataError, match=r"a\.csv', line 3: column 'b' has no value.*--missing skip"):
        pack_table(tmp_path / "a.csv", tmp_path / "out")
    np.testing.assert_array_equal(pack_table(tmp_path / "a.csv", tmp_path / "out", missing="skip")["a"], [1, 5])
    assert read_manifest(tmp_path / "out").details == {"rows_skipped": 1, "missing_values": {"b": 1}}
    (tmp_path / "b.jsonl").write_text('{"a": 1, "b": 2}\n\n{"a": null, "b": 2}\n')
    with pytest.raises(DataError, match=r"b\.jsonl', line 3: column 'a' has no value"):
        pack_table(tmp_path / "b.jsonl", tmp_path / "no")


def test_words_of_a_column_are_labels_that_train(tmp_path, capsys):
    """Iris, its species as words: 95% of the flowers or more are recognized."""
    iris = sklearn.datasets.load_iris()
    rows = [",".join([*map(str, row), iris.target_names[k]]) for row, k in zip(iris.data, iris.target, strict=True)]
    rows = [rows[k] for k in np.random.default_rng(0).permutation(len(rows))]
    (tmp_path / "iris.csv").write_text("\n".join(["a,b,c,d,species", *rows]) + "\n")
    words = "--columns x=a,b,c,d --columns label=species --categories species"
    assert main(["pack", str(tmp_path / "iris.csv"), str(tmp_path / "packed"), *words.split()]) == 0
    assert "'species': ['setosa', 'versicolor', 'virginica']" in capsys.readouterr().out
    sketch = Sketch(seed=1)
    value = sketch.node("MatMul", "hidden", sketch.input("x", ["batch", 4]), sketch.weight("hidden.weight", 4, 16))
    value = sketch.node("MatMul", "logits", sketch.node("Tanh", "bent", value), sketch.weight("last.weight", 16, 3))
    ir.save(sketch.model(value), tmp_path / "net.onnx")
    run = {
        "paths": {"model_path": "net.onnx", "train_data_dir": "packed", "test_data_dir": "packed"},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"},
        "training": {"batch_size": 30, "num_epochs": 40},
        "learning_rate": {"initial_lr": 0.03},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert float(re.search(r"accuracy (\S+)%", capsys.readouterr().out)[1]) >= 95
