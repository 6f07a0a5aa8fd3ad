"""Tokenizers: trained, taken from elsewhere, and those that do not fit."""

import numpy as np
import pytest
import tokenizers

from onward.data.packing import TextOptions
from onward.errors import DataError, ParametersError
from tests.data.packing.texts import load, make_text, pack_text


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_tokenizer_file_turns_tokens_back_into_text_and_text_into_tokens(tmp_path, tokenizer):
    text = make_text(100) + "Grüße, 世界! \t\x00 ~\n"
    (tmp_path / "a.txt").write_text(text)
    summary = pack_text(
        tmp_path / "a.txt", tmp_path / "out", tokenizer=tokenizer, sequence_length=1, vocabulary_size=400
    )
    features = load(tmp_path / "out")
    ids = [*features["tokens"][:, ...].reshape(-1).tolist(), int(features["labels"].reshape(-1)[-1])]
    loaded = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    details = summary.folders[tmp_path / "out"].details
    assert loaded.get_vocab_size() == details["vocabulary_size"] <= 400
    assert loaded.token_to_id("<|endoftext|>") == details["special_tokens"]["<|endoftext|>"] == ids[-1]
    assert loaded.decode(ids) == text
    assert loaded.encode(text).ids == ids[:-1]


def test_a_bpe_is_trained_the_same_twice(tmp_path):
    (tmp_path / "a.txt").write_text(make_text(300))
    for out in ("one", "two"):
        pack_text(tmp_path / "a.txt", tmp_path / out, tokenizer="bpe", vocabulary_size=350, sequence_length=8)
    for name in ("tokenizer.json", "shard-000000.pb", "pack.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_tokenizer_from_elsewhere_is_used(tmp_path):
    (tmp_path / "a.txt").write_text(make_text(50))
    pack_text(tmp_path / "a.txt", tmp_path / "one", tokenizer="bpe", vocabulary_size=300, sequence_length=8)
    file = str(tmp_path / "one" / "tokenizer.json")
    pack_text(tmp_path / "a.txt", tmp_path / "two", tokenizer=file, sequence_length=8)
    np.testing.assert_array_equal(load(tmp_path / "one")["tokens"], load(tmp_path / "two")["tokens"])
    with pytest.raises(DataError, match=r"lacks the token \[PAD\], \[CLS\], \[SEP\], \[MASK\], which bert needs"):
        pack_text(tmp_path / "a.txt", tmp_path / "no", tokenizer=file, objective="bert")
    with pytest.raises(DataError, match="lacks the token </s>, which causal needs; name its own with --end-of-text"):
        pack_text(tmp_path / "a.txt", tmp_path / "no", tokenizer=file, end_of_text="</s>")
    with pytest.raises(DataError, match="tokenizer 'wordpiece' does not exist; give 'bytes', 'bpe' or the path"):
        pack_text(tmp_path / "a.txt", tmp_path / "no", tokenizer="wordpiece")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match=r"broken\.json' cannot be read"):
        pack_text(tmp_path / "a.txt", tmp_path / "no", tokenizer=str(tmp_path / "broken.json"))


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer '.*broken\.json' cannot be read"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "broken.json"))
    marks = ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]
    model = tokenizers.models.WordLevel({mark: k for k, mark in enumerate(marks)}, unk_token="[MASK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "late.json"))
    with pytest.raises(DataError, match=r"has \[PAD\] at 1; BERT samples are padded with 0.*must be token 0"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", objective="bert", tokenizer=str(tmp_path / "late.json"))
    with pytest.raises(ParametersError, match="max_predictions_per_seq is 0; expected at least 1"):
        TextOptions(max_predictions_per_seq=0)
