"""A table against a model: columns to inputs, one column, or several, to the label."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onward.data.packing.options import PackOptions, TableOptions
from onward.errors import DataError
from onward.proposal.data_facts import WORDS, DataFacts, Feature
from onward.proposal.label import Label
from onward.proposal.label_order import order_of_labels
from onward.proposal.match_text_tables import match_text_table, text_columns
from onward.proposal.matching import (
    Match,
    choose_label,
    free_label_name,
    is_label_name,
    name_score,
    needed_inputs,
    words_of,
)
from onward.proposal.model_facts import ModelFacts, Port
from onward.proposal.proposal import Answers, Packing, Question
from onward.proposal.task import candidates, find_task
from onward.spelling import shortened

_FEWEST_NUMBERED_ROWS = 20
"""From which integers that are all different, and close together, number the rows whatever their order."""


@dataclass(frozen=True)
class _Columns:
    """Which columns become what: input -> columns, and the columns of the label."""

    inputs: dict[str, tuple[str, ...]]
    label: tuple[Feature, ...]
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()


def match_table(model: ModelFacts, data: DataFacts, answers: Answers, folder: Path) -> Match:
    """How the columns of a table go with a model.

    Raises:
        DataError: there are too few columns, too many to know which to take, or no label that fits.
    """
    ports = needed_inputs(model, answers.prediction)
    texts = text_columns(model, ports, data, answers)
    if texts and _columns_by_name(ports, data) is None:
        return match_text_table(model, ports, data, texts, answers, folder)
    if any(port.sample is not None and len(port.sample) > 1 for port in ports):
        listed = "; ".join(str(port) for port in ports)
        raise DataError(
            f"{str(data.path)!r} is a table, and {str(model.path)!r} reads {listed}: a table gives one "
            "vector per sample. Pass the data as an .npz file with an array for each input."
        )
    _refuse_mixed_columns(data, answers)
    columns = _divide(model, ports, data, answers)
    words = [name for names in columns.inputs.values() for name in names if _column(data, name).dtype == WORDS]
    label, classes = _label(columns.label, data, model)
    task = find_task(model, Label(label, classes), answers.prediction, answers.loss)
    name = free_label_name(model, label.name)
    reasons = [
        f"input {port!r} is made of {len(names)} column{'s' if len(names) > 1 else ''}: {_listed(names)}"
        for port, names in columns.inputs.items()
    ]
    reasons.append(f"the label is {_listed([one.name for one in columns.label])}")
    reasons += [f"{label.name}: {why}" for why in task.reasons]
    categories = [*words, *(_category(one, classes) for one in columns.label if label.dtype == WORDS)]
    if words:
        reasons.append(f"the text values of {_listed(words)} are numbered in alphabetical order")
    if data.missing_rows:
        what = "keep NaN, which the model imputes" if _imputes(model) else "are left out"
        reasons.append(f"{data.missing_rows} row{'s' * (data.missing_rows > 1)} with missing values {what}")
    operations, casts = _to_ports(ports, columns, data)
    order = order_of_labels(label, data.sample_count)
    options = PackOptions(
        source=TableOptions(
            columns=(*((port, ",".join(names)) for port, names in columns.inputs.items()),
                     (name, ",".join(one.name for one in columns.label))),
            categories=tuple(categories),
            delimiter=data.delimiter,
            missing="error" if not data.missing_rows else "keep" if _imputes(model) else "skip",
        ),
        transform=(*operations, *((name, operation) for operation in task.operations)),
        cast=(*casts, *(((name, task.cast),) if task.cast else ())),
        shuffle_buffer=min(data.sample_count, 100_000) if order else 0,
    )  # fmt: skip
    if order:
        reasons.append(f"the rows {order}: they are shuffled during packing")
    packing = Packing(source=data.path, folder=folder, options=options, reasons=tuple(reasons))
    return Match(
        task=task,
        label=name,
        name_map={},
        packing=packing,
        questions=columns.questions,
        notes=(*columns.notes, *_notes_on_ranges(columns, data, model)),
    )


def _column(data: DataFacts, name: str) -> Feature:
    found = data.feature(name)
    if found is None:
        listed = ", ".join(repr(one.name) for one in data.features)
        near = difflib.get_close_matches(name, [one.name for one in data.features], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"{str(data.path)!r} has no column {name!r}; it has {listed}.{hint}")
    return found


def _imputes(model: ModelFacts) -> bool:
    return "Imputer" in model.operators


def _refuse_mixed_columns(data: DataFacts, answers: Answers) -> None:
    """A few words in a column of numbers are mistakes: as categories, all its numbers would become class numbers."""
    named = None if answers.inputs is None else {*answers.inputs, *(answers.label or "").split(",")}
    for one in data.features:
        if one.not_numbers and (named is None or one.name in named):
            listed = shortened((f"{value!r} ({where})" for where, value in one.not_numbers), 3)
            raise DataError(
                f"column {one.name!r} of {str(data.path)!r} holds numbers, but also {listed}. Fix these cells, "
                "or empty them to leave their rows out. If the column is not needed, name those that are with --inputs."
            )


def _category(label: Feature, classes: Sequence[str]) -> str:
    """The label's option of packing: with the order of its words, if it is not the alphabetical one."""
    if tuple(classes) == label.words:
        return label.name
    return f"{label.name}={','.join(classes)}"


