"""Columns of text -> token ids, as classifiers of texts and of pairs of texts read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.options import TableOptions
from onward.data.packing.source import Sample
from onward.data.packing.tokenizer_files import find_padding, find_tokenizer, load_tokenizer
from onward.errors import ParametersError


@dataclass(frozen=True, kw_only=True)
class TextColumns:
    """How columns of text become features.

    Attributes:
        columns: one, or two that make a pair.
        features: feature -> which of what a tokenizer gives: "ids", "attention_mask" or "type_ids".
        tokenizer: truncates and pads.
        details: for the manifest.
        json: the text of a `tokenizer.json`.
    """

    columns: tuple[str, ...]
    features: Mapping[str, str]
    tokenizer: Any
    details: Mapping[str, Any]
    json: str

    def encode(self, texts: Sequence[Sequence[Any]]) -> list[Sample]:
        """The features of rows.

        Args:
            texts: of each column, a text for each row.
        """
        rows = [tuple(_as_text(value) for value in row) for row in zip(*texts, strict=True)]
        encodings = self.tokenizer.encode_batch([row[0] if len(row) == 1 else row for row in rows])
        return [
            {name: np.array(getattr(one, kind), np.int64) for name, kind in self.features.items()} for one in encodings
        ]


def open_text_columns(options: TableOptions) -> TextColumns | None:
    """What `--text` asks for; None: nothing.

    Raises:
        ParametersError: an option is missing, or has no effect without others.
        DataError: the tokenizer cannot be read.
    """
    if not options.text:
        given = [name for name in ("text_tokenizer", "text_mask", "text_types") if getattr(options, name)]
        if given:
            raise ParametersError(f"--{given[0].replace('_', '-')} has no effect without --text NAME=COLUMN; set both.")
        return None
    if len(options.text) > 1:
        raise ParametersError("--text is given twice; name both columns of a pair in one: --text NAME=COLUMN,COLUMN.")
    if not options.text_tokenizer:
        raise ParametersError("--text needs --text-tokenizer PATH: the tokenizer of the model that reads the tokens.")
    name, text = options.text[0]
    columns = tuple(text.split(","))
    if len(columns) > 2:
        raise ParametersError(f"--text {name}={text} names {len(columns)} columns; expected one, or two for pairs.")
    path = Path(options.text_tokenizer)
    tokenizer = load_tokenizer(path)
    file = (find_tokenizer(path) if path.is_dir() else path) or path
    tokenizer.enable_truncation(options.text_length)
    tokenizer.enable_padding(**find_padding(tokenizer, file), length=options.text_length)
    features = {name: "ids", options.text_mask: "attention_mask", options.text_types: "type_ids"}
    features.pop("", None)
    details = {"vocabulary_size": tokenizer.get_vocab_size(), "sequence_length": options.text_length}
    return TextColumns(
        columns=columns,
        features=features,
        tokenizer=tokenizer,
        details=details,
        json=tokenizer.to_str(pretty=True) + "\n",
    )


def count_tokens(path: Path, texts: Sequence[str]) -> list[int]:
    """Tokens of each text, special ones included.

    Raises:
        DataError: the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(path)
    tokenizer.no_padding()
    return [len(one.ids) for one in tokenizer.encode_batch(list(texts))]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
