"""Which feature of the data is which input of the model, and which one is the label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onward.errors import DataError
from onward.proposal.data_facts import Feature
from onward.proposal.fitting import Fit, fit
from onward.proposal.label import Label
from onward.proposal.model_facts import ModelFacts, Port
from onward.proposal.proposal import Packing, Question
from onward.proposal.task import Task, candidates, own_loss

LABEL_NAMES = (
    "label", "labels", "target", "targets", "y", "class", "classes", "category", "species", "outcome", "answer",
    "masks", "segmentation", "annotation", "annotations", "response", "output", "outputs", "lm_labels",
)  # fmt: skip
"""How labels are called most often; the words of a name count, in any case."""

_SAME = (
    {"image", "images", "img", "imgs", "pixel_values", "pixels", "picture", "pictures", "photo"},
    {"x", "input", "inputs", "data", "features", "samples", "values", "input_1", "inputs_1", "float_input"},
    {"tokens", "input_ids", "ids", "token_ids", "input_tokens"},
    {"attention_mask", "input_mask", "mask", "padding_mask"},
    {"token_type_ids", "segment_ids", "segments"},
    {"position_ids", "positions"},
    {"audio", "waveform", "signal", "wav", "speech"},
)
"""Names that mean the same input to most people."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """How data go with a model.

    Attributes:
        task: what is learned.
        label: name of the label in RUN.yaml; None: the model computes its own loss.
        name_map: feature in the shards -> input of the model, or label.
        packing: how the data are packed; None: they are packed already.
        questions, notes: as in `Proposal`.
        sample_shapes: input -> shape of one sample, where its sizes are open in the model.
    """

    task: Task
    label: str | None
    name_map: Mapping[str, str] = field(default_factory=dict)
    packing: Packing | None = None
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()


def words_of(name: str) -> list[str]:
    """The words of a name: `petalWidth_cm` -> petal, width, cm."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]


def is_label_name(name: str) -> bool:
    """Whether people call labels so."""
    return name.lower() in LABEL_NAMES or any(word in LABEL_NAMES[:8] for word in words_of(name))


def free_label_name(model: ModelFacts, name: str) -> str:
    """A name for a label that no value of the model has."""
    while name in model.value_names or model.port(name) is not None:
        name += "_target"
    return name


def needed_inputs(model: ModelFacts, asked_output: str | None) -> list[Port]:
    """The inputs that the likeliest prediction depends on, those left out that no sample has."""
    loss = own_loss(model)
    ports = candidates(model, asked_output)
    first = loss or (ports[0] if ports else None)
    names = model.needed.get(first.name) if first is not None else None
    return [
        port for port in model.inputs if (names is None or port.name in names) and port.name not in model.fixed_inputs
    ]


@dataclass(frozen=True)
class FeatureAssignment:
    """Inputs with the features that they are read from, and what is left over."""

    chosen: Mapping[str, tuple[Feature, Fit]]
    missing: tuple[Port, ...]
    left: tuple[Feature, ...]


def assign(
    model: ModelFacts, ports: Sequence[Port], features: Sequence[Feature], label: str | None
) -> FeatureAssignment:
    """Gives each input the feature that fits it best, by name first, then by what is to be done to it."""
    pairs = []
    for port in ports:
        for feature in features:
            if feature.name == label:
                continue
            found = fit(feature, port, port.name in model.scaled_inputs)
            if found is not None:
                pairs.append((name_score(feature.name, port.name) * 3 - found.cost, port, feature, found))
    pairs.sort(key=lambda pair: -pair[0])
    chosen: dict[str, tuple[Feature, Fit]] = {}
    used: set[str] = set()
    for _, port, feature, found in pairs:
        if port.name not in chosen and feature.name not in used:
            chosen[port.name] = (feature, found)
            used.add(feature.name)
    missing = tuple(port for port in ports if port.name not in chosen)
    return FeatureAssignment(chosen, missing, tuple(one for one in features if one.name not in used))


def name_score(feature: str, port: str) -> float:
    """How much two names speak for each other."""
    one, other = feature.lower(), port.lower()
    if feature == port:
        return 3.0
    if one == other or words_of(feature) == words_of(port):
        return 2.5
    if any(one in group and other in group for group in _SAME):
        return 2.0
    if is_label_name(feature):
        return -2.0
    shared = set(words_of(feature)) & set(words_of(port))
    return 1.0 if shared or one in other or other in one else 0.0


def synthesized(port: Port, tokens: str) -> str | None:
    """The operation on a feature of tokens that makes an input which follows from them; None: it does not."""
    name = port.name.lower()
    if port.sample is None or len(port.sample) != 1 or port.dtype == "string":
        return None
    if "mask" in name:
        return f"{tokens}=ones:{port.name}"
    if "token_type" in name or "segment" in name:
        return f"{tokens}=zeros:{port.name}"
    if "position" in name:
        return f"{tokens}=positions:{port.name}"
    return None


def choose_label(
    model: ModelFacts, left: Sequence[Feature], asked: str | None, all_features: Sequence[Feature]
) -> tuple[Feature | None, tuple[Question, ...]]:
    """The label among the features that no input takes, and the question where there are several.

    Raises:
        DataError: `asked` is not among the features.
    """
    if asked is not None:
        found = next((one for one in all_features if one.name == asked), None)
        if found is None:
            names = ", ".join(repr(one.name) for one in all_features)
            raise DataError(f"--label is {asked!r}, which is not in the data. Pass one of {names}.")
        return found, ()
    if not left:
        return None, ()
    named = [one for one in left if is_label_name(one.name)]
    chosen = (named or list(left))[0 if named else -1]
    if len(left) == 1 or len(named) == 1:
        return chosen, ()
    others = ", ".join(repr(one.name) for one in left)
    text = f"Which feature is the label? No input of the model takes {others}."
    return chosen, (Question("label", text, chosen.name),)


def missing_inputs(model: ModelFacts, missing: Sequence[Port], features: Sequence[Feature]) -> DataError:
    """What is said where an input has no feature."""
    wanted = "; ".join(f"{port.name!r} {port.dtype} {_sample(port)}" for port in missing)
    held = "; ".join(f"{one.name!r} {one.dtype} {list(one.shape)}" for one in features)
    return DataError(
        f"the model {str(model.path)!r} reads {wanted} per sample, and no feature of the data has that shape and type; "
        f"the data hold {held}. Prepare a feature of that shape, or pack the data by hand with onward pack "
        "--transform."
    )


def _sample(port: Port) -> str:
    return "of any shape" if port.sample is None else f"[{', '.join(map(str, port.sample))}]"


def renamed(model: ModelFacts, label: Feature | None, classes: tuple[str, ...]) -> Label | None:
    """A label feature with the names of its classes."""
    return None if label is None else Label(label, classes)
