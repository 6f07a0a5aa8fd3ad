"""Files of tokenizers: next to a model or above, as JSON, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.data.manifest import read_manifest
from onward.data.packing.tokenizer_files import find_tokenizer_of_model, load_tokenizer
from onward.errors import DataError
from tests.data.packing.word_pieces import TEXTS, WORDS, packed, table, tokenizers, word_pieces


def test_a_tokenizer_json_gives_the_same_and_is_kept_beside_the_shards(tmp_path: Path) -> None:
    """Whatever truncation and padding it has of its own, and as a folder that holds it."""
    vocabulary = word_pieces(tmp_path)
    first = packed(table(tmp_path), vocabulary, tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = load_tokenizer(vocabulary)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]", length=7)
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "second").mkdir()
    second = packed(table(tmp_path), folder, tmp_path / "second")
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)
    kept = tokenizers.Tokenizer.from_file(str(tmp_path / "packed" / "tokenizer.json"))
    assert kept.encode(TEXTS[0]).ids == first["input_ids"][0].tolist()
    manifest = read_manifest(tmp_path / "packed")
    assert manifest is not None
    assert manifest.details == {"vocabulary_size": len(WORDS), "sequence_length": 16}


@pytest.mark.parametrize("place", ["model.onnx", "onnx/model.onnx"])
def test_the_tokenizer_of_a_model_is_next_to_it_or_above(place: str, tmp_path: Path) -> None:
    word_pieces(tmp_path)
    (tmp_path / "onnx").mkdir()
    found = find_tokenizer_of_model(tmp_path / place)
    assert found is not None
    assert found.resolve() == tmp_path / "vocab.txt"
    assert find_tokenizer_of_model(tmp_path / "other" / "model.onnx") is None


def test_a_sentencepiece_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(b"")
    with pytest.raises(DataError) as raised:
        load_tokenizer(tmp_path)
    assert "is a SentencePiece model, which onward does not read. Write a tokenizer.json next to it" in str(
        raised.value
    )
