"""A proposal before there are data: the loss that the outputs suggest, and the data that the run would need."""

from __future__ import annotations

from onward.errors import DataError
from onward.losses.registry import loss_named
from onward.proposal.matching import Match, free_label_name, needed_inputs
from onward.proposal.model_facts import ModelFacts, Port
from onward.proposal.proposal import Answers, Choice, Question
from onward.proposal.task import Task, candidates, loss_of_output, own_loss

_GUESS = "Which loss? It was inferred from the output alone; run onward init MODEL DATA to infer it from data."


def match_nothing(model: ModelFacts, answers: Answers) -> Match:
    """What the model alone suggests.

    Raises:
        DataError: no output is of floating-point numbers.
    """
    loss = own_loss(model)
    if loss is not None and answers.loss is None:
        return Match(task=loss_of_output(loss), label=None)
    ports = candidates(model, answers.prediction)
    if not ports:
        listed = ", ".join(str(port) for port in model.outputs) or "none"
        raise DataError(
            f"{str(model.path)!r} has no output of floating-point numbers that a loss could compare with a label; its "
            f"outputs are {listed}. Export the model with its scores as an output."
        )
    port = ports[0]
    kind, why = _guess(port, model.ends_in.get(port.name, ""), model)
    if answers.loss is not None:
        kind, why = answers.loss, "set on the command line or in the wizard."
    choices = [Choice("loss.type", kind, why), Choice("loss.prediction", port.name)]
    chosen = loss_named(kind)
    if "from_logits" in chosen.reads and model.ends_in.get(port.name) not in ("Sigmoid", "Softmax", "HardSigmoid"):
        choices.append(Choice("loss.from_logits", True))
    if chosen.task == "multiclass" and port.shape is not None and len(port.shape) == 4:
        choices.append(Choice("loss.class_axis", 1))
    texts = {"multiclass": "classification", "binary": "classification into two classes"}
    text = kind if chosen.is_of_sequences else texts.get(chosen.task, "regression")
    task = Task(kind="classification", text=text, prediction=port.name, loss=tuple(choices))
    name = free_label_name(model, "label" if port.shape is None or len(port.shape) < 3 else "labels")
    return Match(task=task, label=name, questions=(Question("loss", _GUESS, kind),))


def _guess(port: Port, ends_in: str, model: ModelFacts) -> tuple[str, str]:
    sample = port.sample
    if sample is None:
        return "mean_squared_error", f"nothing is known of the shape of {port.name!r}."
    if ends_in == "Sigmoid":
        return "binary_cross_entropy", f"{port} ends in Sigmoid: probabilities of yes or no."
    if sample in ((), (1,)):
        return "mean_squared_error", f"{port} is one number a sample; for labels 0 and 1 use binary_cross_entropy."
    inputs = [one.sample for one in model.inputs if one.is_float]
    if sample in inputs and ends_in not in ("Softmax", "LogSoftmax"):
        return "mean_squared_error", f"{port} has the shape of the input."
    if len(sample) == 1 or ends_in in ("Softmax", "LogSoftmax") or (len(sample) == 2 and model.tables):
        return "softmax_cross_entropy", f"{port} looks like scores of classes."
    if len(sample) == 3 and isinstance(sample[0], int) and 1 < sample[0] <= 256:
        return "softmax_cross_entropy", f"{port} looks like scores of classes for every pixel."
    return "mean_squared_error", f"{port} holds numbers, no scores of classes."


def needed_data(model: ModelFacts, match: Match) -> dict[str, str]:
    """Feature -> type and shape of one sample, for the user to prepare."""
    needed = {port.name: f"{port.dtype} {_shape(port.sample)}" for port in needed_inputs(model, match.task.prediction)}
    if match.label is not None:
        port = model.port(match.task.prediction)
        needed[match.label] = _label_text(match.task, port)
    return needed


def _shape(sample: tuple[int | str, ...] | None) -> str:
    return "of any shape" if sample is None else f"[{', '.join(map(str, sample))}]"


def _label_text(task: Task, port: Port | None) -> str:
    kind = loss_named(task.loss[0].value)
    sample = None if port is None else port.sample
    if kind.task == "multiclass":
        axis = next((choice.value for choice in task.loss if choice.field == "loss.class_axis"), -1)
        if sample is None:
            return "int64, the number of the class"
        place = axis - 1 if axis > 0 else len(sample) - 1
        rest = tuple(size for index, size in enumerate(sample) if index != place)
        return f"int64 {_shape(rest)}, the number of the class, 0 to {_last(sample[place])}"
    return kind.label_text or f"float32 {_shape(sample)}" + (", 0 or 1" if kind.task == "binary" else "")


def _last(size: int | str) -> str:
    return str(size - 1) if isinstance(size, int) else f"{size} - 1"
