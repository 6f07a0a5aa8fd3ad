import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from onward.data import DataLoader
from onward.data.manifest import read_manifest
from onward.data.packing import PackOptions, TableOptions, pack
from onward.errors import DataError, ParametersError

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


def pack_table(source, dest, **options):
    pack(source, dest, PackOptions(source=TableOptions(**options), progress=False))
    batches = list(DataLoader({}, dest).one_pass(1000))
    return {name: np.concatenate([batch.features[name] for batch in batches]) for name in batches[0].features}


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


def test_csv_without_header_with_another_delimiter_quotes_and_a_byte_order_mark(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf1;"2"\r\n\r\n3;4\r\n')
    features = pack_table(tmp_path / "a.csv", tmp_path / "out", header=False, delimiter=";")
    np.testing.assert_array_equal(features["column_0"], [1, 3])
    np.testing.assert_array_equal(features["column_1"], [2, 4])


def test_lists_keep_their_shape(tmp_path):
    values = np.arange(24).reshape(4, 2, 3)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"x": value.tolist(), "y": 1.5}) + "\n" for value in values))
    features = pack_table(tmp_path / "a.jsonl", tmp_path / "out")
    np.testing.assert_array_equal(features["x"], values)
    assert features["x"].dtype == np.int64
    table = pyarrow.table({"v": pyarrow.array(values.reshape(4, 6).tolist(), pyarrow.list_(pyarrow.float32(), 6))})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    np.testing.assert_array_equal(pack_table(tmp_path / "b.parquet", tmp_path / "out2")["v"], values.reshape(4, 6))


def test_several_files_follow_each_other(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(3):
        (tmp_path / "in" / f"{k}.csv").write_text(f"a,b\n{k},1\n{k},2\n")
    np.testing.assert_array_equal(pack_table(tmp_path / "in", tmp_path / "out")["a"], [0, 0, 1, 1, 2, 2])


def test_missing_values_are_named_or_left_out(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,\n5,6\n")
    with pytest.raises(DataError, match=r"a\.csv', line 3: column 'b' has no value.*--missing skip"):
        pack_table(tmp_path / "a.csv", tmp_path / "out")
    np.testing.assert_array_equal(pack_table(tmp_path / "a.csv", tmp_path / "out", missing="skip")["a"], [1, 5])
    assert read_manifest(tmp_path / "out").details == {"rows_skipped": 1, "missing_values": {"b": 1}}
    (tmp_path / "b.jsonl").write_text('{"a": 1, "b": 2}\n\n{"a": null, "b": 2}\n')
    with pytest.raises(DataError, match=r"b\.jsonl', line 3: column 'a' has no value"):
        pack_table(tmp_path / "b.jsonl", tmp_path / "no")


def test_bad_cells_and_rows_are_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("a,b\n" + "1,2\n" * 2000 + "1,2.5\n")
    with pytest.raises(DataError, match=r"line 2002: column 'b' holds '2\.5', but whole numbers before"):
        pack_table(file, tmp_path / "out")
    file.write_text("a,b\n" + "1,2.5\n" * 2000 + "1,x\n")
    with pytest.raises(DataError, match="line 2002: column 'b' holds 'x', but numbers before"):
        pack_table(file, tmp_path / "out")
    file.write_text("a,b\n1,2\n3\n")
    with pytest.raises(DataError, match="line 3: 1 values for 2 columns; is ',' the delimiter"):
        pack_table(file, tmp_path / "out")
    file.write_text("a,a\n1,2\n")
    with pytest.raises(DataError, match="names a column twice"):
        pack_table(file, tmp_path / "out")
    file.write_text("a,b\n")
    with pytest.raises(DataError, match=r"a\.csv' has no rows"):
        pack_table(file, tmp_path / "out")
    file.write_bytes(b"a\n\xff\n")
    with pytest.raises(DataError, match=r"a\.csv' cannot be read: .*utf-8"):
        pack_table(file, tmp_path / "out")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n[1]\n')
    with pytest.raises(DataError, match="line 2: expected an object, found list"):
        pack_table(tmp_path / "b.jsonl", tmp_path / "out")
    (tmp_path / "c.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"c\.parquet' cannot be read"):
        pack_table(tmp_path / "c.parquet", tmp_path / "out")


def test_a_delimiter_of_two_characters_and_lines_that_are_no_json_or_csv_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a;;b\n1;;2\n")
    with pytest.raises(DataError, match="the delimiter is ';;'; expected one character"):
        pack_table(tmp_path / "a.csv", tmp_path / "out", delimiter=";;")
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1," + "2" * 200_000 + "\n")
    with pytest.raises(DataError, match=r"a\.csv', line \d: field larger than field limit"):
        pack_table(tmp_path / "a.csv", tmp_path / "out")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"table '.*b\.jsonl', line 2: not JSON \(Expecting value"):
        pack_table(tmp_path / "b.jsonl", tmp_path / "out")
