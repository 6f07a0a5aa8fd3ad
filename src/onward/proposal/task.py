"""What is learned: the loss that an output of the model and a label of the data ask for, or why none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onward.data.packing.transforms import IGNORED_LABEL
from onward.errors import DataError, ParametersError
from onward.losses.registry import loss_named
from onward.proposal.data_facts import WORDS
from onward.proposal.fitting import fits
from onward.proposal.label import Label, same_word_twice
from onward.proposal.label_sequences import PADDING, is_sequence_without_places, read_sequences
from onward.proposal.model_facts import ModelFacts, Port, Size
from onward.proposal.proposal import Choice

_PROBABILITIES = ("Softmax", "LogSoftmax")
_UNIT_INTERVAL = ("Sigmoid", "HardSigmoid", "Softmax", "Clip")

_NEW_HEAD = "head.num_classes"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned.

    Attributes:
        kind: classification, binary, multi_label, regression, language_model, masked_language_model, ctc or output.
        text: the same in a few words.
        prediction: the output that is compared; the loss itself for `output`.
        loss: fields of the section but for `label`.
        operations: on the label, of `onward pack --transform`.
        cast: dtype that the label is cast to.
        reasons: why something is done to the label.
        notes: what the user should know.
        classes: how many there are.
    """

    kind: str
    text: str
    prediction: str
    loss: tuple[Choice, ...]
    operations: tuple[str, ...] = ()
    cast: str = ""
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    classes: int | None = None


def candidates(model: ModelFacts, asked: str | None) -> list[Port]:
    """The outputs that a loss could compare, the likeliest first.

    Raises:
        ParametersError: `asked` is no output of the model.
    """
    ports = [*model.outputs, *model.before_selection.values()]
    if asked is not None:
        chosen = [port for port in ports if port.name == asked]
        if not chosen:
            raise ParametersError(
                f"--prediction is {asked!r}; the outputs of the model are {', '.join(repr(p.name) for p in ports)}."
            )
        return chosen
    floats = [port for port in ports if port.is_float or port.dtype == "?"]
    floats = [port for port in floats if not _is_side_output(port.name)] or floats
    return sorted(floats, key=lambda port: _rank(port.name))


def _rank(name: str) -> int:
    lower = name.lower()
    return 0 if "logits" in lower else 1 if any(word in lower for word in ("pred", "prob", "score", "out")) else 2


def _is_side_output(name: str) -> bool:
    lower = name.lower()
    return any(word in lower for word in ("past_key", "present", "hidden_state", "attentions", "cache"))


def find_task(model: ModelFacts, label: Label, asked_output: str | None, asked_loss: str | None) -> Task:
    """The loss of the first output that fits the label.

    Raises:
        DataError: none does; with the reason for each.
    """
    reasons = []
    for port in candidates(model, asked_output):
        found = _as_sequences(port, model, label, asked_loss)
        if found is None:
            found = _compare(port, model, label)
        if isinstance(found, Task):
            return _as_asked(found, asked_loss, port)
        reasons.append(f"output {port}: {found}")
    if not reasons:
        listed = ", ".join(str(port) for port in model.outputs) or "none"
        raise DataError(
            f"{str(model.path)!r} has no output of floating-point numbers that a loss could compare with a label; its "
            f"outputs are {listed}. Export the model with its logits as an output."
        )
    raise DataError(f"{label.describe()}, which fits no output of the model. " + " ".join(reasons))


def _as_asked(task: Task, loss: str | None, port: Port) -> Task:
    if loss is None or any(choice.field == "loss.type" and choice.value == loss for choice in task.loss):
        return task
    kept = [Choice("loss.type", loss, "set on the command line or in the wizard"), Choice("loss.prediction", port.name)]
    asked = loss_named(loss)
    kept += [choice for choice in task.loss if choice.field.removeprefix("loss.") in (*asked.reads, _NEW_HEAD)]
    kind = {"": "regression", "multiclass": task.kind}.get(asked.task, asked.task)
    text = kind.replace("_", " ") if asked.task or not asked.remark else asked.remark
    return replace(task, kind=kind, text=text, loss=tuple(kept), operations=(), cast="", reasons=())


