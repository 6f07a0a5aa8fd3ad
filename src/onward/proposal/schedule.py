"""How long, how much at a time and at which rate: choices that follow from the model and the number of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from onward.losses.registry import loss_named
from onward.proposal.model_facts import ModelFacts
from onward.proposal.proposal import Answers, Choice, Counts
from onward.proposal.task import Task

_UPDATES = {True: 300, False: 1000}
"""Weight updates of a run to aim at: for trained weights, and for new ones."""

_MOST_EPOCHS = {True: 10, False: 40}
_FEWEST_UPDATES_AN_EPOCH = 8


RATE_OF_ADAPTERS = 2e-4, "usual for adapters, which begin as zero next to trained weights"

_FEWEST_FOR_STATISTICS = 16
"""Samples of a batch from which batch normalization takes its own statistics when a trained model is fine-tuned."""


def batch_size(model: ModelFacts, task: Task, counts: Counts, answers: Answers) -> Choice:
    """Samples of a micro-batch: usual for the kind of model, and few enough for some updates an epoch."""
    name = "training.batch_size"
    if model.only_batch is not None:
        return Choice(name, model.only_batch, _why_only(model))
    size, reason = _wanted_batch(model, task, counts, answers)
    return Choice(name, size, reason + _rewritten(model, size))


def _why_only(model: ModelFacts) -> str:
    proof = model.batch_proof
    because = f", and the graph cannot be rewritten for another, because {proof.reason}" if proof is not None else ""
    return f"the batch size in the file is fixed to {model.fixed_batch}{because}."


def _rewritten(model: ModelFacts, size: int) -> str:
    """What is said of a batch size that the file does not have."""
    proof = model.batch_proof
    if proof is None or proof.difference is None or size == model.fixed_batch:
        return ""
    return (
        f" The file fixes a batch size of {model.fixed_batch}: training rewrites the graph for any size (samples "
        f"computed as one batch and one by one differ by {proof.difference:.0e} of the largest output), the trained "
        "model keeps its own."
    )


def _wanted_batch(model: ModelFacts, task: Task, counts: Counts, answers: Answers) -> tuple[int, str]:
    if answers.batch_size is not None:
        return answers.batch_size, "set on the command line or in the wizard."
    usual, kind = _usual_batch(model, task)
    if not counts.train:
        return usual, f"usual for {kind}."
    most = max(1, counts.train // _FEWEST_UPDATES_AN_EPOCH)
    size = usual
    while size > most and size > 1:
        size //= 2
    if size < usual:
        return size, f"smaller than the usual {usual}, so that {counts.train:,} samples give enough updates per epoch."
    return size, f"usual for {kind}."


def accumulation(model: ModelFacts, task: Task, counts: Counts, answers: Answers) -> list[Choice]:
    """Batches that make an update together, where the file fixes the batch to fewer samples than are usual."""
    if model.only_batch is None:
        return []
    wanted = answers.batch_size or _usual_batch(model, task)[0]
    while counts.train and wanted > max(1, counts.train // _FEWEST_UPDATES_AN_EPOCH):
        wanted //= 2
    count = wanted // model.only_batch
    if count < 2:
        return []
    samples = count * model.only_batch
    reason = f"{count} batches of {model.only_batch} make one update: {samples} samples; num_updates counts these."
    return [Choice("training.gradient_accumulation_steps", count, reason)]


def _usual_batch(model: ModelFacts, task: Task) -> tuple[int, str]:
    if task.kind.endswith("language_model"):
        return 8, "sequences of tokens"
    if model.is_transformer:
        return 16, "transformers"
    if model.is_convolutional:
        return 32, "convolutional networks"
    return 64, "small networks"


def training_choices(
    model: ModelFacts, task: Task, counts: Counts, answers: Answers, size: int, is_adapted: bool = False
) -> tuple[list[Choice], list[Choice]]:
    """The sections `training` (but for the batch size) and `learning_rate`."""
    trained = model.origin.is_trained
    updates = updates_an_epoch(counts, size)
    epochs, why = _epochs(counts, answers, updates, trained)
    training = [
        Choice("training.num_epochs", epochs, why),
        Choice("training.display_loss_steps", max(1, min(100, round(updates * epochs) // 20))),
    ]
    if model.stores_statistics and trained and size < _FEWEST_FOR_STATISTICS:
        said = f"batches of {size} samples are too small for a mean and deviation; those of the file are kept."
        training.append(Choice("training.freeze_batch_norm", True, said))
    if counts.test:
        period = max(1, math.ceil(epochs / 20))
        each = "after every epoch" if period == 1 else f"every {period} epochs"
        held = f"the {counts.test:,} test samples are" if counts.train else "the test samples are"
        training.append(Choice("training.evaluation_period_epochs", period, f"{held} evaluated {each}."))
    return training, _rate(model, task, answers, is_adapted)


def updates_an_epoch(counts: Counts, size: int) -> int:
    """Weight updates in a pass over the training data; a hundred where there are none yet."""
    return max(1, math.ceil(counts.train / size)) if counts.train else 100


def _epochs(counts: Counts, answers: Answers, updates: int, trained: bool) -> tuple[int, str]:
    if answers.epochs is not None:
        return answers.epochs, "set on the command line or in the wizard."
    if not counts.train:
        return 3, "passes over the data; a common starting point."
    aim, most = _UPDATES[trained], _MOST_EPOCHS[trained]
    epochs = min(most, max(1 if updates >= aim else 3, math.ceil(aim / updates)))
    about = "" if counts.is_exact else "about "
    what = "trained weights need few updates" if trained else "new weights need many updates"
    return epochs, (
        f"{about}{counts.train:,} training samples make {updates:,} updates per epoch, {updates * epochs:,} in total; "
        f"{what}."
    )


def _rate(model: ModelFacts, task: Task, answers: Answers, is_adapted: bool) -> list[Choice]:
    trained = model.origin.is_trained
    rate, why = _rate_of_pairs(task) or (RATE_OF_ADAPTERS if is_adapted else _usual_rate(model, task, trained))
    if answers.learning_rate is not None:
        rate, why = answers.learning_rate, "set on the command line or in the wizard"
    warmup = 0.1 if model.is_transformer or trained else 0.05
    return [
        Choice("learning_rate.initial_lr", rate, f"{why}; onward lr-find tests others."),
        Choice("learning_rate.warmup_mode", "linear" if model.is_transformer and trained else "cosine"),
        Choice(
            "learning_rate.warmup_ratio",
            warmup,
            "warm-up: the rate rises while Adam's moments are still unreliable; then it decays to 0.",
        ),
    ]


def _rate_of_pairs(task: Task) -> tuple[float, str] | None:
    if not any(choice.field == "loss.type" and loss_named(choice.value).is_of_pairs for choice in task.loss):
        return None
    return 5e-6, "preferences are learned by a model that answers already, which a larger rate would make forget"


def _usual_rate(model: ModelFacts, task: Task, trained: bool) -> tuple[float, str]:
    evidence = model.origin.evidence
    if trained:
        found = f"the weights look trained ({evidence}): a small rate fine-tunes them"
        return (5e-5 if model.is_transformer else 1e-4 if model.is_convolutional else 3e-4), found
    found = f"the weights look new ({evidence}): a rate for training from scratch"
    return (5e-4 if model.is_transformer else 1e-3 if model.element_count > 20_000 else 3e-3), found


def optimizer_choices(model: ModelFacts, is_adapted: bool = False) -> list[Choice]:
    """The section `optimizer`."""
    decay = 0.01
    bare = [] if is_adapted else _without_decay(model)
    rules: list[dict[str, object]] = [{"weights": "*", "lambda": decay}]
    if bare:
        rules.append({"weights": bare, "lambda": 0.0})
    choices = [
        Choice("optimizer.training_optimizer_name", "AdamW", "it needs little tuning."),
        Choice(
            "optimizer.optimizer_attributes",
            rules,
            "weight decay for matrices, none for biases and norms." if bare else "",
        ),
    ]
    if model.is_transformer or model.is_recurrent:
        choices.append(Choice("optimizer.max_norm_clip", 1.0, "limits the effect of a single bad batch."))
    return choices


def _without_decay(model: ModelFacts) -> list[str]:
    """Patterns, or names, of the weights of one axis."""
    vectors = [name for name, shape in model.weights.items() if len(shape) < 2]
    matrices = [name for name, shape in model.weights.items() if len(shape) >= 2]
    patterns = []
    for pattern in ("*bias*", "*norm*", "*.b", "*beta*", "*gamma*"):
        matched = [name for name in vectors if fnmatchcase(name, pattern)]
        if matched and not any(fnmatchcase(name, pattern) for name in matrices):
            patterns.append(pattern)
            vectors = [name for name in vectors if name not in matched]
    return patterns + (vectors if _is_short(vectors) else [])


def _is_short(names: Sequence[str]) -> bool:
    return len(names) <= 12
