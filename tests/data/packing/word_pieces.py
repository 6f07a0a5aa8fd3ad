"""Tables of text, and a tokenizer of word pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.cli import main
from onward.data.shard_format import read_samples

tokenizers = pytest.importorskip("tokenizers")
TEXTS = [
    "A good film, truly.",
    "Bad!",
    "The end of it was neither good nor bad; it was long " + "and long " * 9,
    "É 漢字",
]
VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] a good film , truly . bad ! the end of it was neither nor ; long and ##d e"
WORDS = VOCABULARY.split()


def word_pieces(folder: Path) -> Path:
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder / "vocab.txt"


def table(folder: Path) -> Path:
    rows = [
        {"review": text, "reply": other, "stars": k % 3}
        for k, (text, other) in enumerate(zip(TEXTS, TEXTS[::-1], strict=True))
    ]
    (folder / "reviews.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder / "reviews.jsonl"


def packed(source: Path, tokenizer: Path, folder: Path, text: str = "input_ids=review", length: int = 16) -> Any:
    options = ["--text", text, "--text-mask", "attention_mask", "--text-types", "token_type_ids"]
    options += ["--text-tokenizer", str(tokenizer), "--text-length", str(length), "--columns", "label=stars"]
    assert main(["pack", str(source), str(folder / "packed"), *options]) == 0
    samples = [one for shard in sorted((folder / "packed").glob("*.pb")) for one in read_samples(shard)]
    return {name: np.stack([one[name] for one in samples]) for name in samples[0]}