def _compare(port: Port, model: ModelFacts, label: Label) -> Task | str:
    """The task of one output, or why there is none."""
    output, found, ends_in = port.sample, label.feature.shape, model.ends_in.get(port.name, "")
    if output is None:
        return _unknown_shape(port, label)
    if label.are_whole:
        axis = _class_axis(output, found)
        if axis is not None:
            return _classification(port, model, label, axis)
    if _same_but_ones(found, output):
        return _elementwise(port, ends_in, label)
    if not found and output and not label.are_whole:
        sizes = f"{output[-1]} numbers per sample"
        return f"it has {sizes}, the label has one. A regression needs an output of shape [batch, 1] or [batch]."
    return "the shapes do not match."


def _same_but_ones(found: Sequence[int], output: Sequence[Size]) -> bool:
    return fits([size for size in found if size != 1], [size for size in output if size != 1]) or fits(found, output)


def _class_axis(output: tuple[Size, ...], found: tuple[int, ...]) -> int | None:
    """The axis (batch first) that the label lacks: the classes; None where no axis fits."""
    if not output or (output == (1,) and found in ((), (1,))):
        return None
    squeezed = found[:-1] if len(found) == len(output) and found[-1:] == (1,) else found
    if len(squeezed) != len(output) - 1:
        return None
    # Images and signals have their classes first, sequences last.
    order = [0, len(output) - 1] if len(output) == 3 else [len(output) - 1, 0]
    for axis in dict.fromkeys(order):
        rest = [size for index, size in enumerate(output) if index != axis]
        if output[axis] != 1 and fits(squeezed, rest):
            return axis + 1
    return None


def _classification(port: Port, model: ModelFacts, label: Label, axis: int) -> Task | str:
    assert port.shape is not None
    ends_in = model.ends_in.get(port.name, "")
    size, count, notes, operations, reasons = port.shape[axis], label.class_count, [], [], []
    classes = size if isinstance(size, int) else None
    if label.feature.values is not None and label.lowest == 1 and count - 1 == classes:
        operations, count = ["shift:-1"], count - 1
        reasons.append(f"the labels range from 1 to {classes}, the model's classes start at 0")
    elif label.feature.values is not None and label.lowest < 0:
        return f"the smallest label is {label.lowest}; classes start at 0. Use {IGNORED_LABEL} for labels to ignore."
    head = _new_head(port, model, label, classes, count)
    if head is not None:
        classes = count
    if classes is not None and count > classes:
        extra = count - classes
        if label.seen_classes < count:
            numbers = f"it has {classes} classes, the labels have {_numbered(label, count)}."
            return f"{numbers} Use a model with {count} outputs, or number the classes from 0 without gaps."
        return (
            f"it has {classes} classes, the labels have {count}.{same_word_twice(label.classes)} Use a model with "
            f"{count} outputs, or leave out the samples of {extra} class{'es' if extra > 1 else ''}."
        )
    if classes is not None and count < classes:
        notes.append(
            f"the labels seen have {label.seen_classes} classes, the model's output {port.name!r} has {classes}; the "
            "others will only learn that they do not occur."
        )
    where = {2: "samples", 3: "every position of a sequence", 4: "every pixel"}.get(len(port.shape), "every element")
    loss = [
        Choice(
            "loss.type", "softmax_cross_entropy", f"the labels are class numbers, and {port} has a score per class."
        ),
        Choice("loss.prediction", port.name, _reason_of_activation(port, ends_in)),
    ]
    if axis != len(port.shape) - 1:
        loss.append(Choice("loss.class_axis", axis, f"axis {axis} of the prediction is the axis of the classes."))
    if head is not None:
        loss.append(head)
    if label.has_ignored:
        loss.append(Choice("loss.ignore_index", IGNORED_LABEL, f"labels of {IGNORED_LABEL} are ignored."))
    cast = "" if label.feature.dtype in (WORDS, "int64", "int32") else "int64"
    text = f"classification of {where} into {classes or count} classes"
    return Task(
        kind="classification",
        text=text,
        prediction=port.name,
        loss=tuple(loss),
        operations=tuple(operations),
        cast=cast,
        reasons=tuple(reasons),
        notes=tuple(notes),
        classes=classes,
    )


