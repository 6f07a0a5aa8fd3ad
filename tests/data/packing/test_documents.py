"""Documents: of files, lines and columns; what holds no text is named."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from onward.data.packing import documents as documents_module
from onward.errors import DataError
from tests.data.packing.texts import load, make_text, pack_text


def test_pieces_do_not_change_the_tokens(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(make_text(200) + "é" * 3000)
    for tokenizer in ("bytes", "bpe"):
        pack_text(
            tmp_path / "a.txt", tmp_path / f"{tokenizer}1", tokenizer=tokenizer, sequence_length=16, vocabulary_size=300
        )
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 101)
    for tokenizer in ("bytes", "bpe"):
        pack_text(
            tmp_path / "a.txt", tmp_path / f"{tokenizer}2", tokenizer=tokenizer, sequence_length=16, vocabulary_size=300
        )
    assert (tmp_path / "bytes1" / "shard-000000.pb").read_bytes() == (
        tmp_path / "bytes2" / "shard-000000.pb"
    ).read_bytes()
    for folder in ("bpe1", "bpe2"):
        tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / folder / "tokenizer.json"))
        tokens = load(tmp_path / folder)["tokens"].reshape(-1)
        assert (tmp_path / "a.txt").read_text().startswith(tokenizer.decode(tokens.tolist()).rstrip("�"))


def test_text_columns_of_jsonl_and_parquet_hold_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = [f"text number {k} " * 3 for k in range(600)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"id": k, "body": text}) + "\n" for k, text in enumerate(texts))
    )
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "b.parquet")
    stream = b"\0".join(text.encode() for text in texts) + b"\0"
    expected = np.frombuffer(stream, np.uint8).astype(np.int64)
    expected = np.where(expected == 0, 256, expected)[
        : len(stream) // 10 * 10 if len(stream) % 10 else len(stream) - 10
    ]
    for name in ("a.jsonl", "b.parquet"):
        pack_text(tmp_path / name, tmp_path / f"{name}.out", text_field="body", sequence_length=10)
        np.testing.assert_array_equal(load(tmp_path / f"{name}.out")["tokens"].reshape(-1), expected)
    with pytest.raises(DataError, match=r"a\.jsonl', line 1: no text under 'text' \(there are 'id', 'body'\)"):
        pack_text(tmp_path / "a.jsonl", tmp_path / "no")
    with pytest.raises(DataError, match=r"no column 'text' \(there are 'body'\)"):
        pack_text(tmp_path / "b.parquet", tmp_path / "no")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=r"b\.parquet' cannot be read"):
        pack_text(tmp_path / "b.parquet", tmp_path / "no")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text"')
    with pytest.raises(DataError, match=r"a\.jsonl', line 2 is not JSON: "):
        pack_text(tmp_path / "a.jsonl", tmp_path / "no")


def test_documents_of_many_are_split_whole(tmp_path):
    """Every document is one letter, so that a sample tells which it came from."""
    (tmp_path / "in").mkdir()
    for k in range(26):
        (tmp_path / "in" / f"{k:02d}.txt").write_text(chr(97 + k) * 100)
    summary = pack_text(tmp_path / "in", tmp_path / "out", test_fraction=0.3, sequence_length=10)
    letters = [set(np.unique(load(tmp_path / "out" / split)["tokens"])) - {256} for split in ("train", "test")]
    assert letters[0] | letters[1] == set(range(97, 123))
    assert not letters[0] & letters[1]
    assert letters[1]
    assert summary.folders[tmp_path / "out" / "test"].details["split_by"] == "document"


def test_blank_lines_can_end_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n \nthree\n")
    pack_text(tmp_path / "a.txt", tmp_path / "out", documents="blank-line", sequence_length=1)
    assert bytes((load(tmp_path / "out")["tokens"] % 256).tolist()) == b"one\ntwo\n\0three\n"


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"good and long enough")
    (tmp_path / "in" / "b.txt").write_bytes(b"caf\xe9 and more")
    options = {"tokenizer": "bpe", "vocabulary_size": 260, "sequence_length": 1}
    with pytest.raises(DataError, match=r"b\.txt' \(document 1\) is not UTF-8: .* at byte 3\. .*--undecodable skip"):
        pack_text(tmp_path / "in", tmp_path / "no", **options)
    decode = {}
    for how in ("skip", "replace"):
        summary = pack_text(tmp_path / "in", tmp_path / how, undecodable=how, **options)
        tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / how / "tokenizer.json"))
        decode[how] = tokenizer.decode(load(tmp_path / how)["tokens"].reshape(-1).tolist())
        assert ("documents_not_utf8" in summary.folders[tmp_path / how].details) == (how == "skip")
    assert decode == {"skip": "good and long enough", "replace": "good and long enoughcaf\ufffd and more"}
    pack_text(tmp_path / "in", tmp_path / "bytes", sequence_length=1)
    assert b"caf\xe9 and more" in bytes((load(tmp_path / "bytes")["tokens"] % 256).tolist())


def test_files_that_hold_no_text_are_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [3]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet': no column 'text' \(there are 'body', 'n'\).*--text-field"):
        pack_text(tmp_path / "a.parquet", tmp_path / "out")
    with pytest.raises(DataError, match=r"a\.parquet', row 0: column 'n' holds 3, not text"):
        pack_text(tmp_path / "a.parquet", tmp_path / "out", text_field="n")
    (tmp_path / "b.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"Parquet file '.*b\.parquet' cannot be read"):
        pack_text(tmp_path / "b.parquet", tmp_path / "out")
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text" "b"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl', line 2 is not JSON: expecting ':' delimiter at column"):
        pack_text(tmp_path / "c.jsonl", tmp_path / "out")
