"""Rows of tables: several files, delimiters, cells that cannot be read."""

import numpy as np
import pytest

from onward.errors import DataError
from tests.data.packing.packed_tables import pack_table


def test_csv_without_header_with_another_delimiter_quotes_and_a_byte_order_mark(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf1;"2"\r\n\r\n3;4\r\n')
    features = pack_table(tmp_path / "a.csv", tmp_path / "out", header=False, delimiter=";")
    np.testing.assert_array_equal(features["column_0"], [1, 3])
    np.testing.assert_array_equal(features["column_1"], [2, 4])


def test_several_files_follow_each_other(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(3):
        (tmp_path / "in" / f"{k}.csv").write_text(f"a,b\n{k},1\n{k},2\n")
    np.testing.assert_array_equal(pack_table(tmp_path / "in", tmp_path / "out")["a"], [0, 0, 1, 1, 2, 2])


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
    with pytest.raises(DataError, match=r"^'.*b\.jsonl', line 2 is not JSON: expecting value at column 6\. Fix the l"):
        pack_table(tmp_path / "b.jsonl", tmp_path / "out")
