"""Fields in combination: what no single field can know. Every problem is a sentence with field, value and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.losses import registry
from onward.parameters.adapter import adapter_problems
from onward.parameters.distributed import distribution_problems, elastic_problems
from onward.parameters.effects import fields_without_effect
from onward.parameters.evaluation import read_metrics
from onward.parameters.local_sgd import compares_evaluations, local_sgd_problems
from onward.parameters.optimizer import optimizer_problems
from onward.parameters.pruning import pruning_problems
from onward.parameters.reporting import checkpoint_problems
from onward.parameters.speed import update_in_backward_problems
from onward.schedules.learning_rate.registry import decay_named
from onward.spelling import listed

if TYPE_CHECKING:
    from onward.parameters import Parameters
    from onward.parameters.speed import MixedPrecision
    from onward.parameters.training import LearningRate, Training


def find_problems(parameters: Parameters) -> list[str]:
    """Everything that is wrong with fields in combination, in any round, one sentence each."""
    problems = _problems_of_round(parameters)
    for number, later in enumerate(parameters.next_rounds):
        where = f"next_rounds[{number}]"
        if later.next_rounds:
            problems.append(f"{where}.next_rounds is given; list all later rounds in the first one.")
        problems += [f"{where}.{problem}" for problem in _problems_of_round(later)]
        changed = fixed_fields_changed(parameters, later)
        if changed:
            problems.append(f"{where}: {', '.join(changed)} cannot change between the rounds of one run.")
    return problems


def _problems_of_round(parameters: Parameters) -> list[str]:
    return [
        *_check_model(parameters),
        *_check_steps(parameters),
        *_check_learning_rate(parameters.learning_rate, parameters.training),
        *_check_loss(parameters),
        *_check_distillation(parameters),
        *_check_quantize_aware(parameters),
        *pruning_problems(parameters),
        *_check_precision(parameters.mixed_precision),
        *_check_layout(parameters),
        *elastic_problems(parameters),
        *distribution_problems(parameters.distributed, parameters.training.gradient_accumulation_steps),
        *local_sgd_problems(parameters),
        *optimizer_problems(parameters.optimizer, parameters.averaging.kind, parameters.distributed),
        *adapter_problems(parameters),
        *checkpoint_problems(parameters.checkpoint),
        *_check_best(parameters),
        *_check_spikes(parameters),
        *_check_profiler(parameters),
        *_check_batch_size(parameters),
        *_check_cuda_graphs(parameters),
        *update_in_backward_problems(parameters),
        *_check_frozen_weights(parameters),
        *fields_without_effect(parameters, refused=True),
    ]


_FIXED = {
    "paths": ("model_path", "eval_model_path", "model_with_loss_func_path"),
    "training": (
        "seed",
        "weights_to_train",
        "weights_not_to_train",
        "train_last",
        "unfreeze",
        "tied_weights",
        "untied_weights",
        "immutable_weights",
        "revive_dropout",
    ),
    "checkpoint": (
        "checkpoints_dir",
        "checkpoint_to_load_path",
        "if_damaged",
        "max_num_checkpoints",
        "blocking",
        "keep_best",
        "keep_every",
        "export",
    ),
    "early_stopping": (),
    "tensorboard": ("log_dir",),
    **dict.fromkeys(("wandb", "mlflow", "aim"), ()),
    **dict.fromkeys(
        (
            "loss",
            "head",
            "adapter",
            "optimizer",
            "averaging",
            "distillation",
            "quantize_aware",
            "pruning",
            "mixed_precision",
            "frozen_weights",
            "speed",
            "distributed",
            "recompute",
            "machine",
            "limits",
        ),
        (),
    ),
}
"""Section -> fields that a run is built from and that no later round can change; without fields, the entire section."""


def fixed_fields_changed(first: Parameters, later: Parameters) -> list[str]:
    """What differs between two rounds although it cannot change within a run, as `section` or `section.field`."""
    changed = []
    for section, names in _FIXED.items():
        one, other = getattr(first, section), getattr(later, section)
        if not names and one != other:
            changed.append(section)
        changed += [f"{section}.{name}" for name in names if getattr(one, name) != getattr(other, name)]
    micro_batches = [parameters.training.gradient_accumulation_steps for parameters in (first, later)]
    if first.distributed.pipeline_parallel_size > 1 and micro_batches[0] != micro_batches[1]:
        changed.append("training.gradient_accumulation_steps (the micro-batches of a pipeline)")
    return changed


def _check_steps(parameters: Parameters) -> list[str]:
    training = parameters.training
    problems = []
    if training.evaluation_period and training.evaluation_period_epochs is not None:
        problems.append(
            f"training.evaluation_period is {training.evaluation_period} and training.evaluation_period_epochs is "
            f"{training.evaluation_period_epochs:g}; set one of the two."
        )
    try:
        read_metrics(training.metrics)
    except ValueError as error:
        problems.append(str(error))
    steps, accumulation = training.num_train_steps, training.gradient_accumulation_steps
    lengths = {"num_train_steps": steps, "num_updates": training.num_updates, "num_epochs": training.num_epochs}
    given = [f"training.{name} is {length:g}" for name, length in lengths.items() if length is not None]
    if len(given) != 1:
        found = ", and ".join(given) or "training.num_train_steps, num_updates and num_epochs are missing"
        how = "how long to train, in steps, in weight updates or in passes over the data."
        return [*problems, f"{found}; set one of them: {how}"]
    if steps is None or steps % accumulation == 0:
        return problems
    lower = steps - steps % accumulation
    fitting = f"{lower} or {lower + accumulation}" if lower else f"{accumulation}"
    return [
        *problems,
        f"training.num_train_steps is {steps}, not a multiple of training.gradient_accumulation_steps, which is "
        f"{accumulation}; use {fitting}.",
    ]


def _check_learning_rate(rate: LearningRate, training: Training) -> list[str]:
    problems = []
    if rate.warmup_ratio is not None and rate.warmup_steps is not None:
        problems.append(
            f"learning_rate.warmup_ratio is {rate.warmup_ratio} and learning_rate.warmup_steps is {rate.warmup_steps}; "
            "set one of the two."
        )
    steps = training.known_steps
    if rate.warmup_steps is not None and steps is not None and rate.warmup_steps > steps:
        problems.append(
            f"learning_rate.warmup_steps is {rate.warmup_steps}, more than training.num_train_steps, which is "
            f"{steps}; the rate would never reach initial_lr."
        )
    decay = decay_named(rate.warmup_mode)
    if not decay.has_warmup and (rate.warmup_ratio or rate.warmup_steps):
        given = "warmup_ratio" if rate.warmup_ratio else "warmup_steps"
        instead = (
            "list it in learning_rate.points"
            if "points" in decay.reads
            else ("use constant for a warm-up followed by a constant rate")
        )
        problems.append(
            f"learning_rate.warmup_mode is {rate.warmup_mode}, which has no warm-up; {instead}, or leave "
            f"learning_rate.{given} out."
        )
    if "points" in decay.reads and not rate.points:
        problems.append(
            f"learning_rate.points is missing; learning_rate.warmup_mode {rate.warmup_mode} needs it. List "
            "[fraction of the round's steps, fraction of initial_lr] pairs, such as [[0, 1], [0.5, 1], [1, 0.1]]."
        )
    places = [place for place, _ in rate.points]
    if places != sorted(places):
        problems.append(
            f"learning_rate.points are at {', '.join(f'{place:g}' for place in places)} of the round; sort them by "
            "the first number."
        )
    return problems


def _check_loss(parameters: Parameters) -> list[str]:
    loss = parameters.loss
    kind = registry.loss_named(loss.type)
    missing = [name for name in kind.required if getattr(loss, name) is None]
    problems = [f"loss.{name} is missing; loss.type {loss.type!r} needs it." for name in missing]
    defaults = type(loss)(type=loss.type)
    for name in dict.fromkeys(name for one in registry.LOSSES for name in one.reads):
        if name not in kind.reads and getattr(loss, name) != getattr(defaults, name):
            readers = listed([one.name for one in registry.LOSSES if name in one.reads])
            problems.append(f"loss.{name} is given, but belongs to {readers}, not to {loss.type!r}.")
    return problems + kind.find_problems(parameters)


def _check_distillation(parameters: Parameters) -> list[str]:
    asked, loss = parameters.distillation, parameters.loss
    if asked.teacher_path is None:
        return []
    kind = registry.loss_named(loss.type)
    if kind.add is None or len(kind.predictions) != 1:
        return [f"distillation.teacher_path is given, but a loss of type {loss.type!r} cannot be distilled; remove it."]
    problems = []
    if asked.alpha > 0 and not kind.has_soft_targets:
        known = " or ".join(repr(one.name) for one in registry.LOSSES if one.has_soft_targets)
        problems.append(
            f"distillation.alpha is {asked.alpha:g}, but loss.type {loss.type!r} has no class probabilities; set "
            f"it to 0 and give distillation.pairs, or use loss.type {known}."
        )
    if not asked.alpha and not asked.pairs:
        problems.append(
            "distillation.alpha is 0 and distillation.pairs is empty, so that nothing is learned from the teacher; set "
            "one of the two."
        )
    if asked.teacher_path in parameters.model_files:
        problems.append("distillation.teacher_path is the trained model itself; give another file.")
    return problems


def _check_quantize_aware(parameters: Parameters) -> list[str]:
    if parameters.quantize_aware.weights is None or parameters.adapter.rank is None:
        return []
    return [
        f"quantize_aware.weights is {parameters.quantize_aware.weights} and adapter.rank is {parameters.adapter.rank}; "
        "set one of the two: adapters leave the weights that would be rounded as they are."
    ]


def _check_precision(precision: MixedPrecision) -> list[str]:
    if precision.use_mixed_precision == "auto":
        given = {"use_bfloat16": precision.use_bfloat16, "loss_scale": precision.loss_scale not in (0.0, 1.0)}
        return [
            f"mixed_precision.{name} is set while use_mixed_precision is auto, which chooses bf16 or the model's own "
            "types by itself; leave it out, or set use_mixed_precision to true."
            for name, is_given in given.items()
            if is_given
        ]
    if precision.use_bfloat16 and not precision.use_mixed_precision:
        return [
            "mixed_precision.use_bfloat16 is true while use_mixed_precision is false; "
            "set use_mixed_precision: true as well."
        ]
    if not precision.use_mixed_precision and precision.loss_scale not in (0.0, 1.0):
        return [
            f"mixed_precision.loss_scale is {precision.loss_scale:g} while use_mixed_precision is false; "
            "fp32 needs no loss scale: leave it out."
        ]
    if precision.use_bfloat16 and precision.loss_scale not in (0.0, 1.0):
        return [f"mixed_precision.loss_scale is {precision.loss_scale:g}, but bf16 needs no loss scale; leave it out."]
    return []


def _check_spikes(parameters: Parameters) -> list[str]:
    """Whether there is something to return to."""
    if parameters.on_bad_loss.spike_threshold is None or parameters.checkpoint.checkpoints_dir is not None:
        return []
    return [
        "on_bad_loss.spike_threshold is set, but checkpoint.checkpoints_dir is not, so that there is no checkpoint to "
        "return to; set it to a folder."
    ]


def _check_best(parameters: Parameters) -> list[str]:
    """Whether there are evaluations to compare, each of weights that can be saved."""
    training, asker = parameters.training, compares_evaluations(parameters)
    if asker is None:
        return []
    if training.skip_evaluation:
        return [f"{asker}, but training.skip_evaluation is true; leave one of the two out."]
    period, accumulation = training.evaluation_period, training.gradient_accumulation_steps
    if not period and training.evaluation_period_epochs is None:
        return [
            f"{asker}, but training.evaluation_period is 0, so that nothing is evaluated before the end; set "
            "training.evaluation_period (steps) or evaluation_period_epochs."
        ]
    if period % accumulation:
        return [
            f"{asker}, but training.evaluation_period is {period}, not a multiple of "
            f"training.gradient_accumulation_steps, which is {accumulation}; use "
            f"{-(-period // accumulation) * accumulation}."
        ]
    return []


def _check_profiler(parameters: Parameters) -> list[str]:
    profiler = parameters.profiler
    if (profiler.first_step is None) != (profiler.last_step is None):
        return ["profiler.first_step and profiler.last_step belong together; give both."]
    if profiler.first_step is not None and profiler.last_step is not None:
        if profiler.last_step < profiler.first_step:
            return [f"profiler.last_step is {profiler.last_step}, before first_step, which is {profiler.first_step}."]
        steps = parameters.training.known_steps
        if steps is not None and profiler.first_step > steps:
            return [f"profiler.first_step is {profiler.first_step}, but the round has {steps} steps."]
        if profiler.trace_dir is None and parameters.paths.output_dir is None:
            return ["profiler.trace_dir is missing, and so is paths.output_dir; set one of them."]
    return []


def _check_batch_size(parameters: Parameters) -> list[str]:
    is_in_pipeline = parameters.training.find_batch_size and parameters.distributed.pipeline_parallel_size > 1
    if not (is_in_pipeline and parameters.next_rounds):
        return []
    return [
        "training.find_batch_size is true in a run of several rounds through a pipeline, whose number of micro-batches "
        "cannot change from round to round; set training.batch_size and find_batch_size: false."
    ]


def _check_layout(parameters: Parameters) -> list[str]:
    """What a layout that is searched cannot know."""
    count = parameters.recompute.number_recompute_layers
    if parameters.distributed.layout != "auto" or not count:
        return []
    return [
        f"recompute.number_recompute_layers is {count}, layers of every process, but distributed.layout is auto, which "
        "chooses how many layers a process has. Set recompute.memory_budget instead, or layout to manual."
    ]


def _check_cuda_graphs(parameters: Parameters) -> list[str]:
    """A graph is replayed in the same memory: nothing of a pass may be needed when the next one begins."""
    if not parameters.speed.cuda_graphs:
        return []
    split, training = parameters.distributed, parameters.training
    accumulation = training.gradient_accumulation_steps
    size = split.world_size
    recompute = parameters.recompute
    is_recomputed = recompute.segments or recompute.attention or recompute.memory_budget is not None
    obstacles = {
        "speed.compile is false, and what is recorded is compiled code": parameters.speed.compile is False,
        f"the sizes of distributed make {size} processes, and it is for one": size > 1,
        f"training.gradient_accumulation_steps is {accumulation}, and gradients of a pass would be written over by the "
        "next": accumulation > 1,
        "training.find_batch_size may accumulate": training.find_batch_size,
        "training.unfreeze changes which gradients there are": bool(training.unfreeze),
        "recompute runs parts of a pass twice": is_recomputed,
        "data.last_batch is short, and graphs are for batches of one shape": parameters.data.last_batch == "short",
    }
    reasons = [reason for reason, is_met in obstacles.items() if is_met]
    return [f"speed.cuda_graphs is true, but {reason}; leave one of the two out." for reason in reasons]


def _check_frozen_weights(parameters: Parameters) -> list[str]:
    dtype, path = parameters.frozen_weights.dtype, parameters.paths.eval_model_path
    if dtype != "as_stored" and parameters.quantize_aware.weights is not None:
        return [
            f"frozen_weights.dtype is {dtype} and quantize_aware.weights is {parameters.quantize_aware.weights}; set "
            "one of the two: quantization-aware training rounds frozen weights, too, as the exported model does."
        ]
    if dtype == "as_stored" or path is None:
        return []
    return [
        f"frozen_weights.dtype is {dtype} and paths.eval_model_path is {str(path)!r}, whose frozen weights are those "
        "of its own file: training and evaluation would compute with different ones. Remove one of the two."
    ]


def _check_model(parameters: Parameters) -> list[str]:
    files = parameters.model_files
    if not files:
        return [
            "paths.model_path is missing; name the ONNX model to train, or the models of its stages under "
            "distributed.pipeline_stage_paths."
        ]
    return [
        f"paths.{name} is the model itself, which would be written over; give another file."
        for name in ("model_with_loss_func_path", "model_with_training_graph_path", "optimizer_graph_path")
        if getattr(parameters.paths, name) in files
    ]
