"""Columns of text -> token ids: the same as the transformers package makes, from every file of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onward.cli import main
from onward.data.packing.tokenizer_files import load_tokenizer
from tests.data.packing.word_pieces import TEXTS, WORDS, packed, table, tokenizers, word_pieces


def byte_pairs(folder: Path, *specials: str) -> Path:
    """A byte-level BPE of these texts, as its two files."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS, vocab_size=320, special_tokens=list(specials), show_progress=False)
    tokenizer.save_model(str(folder))
    return folder / "vocab.json"


def expected(kind: str, folder: Path, texts: list[str], pairs: list[str] | None, length: int) -> dict[str, np.ndarray]:
    """What the transformers package makes of them."""
    transformers = pytest.importorskip("transformers")
    if kind == "WordPiece":
        tokenizer = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True)
    else:
        of = transformers.RobertaTokenizerFast
        tokenizer = of(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    options = {"padding": "max_length", "truncation": True, "max_length": length, "return_token_type_ids": True}
    found = (
        tokenizer(texts, pairs, return_tensors="np", **options)
        if pairs
        else tokenizer(texts, return_tensors="np", **options)
    )
    return dict(found)


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("kind", ["WordPiece", "byte pairs"])
def test_tokens_are_those_of_transformers(kind: str, is_pair: bool, tmp_path: Path) -> None:
    specials = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    tokenizer = word_pieces(tmp_path) if kind == "WordPiece" else byte_pairs(tmp_path, *specials)
    found = packed(table(tmp_path), tokenizer, tmp_path, "input_ids=review" + (",reply" if is_pair else ""))
    wanted = expected(kind, tmp_path, TEXTS, TEXTS[::-1] if is_pair else None, 16)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert set(found) == {"input_ids", "attention_mask", "token_type_ids", "label"}
    assert found["label"].tolist() == [0, 1, 2, 0]
    assert (found["attention_mask"].sum(1) > 2).all()


def test_padding_without_a_token_for_it(tmp_path: Path) -> None:
    """GPT-2's has none: its end of text, masked out; `tokenizer_config.json` may name another."""
    vocabulary = byte_pairs(tmp_path, "<|endoftext|>", "<extra>")
    found = packed(table(tmp_path), vocabulary, tmp_path, length=64)
    assert (found["input_ids"][found["attention_mask"] == 0] == 0).all()
    assert (found["attention_mask"] == 0).any()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<extra>"}}))
    (tmp_path / "again").mkdir()
    found = packed(table(tmp_path), vocabulary, tmp_path / "again", length=64)
    assert (found["input_ids"][found["attention_mask"] == 0] == 1).all()


def test_case_matters_where_the_vocabulary_has_capitals(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "Good"]))
    assert load_tokenizer(tmp_path / "vocab.txt").encode("Good good").tokens == ["[CLS]", "Good", "good", "[SEP]"]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert load_tokenizer(tmp_path / "vocab.txt").encode("Good good").tokens == ["[CLS]", "good", "good", "[SEP]"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "ids=review"], "--text needs --text-tokenizer PATH"),
        (["--text-mask", "mask"], "--text-mask has no effect without --text NAME=COLUMN; set both."),
        (["--text", "ids=review", "--text-tokenizer", "nowhere.json"], "tokenizer 'nowhere.json' does not exist; pass"),
        (["--text", "ids=a,b,c", "--text-tokenizer", "vocab.txt"], "names 3 columns; expected one, or two"),
        (["--text", "ids=missing", "--text-tokenizer", "vocab.txt"], "has no column 'missing'; it has 'review'"),
        (["--text", "stars=review", "--text-tokenizer", "vocab.txt", "--columns", "stars=stars"],
         "--text and a column both make the feature 'stars'; rename one"),
        (["--text", "ids=review", "--text-tokenizer", "vocab.txt", "--text-length", "2"], "text_length is 2; expected"),
        (["--text", "ids=review", "--text-tokenizer", "bare.txt"], "lacks [UNK], [CLS], [SEP], so it is no WordPiece"),
    ],
)  # fmt: skip
def test_refusals(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    word_pieces(tmp_path)
    (tmp_path / "bare.txt").write_text("a\nb\n")
    table(tmp_path)
    assert main(["pack", "reviews.jsonl", "packed", *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()
