"""The sections `training` and `learning_rate` of RUN.yaml: how long, how much at a time, which weights, at which rate.

*Steps* are forward/backward passes, *updates* are weight updates; one field has one meaning and one unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pydantic

from onward.errors import ParametersError
from onward.parameters.evaluation import MetricSpec
from onward.parameters.field_types import (
    STRICT,
    BatchSize,
    Count,
    CountFromZero,
    Flag,
    NonNegative,
    Number,
    OneOf,
    Positive,
    PositiveShare,
    Seed,
    Share,
    ShareBelowOne,
)
from onward.schedules.learning_rate import registry
from onward.schedules.learning_rate.decay import DecayShape


@dataclass(frozen=True, kw_only=True)
class DropoutRule:
    """Where dropout that an export left out belongs, and how much of it.

    Attributes:
        ratio: fraction of the elements that are set to zero in training.
        after_operators: operator types; dropout follows every node of them (`Softmax`: attention dropout).
        after_values: names or `*`-patterns of values that dropout follows.
    """

    __pydantic_config__ = STRICT
    ratio: ShareBelowOne
    after_operators: tuple[str, ...] = ()
    after_values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnfreezeRule:
    """Weights that are frozen at first and trained from an update on.

    Attributes:
        after_updates: weight updates, over all rounds, before these weights are trained.
        weights: a name or `*`-pattern of initializers or module paths, or several.
    """

    __pydantic_config__ = STRICT
    after_updates: Count
    weights: str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long, how much at a time, and which weights.

    Attributes:
        batch_size: samples in one micro-batch of one replica.
        eval_batch_size: samples in one batch of evaluation; absent: `batch_size`.
        num_train_steps: forward/backward passes of a round; set this, `num_updates` or `num_epochs`.
        num_updates: weight updates of a round, each of `gradient_accumulation_steps` passes. A run that resumes with
            another accumulation, as another layout may need, still ends after so many in all.
        num_epochs: passes over the training data in a round, converted to `num_train_steps` by the number of samples,
            `batch_size` and the replicas, and rounded up; the run reports how. Fractions such as 0.5 are allowed.
        gradient_accumulation_steps: passes whose gradients make one weight update.
        accumulate_as: `one_batch`: the update is that of one batch of all samples of its passes, also where passes
            count different numbers of labels or the loss is a sum; `mean`: every pass counts the same, and sums are
            averaged.
        display_loss_steps: weight updates between two displayed losses.
        evaluation_period: steps between two evaluations; 0: only at the end.
        evaluation_period_epochs: the same in epochs (1: after every epoch), converted to steps; set one of the two.
        skip_evaluation: never evaluate.
        metrics: what evaluations compute in addition to the loss: names of torchmetrics classes (`f1`, `auroc`, `r2`),
            or mappings with their options such as `{name: f1, average: macro}`; `prediction`, `label` and `task`
            override what follows from the loss, `as` sets the name in reports. Accuracy of class labels is always
            computed.
        seed: of dropout, shuffling and all other random numbers.
        weights_to_train: exact names or `*`-patterns of initializers or module paths; empty: all trainable ones.
        weights_not_to_train: exact names or patterns to exclude from these; `freeze` is another name of this field.
            Frozen weights have no gradients, moments or fp32 master weights.
        train_last: train only so many of the last blocks of the network, and what comes after them; 0: only that.
            Blocks are the parts that repeat. Absent: all are trained.
        unfreeze: rules, each `{after_updates, weights}`: weights that are frozen at first.
        freeze_batch_norm: batch normalization uses its stored running statistics in training, too, and leaves them as
            they are: for batches of a few samples, whose own statistics are noise.
        tied_weights: patterns (initializers or module paths) of weights that several layers share and that stay shared,
            where they would be taken for equal ones that the exporter merged; of copies with equal numbers, if the file
            does not say whether they are one weight, the named ones are tied to the first.
        untied_weights: patterns of weights that several nodes read and that become one weight for each layer, where
            they would be taken for shared; of tensors with the numbers of another, those that are trained separately
            where they would be taken for its copies.
        immutable_weights: operator -> [[input index, value]]: rank-0 constants that never train.
        revive_dropout: rules, each `{ratio, after_operators, after_values}`: dropout that an export left out.
        mapped_dimensions: symbolic dimension of the model -> its size.
        find_batch_size: find the largest micro-batch that fits the memory of a rank (`machine.memory_gb`), by forecast
            and trial. An update stays `batch_size` times `gradient_accumulation_steps` samples of each replica, and
            fields in steps are converted; the run reports how. A resumed run keeps the size it found.
        halve_batch_on_out_of_memory: after memory ran out, `onward train` restarts the run from its last checkpoint
            with half the micro-batch and twice the `gradient_accumulation_steps`; an update keeps its samples, and
            fields in steps are converted. A resumed run keeps the size.
        is_perf_test: train on random batches made from the model's inputs, and report throughput and memory;
            nothing is saved or evaluated, and no data are needed.
    """

    __pydantic_config__ = STRICT
    batch_size: BatchSize
    num_train_steps: Count | None = None
    num_updates: Count | None = None
    num_epochs: Positive | None = None
    eval_batch_size: BatchSize | None = None
    gradient_accumulation_steps: Count = 1
    accumulate_as: Literal["one_batch", "mean"] = "one_batch"
    display_loss_steps: Count = 10
    evaluation_period: CountFromZero = 0
    evaluation_period_epochs: Positive | None = None
    skip_evaluation: Flag = False
    metrics: tuple[MetricSpec, ...] = ()
    seed: Seed = 0
    weights_to_train: tuple[str, ...] = ()
    weights_not_to_train: tuple[str, ...] = ()
    train_last: CountFromZero | None = None
    unfreeze: tuple[UnfreezeRule, ...] = ()
    freeze_batch_norm: Flag = False
    tied_weights: tuple[str, ...] = ()
    untied_weights: tuple[str, ...] = ()
    immutable_weights: Mapping[str, tuple[tuple[CountFromZero, Number], ...]] = field(default_factory=dict)
    revive_dropout: tuple[DropoutRule, ...] = ()
    mapped_dimensions: Mapping[str, Count] = field(default_factory=dict)
    find_batch_size: Flag = False
    halve_batch_on_out_of_memory: Flag = False
    is_perf_test: Flag = False

    @property
    def known_steps(self) -> int | None:
        """`num_train_steps`, or those of `num_updates`; None of a round in epochs."""
        if self.num_updates is not None:
            return self.num_updates * self.gradient_accumulation_steps
        return self.num_train_steps

    @property
    def steps(self) -> int:
        """`num_train_steps`, known from the beginning or converted from `num_updates` or `num_epochs`.

        Raises:
            ParametersError: the round is given in epochs, and how many samples an epoch has is not known yet.
        """
        if self.known_steps is None:
            raise ParametersError(
                f"training.num_epochs is {self.num_epochs}, and the number of samples is not known here; set "
                "training.num_train_steps instead, or set paths.train_data_dir."
            )
        return self.known_steps


