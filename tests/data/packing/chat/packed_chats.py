"""Conversations, a tokenizer for them, and what is packed of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.data.packing import PackOptions, pack
from onward.data.packing.options import SourceOptions
from onward.data.packing.tokenizing import make_byte_tokenizer
from onward.data.shard_format import read_samples

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, who?"},
    {"role": "assistant", "content": "  I am é😀. "},
    {"role": "user", "content": "Really?"},
    {"role": "assistant", "content": "Yes."},
]
MARKED = {
    "ChatML": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "headers and trimmed contents": (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_end|>\n\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + eos_token }}{% endgeneration %}"
        "{% else %}{{ m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\n\n' }}{% endif %}"
    ),
    "questions in brackets": (
        "{{ bos_token }}{% set n = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set n.system = m.content ~ '\n\n' %}{% elif m.role == 'user' %}[INST] {{ n.system ~ m.content }} [/INST]"
        "{% set n.system = '' %}{% else %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% endif %}{% endfor %}"
    ),
}


def write_tokenizer(folder: Path, template: str) -> Path:
    """Bytes, `<|endoftext|>` first in a text, and ends of turns, with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(make_byte_tokenizer("chat").json)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def packed(folder: Path, rows: Sequence[Mapping[str, Any]], options: SourceOptions, **others: Any) -> list[Any]:
    source = write_rows(folder / "rows.jsonl", rows)
    pack(source, folder / "packed", PackOptions(source=options, progress=False, overwrite=True, **others))
    return [sample for shard in sorted((folder / "packed").rglob("*.pb")) for sample in read_samples(shard)]


def details(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "packed" / "pack.json").read_text())["details"]
    return found
