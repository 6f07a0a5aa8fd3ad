"""Text against a model of token ids: tokenizer, sequence length, and whether the next or masked tokens are learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from onward.data.packing.options import PackOptions, TextOptions
from onward.data.packing.tokenizer_files import find_tokenizer_of_model, load_tokenizer
from onward.errors import DataError, UserError
from onward.proposal.data_facts import DataFacts, Feature
from onward.proposal.label import Label
from onward.proposal.matching import Match, free_label_name, needed_inputs, synthesized
from onward.proposal.model_facts import ModelFacts, Port
from onward.proposal.proposal import Answers, Choice, Packing
from onward.proposal.task import Task, candidates, find_task

_BYTES = 257
_BYTES_MASKED = 261
_USUAL_LENGTH = 128

Objective = Literal["causal", "bert", "masked"]


def match_text(model: ModelFacts, data: DataFacts, answers: Answers, folder: Path) -> Match:
    """How text goes with a model.

    Raises:
        DataError: the model reads no token ids or predicts none, or no tokenizer is known that it was made for.
    """
    ports = needed_inputs(model, answers.prediction)
    tokens = token_port(model, ports)
    outputs = [port for port in candidates(model, answers.prediction) if port.shape is None or len(port.shape) == 3]
    if tokens is None or not outputs:
        what = (
            "no input of token ids ([batch, sequence], integers)"
            if tokens is None
            else ("no output with a score for every token ([batch, sequence, vocabulary])")
        )
        raise DataError(
            f"{str(data.path)!r} is text without labels, and {str(model.path)!r} has {what}. Pass data with labels: an "
            ".npz file with an array for each input and one of labels."
        )
    prediction = outputs[0]
    objective = _objective(model, prediction)
    vocabulary = _vocabulary(model, tokens, prediction)
    tokenizer, why = _tokenizer(model, data, answers, vocabulary, objective)
    length, why_length = _length(model, tokens, answers)
    text = TextOptions(
        objective=objective,
        sequence_length=length,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary or TextOptions.vocabulary_size,
        end_of_text=_end_of_text(tokenizer, objective),
    )
    if objective == "bert":
        return _match_bert(model, data, ports, text, (why, why_length), folder)
    made = {port.name: synthesized(port, "tokens") for port in ports if port is not tokens}
    missing = [name for name, operation in made.items() if operation is None]
    if missing:
        raise DataError(
            f"{str(model.path)!r} reads {', '.join(map(repr, missing))} besides token ids, which text lacks. "
            "Pass an .npz file with an array for each input and one of labels."
        )
    pairs = [(one.partition("=")[0], one.partition("=")[2]) for one in made.values() if one]
    casts = [(port.name, port.dtype) for port in ports if port is not tokens and port.dtype != "int64"]
    options = PackOptions(source=text, transform=tuple(pairs), cast=tuple(casts))
    task, label = _task(model, prediction, objective, length, answers)
    names = {one: other for one, other in (("tokens", tokens.name), ("labels", label)) if one != other}
    return Match(
        task=task,
        label=label,
        name_map=names,
        packing=Packing(source=data.path, folder=folder, options=options, reasons=(why, why_length)),
    )


def _task(model: ModelFacts, prediction: Port, objective: Objective, length: int, answers: Answers) -> tuple[Task, str]:
    values = np.zeros((1, length), np.int64)
    name = free_label_name(model, "labels")
    task = find_task(
        model, Label(Feature(name=name, dtype="int64", shape=(length,), values=values)), prediction.name, answers.loss
    )
    if objective == "causal":
        why = "the scores at a position do not depend on later tokens (tested): causal language model."
        task = replace(task, kind="language_model", text="predicting the next token")
    else:
        why = "the scores at a position depend on later tokens (tested): masked language model."
        task = replace(task, kind="masked_language_model", text="predicting masked tokens")
    loss = [Choice("loss.type", "softmax_cross_entropy", why), *task.loss[1:]]
    if objective == "masked":
        loss.append(Choice("loss.ignore_index", -100, "tokens that are not masked have the label -100."))
    notes = tuple(note for note in task.notes if "labels seen" not in note)
    return replace(task, loss=tuple(loss), notes=notes), name


def token_port(model: ModelFacts, ports: list[Port]) -> Port | None:
    """The input of token ids; None: the model has none."""
    of_ids = [
        port for port in ports if port.dtype in ("int64", "int32") and (port.sample is None or len(port.sample) == 1)
    ]
    indexing = [port for port in of_ids if port.name in model.tables and synthesized(port, "") is None]
    return next(iter([*indexing, *(port for port in of_ids if synthesized(port, "") is None)]), None)


def _objective(model: ModelFacts, prediction: Port) -> Objective:
    pairs = [port for port in model.outputs if port.sample == (2,) and port.is_float]
    if pairs and prediction.sample is not None and prediction.sample[-1] != 2:
        return "bert"
    from onward.proposal.causality import is_causal  # runs the model

    return "causal" if is_causal(model, prediction.name) else "masked"


def _vocabulary(model: ModelFacts, tokens: Port, prediction: Port) -> int | None:
    last = prediction.shape[-1] if prediction.shape else None
    sizes = [size for size in (last, model.tables.get(tokens.name)) if isinstance(size, int)]
    return min(sizes, default=None)


def _tokenizer(
    model: ModelFacts, data: DataFacts, answers: Answers, vocabulary: int | None, objective: Objective
) -> tuple[str, str]:
    if answers.tokenizer is not None:
        return answers.tokenizer, "the tokenizer is set by --tokenizer"
    found = find_tokenizer_of_model(model.path)
    if found is not None:
        return str(found), f"{found.name} is next to the model"
    if model.origin.is_trained:
        raise DataError(
            f"{str(model.path)!r} looks trained ({model.origin.evidence}), so it needs its own tokenizer, and "
            f"there is no tokenizer.json next to it. Put it there, or pass --tokenizer PATH ('bytes' or 'bpe' to train "
            "the model from scratch with other tokens)."
        )
    least = _BYTES if objective == "causal" else _BYTES_MASKED
    if vocabulary is not None and vocabulary < least:
        raise DataError(
            f"{str(model.path)!r} has a vocabulary of {vocabulary} tokens, too small for bytes ({least}), and no "
            "tokenizer.json is next to it. Pass --tokenizer PATH."
        )
    if vocabulary is not None and vocabulary >= 2 * least and data.bytes >= 20 * vocabulary:
        return (
            "bpe",
            f"the weights are new and the vocabulary has {vocabulary} tokens: a BPE tokenizer is trained on the text",
        )
    return "bytes", "the weights are new: tokens are bytes, the simplest tokenizer"


def _end_of_text(tokenizer: str, objective: Objective) -> str:
    """The token of a tokenizer that ends a text, where it has a known one."""
    usual = TextOptions().end_of_text
    if tokenizer in ("bytes", "bpe") or objective != "causal":
        return usual
    try:
        found = load_tokenizer(Path(tokenizer))
    except UserError:
        return usual  # packing reports it
    known = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]", "<|eot_id|>")
    return next((token for token in known if found.token_to_id(token) is not None), usual)


def _length(model: ModelFacts, tokens: Port, answers: Answers) -> tuple[int, str]:
    size = tokens.sample[0] if tokens.sample else None
    if isinstance(size, int):
        return size, f"the sequence length in the model is fixed to {size} tokens"
    if answers.sequence_length is not None:
        return answers.sequence_length, "the sequence length is set by --sequence-length"
    if model.positions is not None and model.positions < _USUAL_LENGTH:
        return model.positions, f"the model has {model.positions} position embeddings"
    return _USUAL_LENGTH, f"sequences of {_USUAL_LENGTH} tokens are a common starting point"


def _match_bert(
    model: ModelFacts, data: DataFacts, ports: list[Port], text: TextOptions, reasons: tuple[str, ...], folder: Path
) -> Match:
    """BERT's two tasks: masked tokens, and whether the second segment follows the first."""
    tokens, pair = (
        next(port for port in model.outputs if port.shape is not None and len(port.shape) == rank) for rank in (3, 2)
    )
    features = {"input_ids": "", "segment_ids": "", "input_mask": ""}
    for port in ports:
        name = port.name.lower()
        kind = "input_mask" if "mask" in name else "segment_ids" if "type" in name or "segment" in name else "input_ids"
        features[kind] = port.name
    loss = (
        Choice(
            "loss.type", "bert", "one output has scores for every token, the other for two classes per pair of texts."
        ),
        Choice("loss.masked_lm_prediction", tokens.name),
        Choice("loss.next_sentence_prediction", pair.name),
        Choice("loss.next_sentence_label", "next_sentence_label"),
    )
    task = Task(
        kind="masked_language_model", text="masked tokens and next sentences (BERT)", prediction=tokens.name, loss=loss
    )
    names = {one: other for one, other in features.items() if one != other}
    return Match(
        task=task,
        label=None,
        name_map=names,
        packing=Packing(source=data.path, folder=folder, options=PackOptions(source=text), reasons=reasons),
    )