def _listed(names: Sequence[str], most: int = 8) -> str:
    return shortened(map(repr, names), most)


def _divide(model: ModelFacts, ports: Sequence[Port], data: DataFacts, answers: Answers) -> _Columns:
    """Columns to inputs: by name where every input is a column, else all that remain to the one vector."""
    by_name = _columns_by_name(ports, data)
    if by_name is not None:
        used = {name for names in by_name.values() for name in names}
        left = [one for one in data.features if one.name not in used]
        one, asked = choose_label(model, left, answers.label, data.features)
        return _Columns(by_name, (_required(one, data),), asked)
    if len(ports) != 1:
        listed = "; ".join(str(port) for port in ports)
        raise DataError(
            f"{str(model.path)!r} reads {listed}, and the columns of {str(data.path)!r} have other names "
            f"({_listed([one.name for one in data.features])}). Name the columns as the inputs, or pack the table by "
            "hand with onward pack --columns INPUT=COLUMN,..."
        )
    port = ports[0]
    size = port.sample[0] if port.sample else 1
    wanted = size if isinstance(size, int) else None
    label, questions = _label_columns(model, data, answers, wanted)
    if answers.inputs is not None:
        names = tuple(_column(data, name).name for name in answers.inputs)
        if wanted is not None and len(names) != wanted:
            raise DataError(f"--inputs names {len(names)} columns; input {port} needs {wanted}.")
        return _Columns({port.name: names}, label, questions)
    taken = {one.name for one in label}
    rest = [one for one in data.features if one.name not in taken]
    names, notes = _inputs_of(port, wanted, rest, data)
    return _Columns({port.name: names}, label, questions, notes)


def _columns_by_name(ports: Sequence[Port], data: DataFacts) -> dict[str, tuple[str, ...]] | None:
    found: dict[str, tuple[str, ...]] = {}
    for port in ports:
        size = port.sample[0] if port.sample else 1
        column = next((one for one in data.features if name_score(one.name, port.name) >= 2.5), None)
        if column is None or size not in (1, *column.shape):
            return None
        found[port.name] = (column.name,)
    return found


def _label_columns(
    model: ModelFacts, data: DataFacts, answers: Answers, wanted: int | None
) -> tuple[tuple[Feature, ...], tuple[Question, ...]]:
    """One column by its name, the only one of words, or the last; several where the model has as many outputs."""
    if answers.label is not None:
        return tuple(_column(data, name) for name in answers.label.split(",")), ()
    columns = data.features
    several = _several_outputs(model, answers)
    if wanted is not None and several is not None and len(columns) == wanted + several and several > 1:
        last = columns[-several:]
        if all(one.dtype != WORDS for one in last):
            return last, ()
    named = [one for one in columns if is_label_name(one.name)]
    if len(named) == 1:
        return (named[0],), ()
    words = [one for one in columns if one.dtype == WORDS and not _is_identifier(one, data)]
    if not named and len(words) == 1:
        return (words[0],), ()
    found = (named or [columns[-1]])[-1]
    text = "Which column is the label?"
    return (found,), (Question("label", text, found.name),)


def _several_outputs(model: ModelFacts, answers: Answers) -> int | None:
    for port in candidates(model, answers.prediction):
        if port.sample is not None and len(port.sample) == 1 and isinstance(port.sample[0], int):
            return port.sample[0]
    return None


def _required(label: Feature | None, data: DataFacts) -> Feature:
    if label is None:
        raise DataError(
            f"{str(data.path)!r} has no column left for the label: all are inputs of the model. "
            "Add a label column, or pass --inputs."
        )
    return label


def _is_identifier(column: Feature, data: DataFacts) -> bool:
    """Whether a column only numbers or names the rows."""
    if words_of(column.name)[:1] == ["id"] or column.name.lower() in ("index", "uuid", "unnamed: 0", ""):
        return True
    if column.dtype == WORDS:
        return len(column.words) > 20 and len(column.words) >= 0.9 * min(data.sample_count, 20_000)
    values = column.values
    if values is None or values.ndim != 1 or values.dtype.kind != "i" or len(values) < 3:
        return False
    if bool((np.diff(values) == 1).all()):
        return True
    # Of rows that were shuffled or divided, the numbers of some.
    spread = int(values.max()) - int(values.min()) + 1
    return len(values) >= _FEWEST_NUMBERED_ROWS and len(np.unique(values)) == len(values) >= spread / 2


