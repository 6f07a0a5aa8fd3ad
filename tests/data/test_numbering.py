"""Folders of shards whose labels, categories, tokens or sample rates mean something else than the training data's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onward.data.manifest import Manifest
from onward.data.numbering import Numbering, check_same_numbering, unseen_classes
from onward.errors import DataError


def packed(folder: str | Path, kind: str = "audio", **details: Any) -> Numbering:
    manifest = Manifest(
        source=f"{Path(folder).name}_in", kind=kind, options={}, features={}, sample_count=0, shards=(), details=details
    )
    return Numbering(Path(folder), manifest)


def test_other_classes_are_refused() -> None:
    words = (
        r"^classes have other numbers in 'held' than in 'train', from number 0: 0 'noise', 1 'tone' against 0 'chirp', "
        r"1 'noise', 2 'tone' \(pack\.json\)\. Pack both together \(the second may lack some\): onward pack train_in "
        r"DEST --test-source held_in\. Or pack it again from data with the same names\.$"
    )
    with pytest.raises(DataError, match=words):
        check_same_numbering(
            packed("train", classes=["chirp", "noise", "tone"]), packed("held", classes=["noise", "tone"])
        )


def test_fewer_classes_of_the_same_numbers_are_not() -> None:
    train, held = packed("train", classes=["a", "b", "c"]), packed("held", classes=["a", "b"])
    check_same_numbering(train, held)
    assert unseen_classes(train, held) == ""
    check_same_numbering(held, train)
    assert "have 1 classes that the training data ('held') lack: 'c'. Pack training" in unseen_classes(held, train)
    check_same_numbering(train, packed("other"))


def test_other_categories_are_refused() -> None:
    train, held = (packed(name, "table", categories={"color": words}) for name, words in (("t", "rg"), ("h", "rb")))
    check_same_numbering(train, held)  # words that are no lists say nothing
    train, held = (
        packed(name, "table", categories={"color": list(words)}) for name, words in (("t", "rg"), ("h", "rb"))
    )
    with pytest.raises(
        DataError, match=r"words of column 'color' have other numbers in 'h' than in 't', from number 1"
    ):
        check_same_numbering(train, held)


def test_another_sample_rate_is_refused() -> None:
    words = r"'h' have 8000 Hz, those in 't' 16000 Hz .*with the same rate: onward pack h_in DEST --sample-rate 16000\."
    with pytest.raises(DataError, match=words):
        check_same_numbering(packed("t", sample_rate=16000), packed("h", sample_rate=8000))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    def text(name: str, size: int = 2, **tokenizer: Any) -> Numbering:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"added_tokens": [], **tokenizer}))
        return packed(tmp_path / name, "text", vocabulary_size=size)

    train = text("t", model={"vocab": {"a": 0, "b": 1}})
    check_same_numbering(train, text("h", model={"vocab": {"a": 0, "b": 1}}, padding={"length": 3}))
    with pytest.raises(DataError, match=r"another tokenizer than '.*t', both of 2 tokens .* --tokenizer .*t/tokenizer"):
        check_same_numbering(train, text("h", model={"vocab": {"b": 0, "a": 1}}))
    with pytest.raises(DataError, match=r"another tokenizer than '.*t', 3 tokens against 2 \(tokenizer\.json\)"):
        check_same_numbering(train, text("h", 3))
    with pytest.raises(DataError, match=r"h/tokenizer\.json' is no tokenizer: 'model'\. Pack the data again"):
        check_same_numbering(train, text("h"))
    (tmp_path / "h" / "tokenizer.json").unlink()
    check_same_numbering(train, packed(tmp_path / "h", "text", vocabulary_size=2))