WarmupMode = Annotated[str, OneOf(lambda: [(decay.name, "") for decay in registry.DECAYS])]


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate over the steps of a round.

    Attributes:
        initial_lr: the peak learning rate.
        warmup_mode: {names}: what follows the warm-up; `none` and `piecewise` have none.
        warmup_ratio: fraction of the round's steps over which the rate rises from 0.
        warmup_steps: the same in steps; set one of the two.
        power: exponent of `polynomial`.
        min_ratio: fraction of `initial_lr` at which `linear`, `polynomial`, `cosine`, `cosine_restarts` and `wsd` end.
        cycles: half periods of `cosine_restarts` after the warm-up, each of which begins at `initial_lr`.
        cycle_growth: how many times as long as the cycle before each one is.
        decay_ratio: fraction of the steps after the warm-up over which `wsd` decays, at the end of the round.
        decay_shape: linear, cosine or one_minus_sqrt: how `wsd` decays.
        points: of `piecewise`: [[fraction of the round's steps, fraction of `initial_lr`], ...], joined by straight
            lines; two points at one place make a jump.
    """

    __pydantic_config__ = STRICT
    initial_lr: NonNegative
    warmup_mode: WarmupMode = "none"
    warmup_ratio: Share | None = None
    warmup_steps: CountFromZero | None = None
    power: Positive = 0.5
    min_ratio: Share = 0.0
    cycles: Count = 1
    cycle_growth: Positive = 1.0
    decay_ratio: PositiveShare = 0.1
    decay_shape: DecayShape = "linear"
    points: tuple[tuple[Share, NonNegative], ...] = ()

    @pydantic.field_validator("warmup_mode", mode="before")
    @classmethod
    def _mode(cls, value: Any) -> str:
        return registry.decay_named("none" if value is None else str(value)).name
