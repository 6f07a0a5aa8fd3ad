"""A table with a column of text, or a pair of them, against a model of token ids: classification, regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from onward.data.packing.options import PackOptions, TableOptions
from onward.data.packing.text_columns import count_tokens
from onward.data.packing.tokenizer_files import find_tokenizer_of_model, load_tokenizer
from onward.errors import DataError
from onward.proposal.data_facts import WORDS, DataFacts, Feature
from onward.proposal.label import Label
from onward.proposal.match_text import token_port
from onward.proposal.matching import Match, choose_label, free_label_name, is_label_name, synthesized, words_of
from onward.proposal.model_facts import ModelFacts, Port
from onward.proposal.proposal import Answers, Packing, Question
from onward.proposal.task import find_task

TEXT_NAMES = frozenset(
    {
        "text", "sentence", "review", "content", "comment", "message", "body", "tweet", "utterance", "document",
        "title", "description", "headline", "question", "query", "passage", "premise", "hypothesis", "context",
        "abstract",
    }
)  # fmt: skip
"""How columns of text are called most often."""

PAIRS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text_a", "text_b"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "passage"), ("question", "context"), ("question", "sentence"),
    ("query", "passage"), ("query", "document"), ("title", "body"),
)  # fmt: skip
"""Columns that are read as a pair of texts."""

_LONGEST = 512
_TRIED_TEXTS = 2000


def text_columns(model: ModelFacts, ports: Sequence[Port], data: DataFacts, answers: Answers) -> tuple[Feature, ...]:
    """The columns of text that a model of token ids reads; none: it reads no token ids, or the table has no text."""
    port = token_port(model, list(ports))
    if port is None or port.sample == (1,):
        return ()
    label = answers.label
    words = [one for one in data.features if one.dtype == WORDS and one.name != label]
    if answers.inputs is not None:
        return tuple(one for name in answers.inputs for one in words if one.name == name)
    texts = [one for one in words if not is_label_name(one.name)]
    named = {one.name.lower(): one for one in texts}
    pair = next((pair for pair in PAIRS if set(pair) <= set(named)), None)
    if pair is not None:
        return named[pair[0]], named[pair[1]]
    called = [one for one in texts if TEXT_NAMES & set(words_of(one.name))]
    return tuple(sorted(called or texts, key=lambda one: -_mean_length(one))[:1])


def _mean_length(column: Feature) -> float:
    return float(np.mean([len(text) for text in column.words[:_TRIED_TEXTS]])) if column.words else 0.0


def match_text_table(
    model: ModelFacts,
    ports: Sequence[Port],
    data: DataFacts,
    texts: tuple[Feature, ...],
    answers: Answers,
    folder: Path,
) -> Match:
    """How texts with labels go with a model: tokenizer, length of the sequences, label.

    Raises:
        DataError: no tokenizer is known, it is another model's, or no label is left; with what to do.
    """
    tokens = token_port(model, list(ports))
    assert tokens is not None
    tokenizer, why = _tokenizer(model, tokens, texts, data, answers)
    length, why_length = _length(model, tokens, texts, tokenizer, answers)
    made = {port: _source_of(port) for port in ports if port is not tokens}
    _check_sources(model, made)
    label, questions = _label(model, texts, data, answers)
    task = find_task(model, Label(label, label.words), answers.prediction, answers.loss)
    name = free_label_name(model, label.name)
    options = PackOptions(
        source=TableOptions(
            columns=((name, label.name),),
            categories=(label.name,) if label.dtype == WORDS else (),
            text=((tokens.name, ",".join(one.name for one in texts)),),
            text_mask=_only([port.name for port, kind in made.items() if kind == "mask"]),
            text_types=_only([port.name for port, kind in made.items() if kind == "types"]),
            text_tokenizer=str(tokenizer),
            text_length=length,
            delimiter=data.delimiter,
            missing="skip" if data.missing_rows else "error",
        ),
        transform=(
            *((tokens.name, f"positions:{port.name}") for port, kind in made.items() if kind == "positions"),
            *((name, operation) for operation in task.operations),
        ),
        cast=(
            *((port.name, port.dtype) for port in ports if port.dtype not in ("int64", "?")),
            *(((name, task.cast),) if task.cast else ()),
        ),
        shuffle_buffer=min(data.sample_count, 100_000),
    )
    listed = " and ".join(repr(one.name) for one in texts)
    reasons = [
        f"input {tokens.name!r} is made of the text in {listed}{', as pairs' if len(texts) == 2 else ''}",
        why,
        why_length,
        f"the label is {label.name!r}",
        *(f"{label.name}: {one}" for one in task.reasons),
    ]
    if data.missing_rows:
        reasons.append(f"{data.missing_rows} rows with missing values are left out")
    dropped = [one.name for one in data.features if one not in texts and one.name != label.name]
    notes = (f"columns that are not used: {', '.join(map(repr, dropped))}.",) if dropped else ()
    task = replace(task, text=f"{task.text} of texts")
    return Match(
        task=task,
        label=name,
        name_map={},
        packing=Packing(source=data.path, folder=folder, options=options, reasons=tuple(reasons)),
        questions=questions,
        notes=notes,
    )


def _check_sources(model: ModelFacts, made: Mapping[Port, str | None]) -> None:
    missing = [port for port, kind in made.items() if kind is None]
    if missing:
        raise DataError(
            f"{str(model.path)!r} reads {'; '.join(map(str, missing))} besides token ids, which a text does not give. "
            "Pass an .npz file with an array for each input and one of labels."
        )


def _source_of(port: Port) -> str | None:
    """What a tokenizer gives for an input in addition to token ids: "mask", "types", "positions"; None: nothing."""
    made = synthesized(port, "tokens")
    kinds = {"ones": "mask", "zeros": "types", "positions": "positions"}
    return None if made is None else kinds[made.partition("=")[2].partition(":")[0]]


def _only(names: list[str]) -> str:
    return names[0] if names else ""


def _label(
    model: ModelFacts, texts: Sequence[Feature], data: DataFacts, answers: Answers
) -> tuple[Feature, tuple[Question, ...]]:
    left = [one for one in data.features if one not in texts]
    label, questions = choose_label(model, left, answers.label, data.features)
    if label is None:
        raise DataError(
            f"{str(data.path)!r} has no column left for the label besides the text "
            f"{', '.join(repr(one.name) for one in texts)}. Add a label column, or pass --inputs with the text columns."
        )
    return label, questions


def _tokenizer(
    model: ModelFacts, tokens: Port, texts: Sequence[Feature], data: DataFacts, answers: Answers
) -> tuple[Path, str]:
    """The tokenizer that the model was made for."""
    if answers.tokenizer is not None:
        path, why = Path(answers.tokenizer), "the tokenizer is set by --tokenizer"
    else:
        found = find_tokenizer_of_model(model.path)
        if found is None:
            listed = " and ".join(repr(one.name) for one in texts)
            raise DataError(
                f"{str(data.path)!r} has text in column {listed} for input {tokens} of {str(model.path)!r}, and there "
                "is no tokenizer next to the model. Put the tokenizer of the model there (tokenizer.json, vocab.txt, "
                "or vocab.json with merges.txt), or pass --tokenizer PATH: a file of these, or the folder of the model "
                "as Hugging Face's save_pretrained writes it."
            )
        path, why = found, f"{found.name} is next to the model"
    count, rows = load_tokenizer(path).get_vocab_size(), model.tables.get(tokens.name)
    if rows is not None and count > rows:
        raise DataError(
            f"tokenizer {str(path)!r} has {count} tokens, and the embedding of input {tokens.name!r} has {rows} rows: "
            "it is the tokenizer of another model. Pass the model's own with --tokenizer."
        )
    return path, why


def _length(
    model: ModelFacts, tokens: Port, texts: Sequence[Feature], tokenizer: Path, answers: Answers
) -> tuple[int, str]:
    size = tokens.sample[0] if tokens.sample else None
    if isinstance(size, int):
        return size, f"the sequence length in the model is fixed to {size} tokens"
    if answers.sequence_length is not None:
        return answers.sequence_length, "the sequence length is set by --sequence-length"
    counts = [count_tokens(tokenizer, one.words[:: max(1, len(one.words) // _TRIED_TEXTS)]) for one in texts]
    usual = sum(int(np.ceil(np.percentile(one, 99))) for one in counts)
    most = min(_LONGEST, model.positions or _LONGEST)
    length = min(most, max(8, -(-usual // 8) * 8))
    longer = " (the longest are cut off)" if usual > length or usual < sum(map(max, counts)) else ""
    return length, f"sequences have {length} tokens: 99 % of the texts have at most {usual}{longer}"
