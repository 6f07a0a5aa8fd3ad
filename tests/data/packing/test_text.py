"""X"""

import numpy as np
import pytest

from onward.data.packing import TextOptions
from onward.errors import DataError, ParametersError
from tests.data.packing.texts import load, pack_text


def test_bytes_become_tokens_and_each_is_a_label_once(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_bytes(b"world")
    (tmp_path / "in" / "a.txt").write_bytes("héllo\n".encode())
    summary = pack_text(tmp_path / "in", tmp_path / "out", sequence_length=4)
    stream = [*"héllo\n".encode(), 256, *b"world", 256]
    features = load(tmp_path / "out")
    np.testing.assert_array_equal(features["tokens"], [stream[0:4], stream[4:8], stream[8:12]])
    np.testing.assert_array_equal(features["labels"], [stream[1:5], stream[5:9], stream[9:13]])
    details = summary.folders[tmp_path / "out"].details
    assert (details["vocabulary_size"], details["token_count"], details["tokens_left_over"]) == (257, 14, 2)


def test_position_ids_count_from_zero(tmp_path):
    (tmp_path / "a.txt").write_text("hello world")
    pack_text(tmp_path / "a.txt", tmp_path / "out", sequence_length=5, position_ids=True)
    np.testing.assert_array_equal(load(tmp_path / "out")["position_ids"], [[0, 1, 2, 3, 4]] * 2)


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"has 6 tokens, fewer than one sample of sequence_length 256 .* \(257\)"):
        pack_text(tmp_path / "a.txt", tmp_path / "out")
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(DataError, match="only empty lines"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", objective="bert")


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(ParametersError, match="sequence_length is 4; bert needs at least 5"):
        TextOptions(objective="bert", sequence_length=4)
    with pytest.raises(ParametersError, match=r"masked_lm_probability is 1\.5"):
        TextOptions(masked_lm_probability=1.5)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ParametersError, match="vocabulary_size is 200; a byte-level BPE needs at least 257"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", tokenizer="bpe", vocabulary_size=200)
