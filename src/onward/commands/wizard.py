"""The questions of `onward init --wizard`: each with what was found as the default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onward.errors import DataError, ParametersError, UserError
from onward.losses.registry import losses_for_init
from onward.proposal.data_facts import DataFacts
from onward.proposal.model_facts import ModelFacts
from onward.proposal.proposal import Answers, Proposal
from onward.proposal.propose import propose


@dataclass(frozen=True, kw_only=True)
class _Question:
    """One question.

    Attributes:
        key: field of `Answers`.
        text: what is asked.
        found: the default, of a proposal; None: the question is left out.
        reason: why it is the default, of a proposal.
        parse: from what was typed to the answer; ValueError with what is expected.
    """

    key: str
    text: str
    found: Callable[[Proposal], Any]
    reason: Callable[[Proposal], str]
    parse: Callable[[str], Any]


def ask(model: ModelFacts, data: DataFacts | None, answers: Answers, folder: Path) -> Answers:
    """Asks in the terminal; an empty line takes the default. What an option answered is not asked.

    Raises:
        ParametersError: the input ends before the last question.
        UserError: nothing can be proposed, whatever is answered.
    """
    print(f"{model.path.name}: {model.element_count:,} trainable parameters; {_looks(model)}.")
    print("Press Enter to accept the value in brackets.")
    if data is not None and data.kind != "text":
        answers = _ask_label(model, data, answers, folder)
    for question in _QUESTIONS:
        if getattr(answers, question.key) is not None:
            continue
        proposal = propose(model, data, answers, folder=folder)
        found = question.found(proposal)
        if found is None:
            continue
        reason = question.reason(proposal)
        if reason:
            print(f"  {reason}")
        answers = _answer(question, found, answers, lambda one: propose(model, data, one, folder=folder))
    return answers


def _looks(model: ModelFacts) -> str:
    return f"{'trained' if model.origin.is_trained else 'new'} weights ({model.origin.evidence})"


def _ask_label(model: ModelFacts, data: DataFacts, answers: Answers, folder: Path) -> Answers:
    """Which feature is the label, before anything can be proposed."""
    names = [one.name for one in data.features]
    if answers.label is not None or len(names) < 2 or data.kind in ("images", "audio"):
        return answers

    def parse(text: str) -> str:
        unknown = [name for name in text.split(",") if name not in names]
        if unknown:
            raise ValueError(f"there is no feature {unknown[0]!r}; the data hold {', '.join(names)}")
        return text

    try:
        found = propose(model, data, answers, folder=folder).value("loss.label")
    except UserError as error:
        print(f"  {error}")
        found = None
    default = found if found in names else names[-1]
    print(f"  the data hold {', '.join(names)}")
    question = _Question(
        key="label", text="Which feature is the label?", found=lambda _: default, reason=lambda _: "", parse=parse
    )
    return _answer(question, default, answers, lambda one: propose(model, data, one, folder=folder))


def _answer(question: _Question, found: Any, answers: Answers, check: Callable[[Answers], object]) -> Answers:
    """Asks until an answer can be used; the default changes nothing."""
    while True:
        text = _read(f"{question.text} [{_shown(found)}] ")
        if not text:
            return answers
        try:
            changed = replace(answers, **{question.key: question.parse(text)})
            check(changed)
            return changed
        except (ValueError, DataError) as error:
            print(f"  {error}")


def _read(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError as error:
        raise ParametersError(
            f"the input ended at the question {prompt.strip()!r}. Answer all questions, or run without --wizard."
        ) from error


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _reason(field: str) -> Callable[[Proposal], str]:
    return lambda proposal: next((one.reason for one in proposal.choices if one.field == field), "")


def _value(field: str) -> Callable[[Proposal], Any]:
    return lambda proposal: proposal.value(field)


def _loss(text: str) -> str:
    matching = [name for name in losses_for_init() if name.startswith(text)]
    if len(matching) != 1:
        raise ValueError(f"expected one of {', '.join(losses_for_init())}")
    return matching[0]


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("expected a whole number of at least 1")
    return number


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise ValueError("expected a number above 0, such as 0.001")
    return number


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise ValueError("expected a fraction from 0 to below 1, such as 0.1")
    return number


def _patterns(text: str) -> tuple[str, ...] | None:
    return None if text == "all" else tuple(text.split(","))


def _share_found(proposal: Proposal) -> float | None:
    packing = proposal.packing
    return None if packing is None or packing.options.test_source else packing.options.test_fraction


def _about(
    key: str, text: str, field: str, parse: Callable[[str], Any], reason: Callable[[Proposal], str] | None = None
) -> _Question:
    """A question about a field of RUN.yaml."""
    return _Question(key=key, text=text, found=_value(field), reason=reason or _reason(field), parse=parse)


_QUESTIONS = (
    _about("loss", "Which loss is minimized?", "loss.type", _loss),
    _Question(
        key="test_fraction",
        text="Which fraction of the samples is held out for testing?",
        found=_share_found,
        reason=lambda _: "",
        parse=_share,
    ),
    _about("batch_size", "How many samples per batch?", "training.batch_size", _count),
    _about("epochs", "How many passes over the data?", "training.num_epochs", _count),
    _about("learning_rate", "Which peak learning rate?", "learning_rate.initial_lr", _rate),
    _Question(
        key="weights",
        text="Which weights are trained (names or *-patterns)?",
        found=lambda _: "all",
        reason=lambda _: "",
        parse=_patterns,
    ),
    _about("output_dir", "Which folder is the trained model written to?", "paths.output_dir", str, lambda _: ""),
)