def _new_head(port: Port, model: ModelFacts, label: Label, classes: int | None, count: int) -> Choice | None:
    """A new last layer, where the model has too few classes, or more, none of which a name of the data can be."""
    if classes is None or port.name not in model.replaceable or count == classes or count < 2:
        return None
    if same_word_twice(label.classes) or (count < classes and (not label.classes or model.class_names)):
        return None
    reason = (
        f"the labels have {_numbered(label, count)}, the model has {classes}: its last layer is replaced by a new one, "
        "and the layers before it keep what they know. Remove this field to keep the layer of the file."
    )
    return Choice(_NEW_HEAD, count, reason)


def _numbered(label: Label, count: int) -> str:
    """How many classes labels have, and up to which number where some were not seen."""
    seen = label.seen_classes
    return f"{count} classes" if seen >= count else f"{seen} classes with numbers up to {count - 1}"


def _reason_of_activation(port: Port, ends_in: str) -> str:
    if ends_in in _PROBABILITIES:
        return f"it is the result of {ends_in}; the loss is computed from the value before it."
    return ""


def _elementwise(port: Port, ends_in: str, label: Label) -> Task | str:
    """Losses that compare number with number."""
    many = label.feature.shape not in ((), (1,)) and port.sample not in ((), (1,))
    prediction = Choice("loss.prediction", port.name)
    if label.feature.dtype == WORDS and len(label.classes) > 2:
        return f"it has 1 number per sample, the label {len(label.classes)} classes. Use a model with as many outputs."
    if many and label.is_one_hot():
        one_hot = (
            Choice("loss.type", "softmax_cross_entropy", "the labels are one-hot."),
            replace(prediction, reason=_reason_of_activation(port, ends_in)),
            Choice("loss.dense_labels", True),
        )
        cast = "" if label.feature.dtype.startswith("float") else "float32"
        classes = label.feature.shape[-1]
        text = f"classification of samples into {classes} classes"
        return Task(
            kind="classification",
            text=text,
            prediction=port.name,
            loss=one_hot,
            operations=(),
            cast=cast,
            classes=classes,
        )
    if label.is_binary:
        return _binary(port, ends_in, label, prediction, many)
    if ends_in in _PROBABILITIES and many and label.are_distributions():
        text = "each prediction is a distribution, and so is each label."
        dense = (Choice("loss.type", "softmax_cross_entropy", text), prediction, Choice("loss.dense_labels", True))
        return Task(kind="classification", text="learning distributions", prediction=port.name, loss=dense)
    if ends_in == "Sigmoid" and label.feature.values is not None:
        low, high = float(label.feature.values.min()), float(label.feature.values.max())
        if low < 0 or high > 1:
            return f"it ends in Sigmoid (0 to 1), but the labels range from {low:g} to {high:g}. Scale them."
    loss = (Choice("loss.type", "mean_squared_error", "the labels are numbers, not classes."), prediction)
    note: tuple[str, ...] = ()
    if label.are_whole and not many:
        note = ("the labels are integers, and the model has one output per sample: treated as regression.",)
    return Task(kind="regression", text="regression", prediction=port.name, loss=loss, notes=note)


def _binary(port: Port, ends_in: str, label: Label, prediction: Choice, many: bool) -> Task:
    is_probability = ends_in in _UNIT_INTERVAL
    end = (
        f"it ends in {ends_in}: probabilities."
        if is_probability
        else "the output is logits: the model does not end in a Sigmoid."
    )
    what = "several classes may be true for one sample" if many else "the labels are 0 and 1"
    names = f" ({label.classes[0]}: 0, {label.classes[1]}: 1)" if len(label.classes) == 2 else ""
    loss = (
        Choice("loss.type", "binary_cross_entropy", f"{what}{names}."),
        prediction,
        Choice("loss.from_logits", not is_probability, end),
    )
    kind = "multi_label" if many else "binary"
    return Task(
        kind=kind,
        text="multi-label classification" if many else "classification into two classes",
        prediction=port.name,
        loss=loss,
    )


