"""Which tokens of a conversation are answers: those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.data.packing.options import ChatOptions
from tests.data.packing.chat.packed_chats import MARKED, TURNS, details, packed, write_tokenizer

UNMARKED = {
    name: text.replace("{% generation %}", "").replace("{% endgeneration %}", "") for name, text in MARKED.items()
}


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("is_marked", [True, False])
def test_answers_are_those_of_transformers(name: str, is_marked: bool, tmp_path: Path) -> None:
    """With its own mask of the marked template; a template without marks gives the same."""
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "marked", MARKED[name])
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    expected = reference.apply_chat_template(TURNS, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = np.array(expected["input_ids"]), np.array(expected["assistant_masks"])
    assert 0 < mask.sum() < len(mask)
    if not is_marked:
        folder = write_tokenizer(tmp_path / "unmarked", UNMARKED[name])
    length = len(ids) + 3
    (sample,) = packed(tmp_path, [{"messages": TURNS}], ChatOptions(tokenizer=str(folder), sequence_length=length))
    np.testing.assert_array_equal(sample["input_ids"], [*ids, 256, 256, 256])
    np.testing.assert_array_equal(sample["attention_mask"], [1] * len(ids) + [0] * 3)
    np.testing.assert_array_equal(sample["labels"], [*np.where(mask, ids, -100)[1:], -100, -100, -100, -100])
    assert details(tmp_path)["tokens_with_loss"] == mask.sum()
    assert (tmp_path / "packed" / "chat_template.jinja").read_text() == (MARKED if is_marked else UNMARKED)[name]
