"""A proposal in a few lines, for the terminal and for the end of `onward inspect`."""

from __future__ import annotations

from pathlib import Path

from onward.errors import UserError
from onward.graph.training_graph import TrainingGraph
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.proposal.data_reading import read_data_facts
from onward.proposal.model_facts import read_model_facts
from onward.proposal.pack_command import pack_command
from onward.proposal.proposal import Proposal
from onward.proposal.propose import propose

_SHOWN = (
    ("loss.type", "loss"),
    ("training.batch_size", "batch size"),
    ("training.num_epochs", "epochs"),
    ("adapter.rank", "adapters of rank"),
    ("head.num_classes", "new last layer, classes"),
    ("learning_rate.initial_lr", "learning rate"),
)


def summary_lines(proposal: Proposal) -> list[str]:
    """What was chosen and why, one line each."""
    reasons = {choice.field: choice.reason for choice in proposal.choices}
    lines = [f"task: {proposal.task}, from output {proposal.value('loss.prediction') or '(several)'!r}"]
    for name, title in _SHOWN:
        if name not in reasons:
            continue
        reason = reasons[name].rstrip(".")
        lines.append(f"{title}: {proposal.value(name)}" + (f" ({reason})" if reason else ""))
    lines += [f"please check: {question.text} Assumed: {question.found}." for question in proposal.questions]
    lines += [f"note: {note}" for note in proposal.notes]
    return lines


def describe_proposal(
    model: str, data: str | None, limits: Limits = DEFAULT_LIMITS, training: TrainingGraph | None = None
) -> str:
    """The end of `onward inspect`: what `onward init` would do with the same model, as it was read, and data."""
    command = f"onward init {model}" + (f" {data}" if data else " [DATA]")
    try:
        facts = read_model_facts(Path(model), limits, training)
        proposal = propose(facts, None if data is None else read_data_facts(Path(data), limits))
    except UserError as error:
        return f"`{command}` would refuse: {error}"
    lines = [f"`{command}` would propose:", *(f"  {line}" for line in summary_lines(proposal))]
    if proposal.packing is not None:
        packing = proposal.packing
        lines.append(f"  packing: {pack_command(packing.source, packing.folder, packing.options, packing.kind)}")
    if proposal.needed_data:
        lines.append("  data that it needs (shapes of one sample):")
        lines += [f"    {name}: {what}" for name, what in proposal.needed_data.items()]
    return "\n".join(lines)