def _as_sequences(port: Port, model: ModelFacts, label: Label, asked_loss: str | None) -> Task | str | None:
    """Labels without a place in time each; None: they are not, and `ctc` was not asked for."""
    values, sizes = label.feature.values, port.shape
    fits_ctc = label.are_whole and values is not None and len(label.feature.shape) == 1 and len(sizes or ()) == 3
    is_asked = asked_loss is not None and loss_named(asked_loss).is_of_sequences
    if is_asked and not fits_ctc:
        return "CTC needs scores of three axes, as [batch, time, classes], and labels of whole numbers [length]."
    if not (asked_loss is None or is_asked) or not fits_ctc:
        return None
    assert sizes is not None
    assert values is not None
    inputs = [one for one in model.inputs if one.shape]
    axis = 1 if isinstance(sizes[1], int) and isinstance(sizes[2], str) else 2
    batches = {one.shape[0] for one in inputs if one.shape}
    is_time_first = axis == 2 and sizes[0] not in batches and sizes[1] in batches
    time = sizes[0] if is_time_first else sizes[3 - axis]
    others = [size for one in inputs for size in (one.sample or ())]
    length = label.feature.shape[0]
    reads_tokens = bool(model.tables) and not isinstance(time, int)
    if asked_loss is None and (reads_tokens or not is_sequence_without_places(time, length, values, others)):
        return None
    return _ctc(port, model.ends_in.get(port.name, ""), label, axis, time)


def _ctc(port: Port, ends_in: str, label: Label, axis: int, time: Size) -> Task | str:
    assert port.shape is not None
    assert label.feature.values is not None
    size = port.shape[axis]
    classes = size if isinstance(size, int) else None
    sequences = read_sequences(label.feature.values, classes)
    if isinstance(sequences, str):
        return sequences
    if isinstance(time, int) and sequences.longest > time:
        return (
            f"it has {time} time steps, and the longest labels need {sequences.longest} (CTC, a blank between equal "
            "neighbors). Leave long samples out, or export the model for longer inputs."
        )
    length = label.feature.shape[0]
    what = f"the labels are sequences of up to {length}, {port} has a score a class for every time step."
    loss = [
        Choice("loss.type", "ctc", what),
        Choice("loss.prediction", port.name, _reason_of_activation(port, ends_in)),
        Choice("loss.blank", sequences.blank, sequences.reason),
    ]
    if axis != 2:
        loss.append(Choice("loss.class_axis", axis, f"axis {axis} of the prediction is the axis of the classes."))
    if sequences.padding != PADDING:
        loss.append(Choice("loss.ignore_index", sequences.padding, f"{sequences.padding} pads the labels."))
    cast = "" if label.feature.dtype in ("int64", "int32") else "int64"
    text = f"recognition of label sequences (CTC) of {classes or 'an open number of'} classes"
    return Task(kind="ctc", text=text, prediction=port.name, loss=tuple(loss), cast=cast, classes=classes)


def _unknown_shape(port: Port, label: Label) -> Task | str:
    note = (f"the shape of output {port.name!r} is not in the file; the loss is inferred from the labels.",)
    if label.are_whole and not label.feature.shape:
        loss = (
            Choice("loss.type", "softmax_cross_entropy", "the labels are class numbers."),
            Choice("loss.prediction", port.name),
        )
        return Task(kind="classification", text="classification", prediction=port.name, loss=loss, notes=note)
    loss = (
        Choice("loss.type", "mean_squared_error", "the labels are numbers, not classes."),
        Choice("loss.prediction", port.name),
    )
    return Task(kind="regression", text="regression", prediction=port.name, loss=loss, notes=note)


def loss_of_output(port: Port) -> Task:
    """A model that computes its own loss."""
    loss = (
        Choice("loss.type", "output", f"the model computes its own loss, {port}."),
        Choice("loss.prediction", port.name),
    )
    return Task(kind="output", text="minimizing the model's own loss", prediction=port.name, loss=loss)


def own_loss(model: ModelFacts) -> Port | None:
    """An output of one number that is named as a loss."""
    return next((p for p in model.outputs if p.shape in ((), (1,)) and p.is_float and "loss" in p.name.lower()), None)