def _inputs_of(
    port: Port, wanted: int | None, rest: Sequence[Feature], data: DataFacts
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of the one vector: all numbers but row numbers; words only where they are needed to fill it."""
    notes: list[str] = []
    numbers = [one for one in rest if one.dtype != WORDS]
    if wanted is None or len(numbers) > wanted:
        identifiers = [one.name for one in numbers if _is_identifier(one, data)]
        if identifiers and (wanted is None or len(numbers) - len(identifiers) >= wanted):
            notes.append(f"{_listed(identifiers)} numbers the rows and is left out.")
            numbers = [one for one in numbers if one.name not in identifiers]
    chosen = numbers
    if wanted is not None and len(numbers) < wanted:
        words = [one for one in rest if one.dtype == WORDS and not _is_identifier(one, data)]
        if len(numbers) + len(words) == wanted:
            chosen = [one for one in rest if one in numbers or one in words]
    dropped = [one.name for one in rest if one not in chosen and one.dtype == WORDS]
    if wanted is not None and len(chosen) != wanted:
        names = _listed([one.name for one in chosen], 20)
        what = (
            "Name the columns with --inputs COLUMN,..." if len(chosen) > wanted else "Add the columns that are missing."
        )
        raise DataError(
            f"input {port} needs {wanted} columns, and {str(data.path)!r} has {len(chosen)} numeric ones besides the "
            f"label: {names}. {what}" + (f" Text columns ({_listed(dropped)}) are not counted." if dropped else "")
        )
    if not chosen:
        raise DataError(
            f"{str(data.path)!r} has no numeric column besides the label, and input {port} needs some. Add them."
        )
    if dropped:
        notes.append(f"text columns are left out: {_listed(dropped)}.")
    return tuple(one.name for one in chosen), tuple(notes)


def _label(columns: Sequence[Feature], data: DataFacts, model: ModelFacts) -> tuple[Feature, tuple[str, ...]]:
    """The label as one feature, and the names of its classes: in the model's own order, where it names them."""
    if len(columns) == 1:
        label = columns[0]
        words = label.words or (() if label.values is None else tuple(map(str, np.unique(label.values))))
        if _are_classes_of(model, label, words):
            codes = label.codes if label.values is None else label.values
            return Feature(
                name=label.name, dtype=WORDS, shape=(), values=None, words=words, missing=label.missing, codes=codes
            ), model.class_names
        return label, label.words
    wrong = [one.name for one in columns if one.values is None]
    if wrong:
        raise DataError(
            f"the label has several columns, and {_listed(wrong)} holds text. Pass numeric columns with --label."
        )
    values = np.stack([one.values for one in columns if one.values is not None], axis=1)
    return Feature(name="labels", dtype=str(values.dtype), shape=(len(columns),), values=values), ()


def _are_classes_of(model: ModelFacts, label: Feature, words: Sequence[str]) -> bool:
    """Whether the label's words, or whole numbers, are the names that the model has for its classes."""
    names = model.class_names
    is_plain = label.dtype != WORDS and names == tuple(map(str, range(len(names))))
    if not names or is_plain or label.shape or not set(words) <= set(names):
        return False
    if any("," in name for name in names) and tuple(words) != names:
        raise DataError(
            f"the model's classes have names with commas, such as {next(n for n in names if ',' in n)!r}, and the "
            f"label {label.name!r} does not hold all of them. Replace the words by the classes' numbers, from 0 to "
            f"{len(names) - 1}."
        )
    return True


def _to_ports(
    ports: Sequence[Port], columns: _Columns, data: DataFacts
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    operations, casts = [], []
    for port in ports:
        if port.dtype not in ("float32", "?", "string"):
            casts.append((port.name, port.dtype))
        elif port.is_float and all(_column(data, name).is_integer for name in columns.inputs[port.name]):
            casts.append((port.name, "float32"))
        if port.sample == (1,) and len(columns.inputs[port.name]) == 1:
            operations.append((port.name, "reshape:1"))
    return operations, casts


def _notes_on_ranges(columns: _Columns, data: DataFacts, model: ModelFacts) -> tuple[str, ...]:
    """Numbers of very different sizes train slowly, and a model made for others gives nonsense."""
    if "Scaler" in model.operators or set(columns.inputs) & model.scaled_inputs:
        return ()
    largest = {}
    for name in (name for names in columns.inputs.values() for name in names):
        values = _column(data, name).values
        if values is not None and values.size:
            largest[name] = float(np.abs(values.astype(np.float64)).max())
    wide = [name for name, size in largest.items() if size > 100]
    if not wide:
        return ()
    name = max(wide, key=lambda one: largest[one])
    return (
        f"columns with large values are packed without scaling (the largest: {name!r}, up to {largest[name]:g}); a "
        "network trains faster on columns with mean 0 and standard deviation 1. Standardize them in the file unless "
        "the model expects these units.",
    )
