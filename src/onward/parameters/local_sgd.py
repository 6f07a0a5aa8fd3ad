"""Local SGD and DiLoCo: what the fields of `distributed` that set them need, and what they exclude."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.optimizers.registry import optimizer_named

if TYPE_CHECKING:
    from onward.parameters import Parameters
    from onward.parameters.distributed import Distributed

FIELDS = ("sync_every_updates", "replicas_per_worker", "outer_optimizer", "outer_lr", "outer_momentum")
"""Of `distributed`; unlike the others of that section they change what is computed."""


def local_sgd_problems(parameters: Parameters) -> list[str]:
    """What is wrong with `sync_every_updates` and what goes with it, one sentence each."""
    split = parameters.distributed
    if split.sync_every_updates is None:
        return []
    where = f"distributed.sync_every_updates is {split.sync_every_updates}"
    return [
        *(f"{where}, {problem}" for problem in _size_problems(split)),
        *(f"{where}, but {reason}. Leave one of the two out." for reason in _obstacles(parameters)),
        *_outer_problems(split),
        *_evaluation_problems(parameters),
    ]


def _size_problems(split: Distributed) -> list[str]:
    if split.layout == "auto":
        return [
            "which changes what is trained, and distributed.layout is auto, which chooses among layouts that train "
            "the same. Set layout to manual, with the sizes that `onward plan` prints without sync_every_updates."
        ]
    replicas = split.data_parallel_size * split.context_parallel_size
    if split.zero_stage and split.zero_group_size is None and split.replicas_per_worker is None:
        return [
            f"and zero_stage is {split.zero_stage}, which shards over all {replicas} replicas: a worker of its own has "
            "no part of the weights to train. Set zero_group_size to the replicas that are one worker, such as those "
            "of a node, or zero_stage to 0."
        ]
    size = split.worker_size or 1
    if replicas % size or replicas == size:
        return [
            f"and a worker is {size} of {replicas} replicas (data_parallel_size {split.data_parallel_size} * "
            f"context_parallel_size {split.context_parallel_size}), which does not make two workers or more of equal "
            "size. Set replicas_per_worker (with ZeRO, zero_group_size) to a smaller divisor, use more replicas, or "
            "remove sync_every_updates."
        ]
    parts = {
        "context_parallel_size": split.context_parallel_size,
        "expert_parallel_size": split.expert_parallel_size,
        "zero_group_size": split.zero_group_size or 1,
    }
    problems = [
        f"and a worker is {size} replicas, which {name} {part} does not divide; what these share, one worker holds. "
        f"Set replicas_per_worker to a multiple of {part}."
        for name, part in parts.items()
        if size % part
    ]
    if split.zero_stage and size == 1:
        problems.append(
            f"and zero_stage is {split.zero_stage}, but a worker is 1 replica, which has nobody to shard with. Set "
            "replicas_per_worker above 1, or zero_stage to 0."
        )
    return problems


def _obstacles(parameters: Parameters) -> list[str]:
    split, averaging = parameters.distributed, parameters.averaging.kind
    optimizer = parameters.optimizer.training_optimizer_name
    found = {
        "distributed.enable_adasum is true, and workers combine differences of weights, not gradients": (
            split.enable_adasum
        ),
        "distributed.elastic is true, whose updates are the same with any number of replicas": split.elastic,
        f"averaging.kind is {averaging}, and between two synchronizations every worker would average other weights": (
            averaging is not None
        ),
        f"the optimizer {optimizer} evaluates an average of its own, other weights on every worker": (
            optimizer_named(optimizer).averages_weights
        ),
        f"pruning.pattern is {parameters.pruning.pattern}, and every worker would choose other elements": (
            parameters.pruning.pattern is not None
        ),
        "machine.check_computation_period compares replicas, whose weights are then different": (
            parameters.machine.check_computation_period > 0
        ),
    }
    return [reason for reason, is_met in found.items() if is_met]


def _evaluation_problems(parameters: Parameters) -> list[str]:
    """Evaluations between two synchronizations are of the same weights, which neither improve nor fail to."""
    training, every = parameters.training, parameters.distributed.sync_every_updates
    accumulation, asker = training.gradient_accumulation_steps, compares_evaluations(parameters)
    if asker is None or every is None or not 0 < training.evaluation_period < every * accumulation:
        return []
    of = "" if accumulation == 1 else f" of {accumulation} steps each (training.gradient_accumulation_steps)"
    fitting = max(1, training.evaluation_period // accumulation)
    return [
        f"training.evaluation_period is {training.evaluation_period} steps, but {asker}, and the weights to compare "
        f"change only every {every} updates{of} (distributed.sync_every_updates). Set evaluation_period to "
        f"{every * accumulation} or more, or sync_every_updates to {fitting} or less."
    ]


def compares_evaluations(parameters: Parameters) -> str | None:
    """Which field asks to compare the evaluations of a round, in words; None: none does."""
    if (patience := parameters.early_stopping.patience) is not None:
        return f"early_stopping.patience is {patience}"
    return "checkpoint.keep_best is true" if parameters.checkpoint.keep_best else None


def _outer_problems(split: Distributed) -> list[str]:
    if split.outer_optimizer == "nesterov" and split.outer_momentum == 0:
        return [
            "distributed.outer_momentum is 0, but outer_optimizer is nesterov, which needs momentum. Set it above 0, "
            "or outer_optimizer to sgd."
        ]
    return []
