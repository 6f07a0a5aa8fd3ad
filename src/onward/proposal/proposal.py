"""`Proposal`: every choice of a run with its reason in one sentence, and what only the user can decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from onward.data.packing.options import PackOptions


@dataclass(frozen=True)
class Choice:
    """One field of RUN.yaml.

    Attributes:
        field: `section.field`.
        value: as it goes into the file.
        reason: why, in one sentence; empty where the field needs none.
    """

    field: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class Question:
    """Something that cannot be known from the files alone.

    Attributes:
        key: of the answer, as in `Answers`.
        text: the question.
        found: what is taken without an answer.
    """

    key: str
    text: str
    found: Any


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How data become shards.

    Attributes:
        source: file or folder.
        folder: of the shards; gets `train` and `test`.
        options: of `onward pack`.
        reasons: one sentence for each thing that is done to the data.
        kind: of the source, where the user chose it; None: suffixes tell.
    """

    source: Path
    folder: Path
    options: PackOptions
    reasons: tuple[str, ...] = ()
    kind: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the user said beforehand; None: to be found out."""

    label: str | None = None
    inputs: tuple[str, ...] | None = None
    prediction: str | None = None
    loss: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    weights: tuple[str, ...] | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None
    sample_rate: int | None = None
    output_dir: str | None = None
    test_fraction: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedAnswers(Answers):
    """Answers that record which of them a proposal reads: one that it does not read would be ignored in silence."""

    read: set[str] = field(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        if name in Answers.__dataclass_fields__:
            object.__getattribute__(self, "read").add(name)
        return object.__getattribute__(self, name)

    def unread(self) -> list[str]:
        """The fields that were given and that nothing has read."""
        read = set(self.read)
        return [one.name for one in fields(Answers) if one.name not in read and getattr(self, one.name) is not None]


@dataclass(frozen=True)
class Counts:
    """Samples for training and for evaluation."""

    train: int
    test: int
    is_exact: bool = True


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A run that could be.

    Attributes:
        model: file of the model.
        data: file or folder of the data, as given; None: none yet.
        task: what is learned, in a few words.
        choices: fields of RUN.yaml with their reasons.
        packing: how the data are packed; None: they are packed already, or there are none.
        questions: what only the user can decide, with what was taken.
        notes: what else the user should know.
        needed_data: feature -> what it has to be, for a proposal without data.
    """

    model: Path
    data: Path | None
    task: str
    choices: tuple[Choice, ...]
    packing: Packing | None = None
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()
    needed_data: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """What was chosen for `section.field`; None where nothing was."""
        return next((choice.value for choice in self.choices if choice.field == name), None)

    def to_mapping(self) -> dict[str, dict[str, Any]]:
        """Sections to fields, as in a RUN.yaml."""
        sections: dict[str, dict[str, Any]] = {}
        for choice in self.choices:
            section, _, name = choice.field.partition(".")
            sections.setdefault(section, {})[name] = choice.value
        return sections
