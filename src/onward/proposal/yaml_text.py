"""A proposal as a RUN.yaml: every field under a comment that gives its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from onward.proposal.pack_command import pack_command
from onward.proposal.proposal import Choice, Proposal

_WIDTH = 100


def to_yaml(proposal: Proposal, command: str) -> str:
    """The text of the file; it loads with `Parameters.load`.

    Args:
        proposal: what was chosen.
        command: by which it was made.
    """
    blocks = [_head(proposal, command)]
    sections: dict[str, list[Choice]] = {}
    for choice in proposal.choices:
        sections.setdefault(choice.field.partition(".")[0], []).append(choice)
    blocks += [f"{section}:\n" + "".join(_field(one) for one in choices) for section, choices in sections.items()]
    return "\n".join(blocks)


def _head(proposal: Proposal, command: str) -> str:
    lines = [f"Written by: {command}", f"Trains {proposal.model.name}: {proposal.task}. Run it: onward train RUN.yaml"]
    if proposal.packing is not None:
        packing = proposal.packing
        command = pack_command(packing.source, packing.folder, packing.options, packing.kind)
        lines += ["", f"The data were packed by: {command}"]
        lines += [f"- {reason}" for reason in packing.reasons]
    if proposal.needed_data:
        lines += ["", "There are no data yet. Pack data with these features (shapes of one sample):"]
        lines += [f"- {name}: {what}" for name, what in proposal.needed_data.items()]
        lines += ["for example: onward pack SOURCE data --test-fraction 0.1"]
    if proposal.questions:
        lines += ["", "Please check, since the files do not say:"]
        lines += [f"- {question.text} Assumed: {question.found}." for question in proposal.questions]
    if proposal.notes:
        lines += ["", "Notes:"]
        lines += [f"- {note}" for note in proposal.notes]
    return "".join(_comment(line, 0) for line in lines)


def _comment(text: str, indent: int) -> str:
    if not text:
        return "#\n"
    prefix = " " * indent + "# "
    later = prefix + ("  " if text.startswith("- ") else "")
    wrapped = textwrap.wrap(
        text, _WIDTH, initial_indent=prefix, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{line}\n" for line in wrapped)


def _field(choice: Choice) -> str:
    name = choice.field.partition(".")[2]
    comment = _comment(choice.reason[:1].upper() + choice.reason[1:], 2) if choice.reason else ""
    return comment + textwrap.indent(_value(name, choice.value), "  ")


def _value(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{name}:\n" + "".join(f"  {_scalar(one)}: {_scalar(other)}\n" for one, other in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{name}:\n" + "".join(f"  - {_flow(one)}\n" for one in value)
    return f"{name}: {_scalar(value)}\n"


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False).strip().removesuffix("\n...")


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    return yaml.safe_dump(value, width=1000, allow_unicode=True).strip().removesuffix("...").strip()


def _number(value: float) -> str:
    """As YAML 1.1 reads it back as a float: `5.0e-05`, not `5e-05`."""
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{e}{exponent}" if e else text
