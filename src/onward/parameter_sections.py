"""The sections of RUN.yaml as frozen dataclasses: every field with its type, its default and its meaning.

One field has one meaning and one unit: *steps* are forward/backward passes, *updates* are weight updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from onward.parameter_types import (
    STRICT,
    Count,
    CountFromZero,
    Decay,
    FiniteNumber,
    Flag,
    NonNegative,
    Number,
    Positive,
    Ratio,
    Seed,
    Share,
    WholeNumber,
)

LossType = Literal[
    "softmax_cross_entropy", "mean_squared_error", "binary_cross_entropy", "l1", "bert", "graph", "output"
]
FusionName = Literal[
    "attention",
    "normalization",
    "gelu",
    "swish",
    "swiglu",
    "rotary_embedding",
    "cross_entropy",
    "linear",
    "joined_relu",
]
OptimizerName = Literal["SGDOptimizer", "Adam", "AdamW", "Lamb"]


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Files and folders. In a RUN.yaml they are relative to that file.

    Attributes:
        model_path: the ONNX model to train; needed unless `distributed.pipeline_stage_paths` names it stage by stage.
        eval_model_path: another graph with the same weights, used for evaluation; absent: the same graph.
        model_with_loss_func_path: where to write the model with its loss; absent: not written.
        model_with_training_graph_path: where to write loss and gradients as an ONNX graph; absent: not written.
        optimizer_graph_path: where to write the weight update as an ONNX graph; absent: not written.
        train_data_dir, test_data_dir: folders of `.pb` shards.
        output_dir: where the trained model goes, as `<model>_trained.onnx` (`joined_trained.onnx` without a
            `model_path`); absent: it is not written.
    """

    __pydantic_config__ = STRICT
    model_path: Path | None = None
    eval_model_path: Path | None = None
    model_with_loss_func_path: Path | None = None
    model_with_training_graph_path: Path | None = None
    optimizer_graph_path: Path | None = None
    train_data_dir: Path | None = None
    test_data_dir: Path | None = None
    output_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """How shards become batches.

    Attributes:
        input_name_map: feature name in the files -> input of the model (or label); "" leaves a feature out; those not
            listed have the same name in both.
        shuffle_data: draw a new order of files, and of samples within a file, for every epoch from the seed.
        max_num_files_preload: files held in memory at most, the current one included.
        test_data: `replicated`: every rank evaluates all test data; `partitioned`: each rank a part.
        last_batch: `wrap`: the last batch of an epoch is filled with the next epoch's first samples;
            `drop`: it is left out, and counted; `short`: it is smaller.
        skip_corrupt_files: skip files that cannot be read, with a count, instead of stopping.
    """

    __pydantic_config__ = STRICT
    input_name_map: Mapping[str, str] = field(default_factory=dict)
    shuffle_data: Flag = False
    max_num_files_preload: Count = 2
    test_data: Literal["replicated", "partitioned"] = "replicated"
    last_batch: Literal["wrap", "drop", "short"] = "wrap"
    skip_corrupt_files: Flag = False


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What training minimizes.

    Attributes:
        type: `softmax_cross_entropy`, `mean_squared_error`, `binary_cross_entropy`, `l1`, `bert`,
            `graph` (a loss model of the user's own) or `output` (an output of the model is the loss already).
        prediction: the output of the model that is compared; for `output`, the loss itself.
        label: the feature of the data that it is compared with.
        class_axis: axis of the classes in the prediction (softmax_cross_entropy).
        ignore_index: label value that does not count (softmax_cross_entropy; bert, where it is 0 if absent).
        class_weights: one weight a class (softmax_cross_entropy; bert, for the masked tokens).
        reduction: `mean` or `sum`.
        from_logits: the prediction is logits, not probabilities (binary_cross_entropy).
        dense_labels: labels are float probabilities in the prediction's shape (softmax_cross_entropy).
        label_type: element type of the label in ONNX's spelling ("int32"); absent: int64 for classes, else float.
        graph: path of an ONNX loss model (type `graph`).
        graph_inputs: input of the loss model -> output of the model or feature of the data.
        graph_output: output of the loss model that is the loss; absent: its only or first one.
        masked_lm_prediction, next_sentence_prediction: the two outputs of a BERT (type `bert`).
        masked_lm_positions, masked_lm_ids, next_sentence_label: the three features they are compared with.
    """

    __pydantic_config__ = STRICT
    type: LossType
    prediction: str | None = None
    label: str | None = None
    class_axis: WholeNumber = -1
    ignore_index: WholeNumber | None = None
    class_weights: tuple[FiniteNumber, ...] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    from_logits: Flag = False
    dense_labels: Flag = False
    label_type: str | None = None
    graph: Path | None = None
    graph_inputs: Mapping[str, str] = field(default_factory=dict)
    graph_output: str | None = None
    masked_lm_prediction: str = "output1"
    next_sentence_prediction: str = "output2"
    masked_lm_positions: str = "masked_lm_positions"
    masked_lm_ids: str = "masked_lm_ids"
    next_sentence_label: str = "next_sentence_labels"


@dataclass(frozen=True, kw_only=True)
class DropoutRule:
    """Where dropout that an export left out belongs, and how much of it.

    Attributes:
        ratio: share of the elements that are set to zero in training.
        after_operators: operator types; dropout follows every node of them (`Softmax`: attention dropout).
        after_values: names or `*`-patterns of values that dropout follows.
    """

    __pydantic_config__ = STRICT
    ratio: Ratio
    after_operators: tuple[str, ...] = ()
    after_values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long, how much at a time, and which weights.

    Attributes:
        batch_size: samples in one micro-batch of one replica.
        eval_batch_size: samples in one batch of evaluation; absent: `batch_size`.
        num_train_steps: forward/backward passes of a round.
        gradient_accumulation_steps: passes whose mean gradient makes one weight update.
        display_loss_steps: weight updates between two displayed losses.
        evaluation_period: steps between two evaluations; 0: only at the end.
        skip_evaluation: never evaluate.
        seed: of dropout, shuffling and everything else that is drawn.
        weights_to_train: exact initializer names or `*`-patterns; empty: all that can.
        weights_not_to_train: exact names or patterns taken out again.
        tied_weights: patterns of all-equal initializers shared by several layers that stay shared.
        immutable_weights: operator -> [[input index, value]]: rank-0 constants that never train.
        revive_dropout: rules, each `{ratio, after_operators, after_values}`: dropout that an export left out.
        mapped_dimensions: symbolic dimension of the model -> its size.
        find_batch_size: find the largest micro-batch that fits the memory of a rank (`machine.memory_gb`), by forecast
            and trial. An update stays `batch_size` times `gradient_accumulation_steps` samples of each replica, and
            what is counted in steps is converted; the run says how. A resumed run keeps what it found.
        is_perf_test: train on random batches made from the model's inputs, and say how fast and how large that is;
            nothing is saved or evaluated, and no data are needed.
    """

    __pydantic_config__ = STRICT
    batch_size: Count
    num_train_steps: Count
    eval_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1
    display_loss_steps: Count = 10
    evaluation_period: CountFromZero = 0
    skip_evaluation: Flag = False
    seed: Seed = 0
    weights_to_train: tuple[str, ...] = ()
    weights_not_to_train: tuple[str, ...] = ()
    tied_weights: tuple[str, ...] = ()
    immutable_weights: Mapping[str, tuple[tuple[CountFromZero, Number], ...]] = field(default_factory=dict)
    revive_dropout: tuple[DropoutRule, ...] = ()
    mapped_dimensions: Mapping[str, Count] = field(default_factory=dict)
    find_batch_size: Flag = False
    is_perf_test: Flag = False


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate over the steps of a round.

    Attributes:
        initial_lr: the rate at its highest.
        warmup_mode: `none`, `constant`, `linear`, `polynomial` or `cosine`: what follows the warm-up; `none` has none.
        warmup_ratio: share of the round's steps over which the rate rises from 0.
        warmup_steps: the same in steps; give one of the two.
        power: exponent of `polynomial`.
    """

    __pydantic_config__ = STRICT
    initial_lr: NonNegative
    warmup_mode: str = "none"
    warmup_ratio: Share | None = None
    warmup_steps: CountFromZero | None = None
    power: Positive = 0.5

    @pydantic.field_validator("warmup_mode", mode="before")
    @classmethod
    def _mode(cls, value: Any) -> str:
        names = {"poly": "polynomial"}
        mode = "none" if value is None else str(value).lower()
        mode = names.get(mode, mode)
        if mode not in ("none", "constant", "linear", "polynomial", "cosine"):
            raise ValueError("expected none, constant, linear, polynomial or cosine")
        return mode


@dataclass(frozen=True, kw_only=True)
class AttributeRule:
    """Optimizer attributes of the weights that match; a later rule wins over an earlier one, attribute by attribute.

    Attributes:
        weights: a name or `*`-pattern, or several.
        alpha, beta: decay of the first and second moment (Adam, AdamW, Lamb; 0.9, 0.999).
        lambda_: weight decay (YAML: `lambda`; 0). Adam and SGD add it to the gradient; AdamW and Lamb decouple it.
        epsilon: 1e-8; Lamb 1e-6.
        momentum, nesterov: of SGD (0, false).
        do_bias_correction: of Adam, AdamW (true) and Lamb (false).
        ratio_min, ratio_max: bounds of Lamb's trust ratio (none).
        learning_rate_factor: multiplies the learning rate for these weights (1).
    """

    __pydantic_config__ = STRICT
    weights: str | tuple[str, ...] = "*"
    alpha: Decay | None = None
    beta: Decay | None = None
    lambda_: Annotated[NonNegative | None, pydantic.Field(alias="lambda")] = None
    epsilon: NonNegative | None = None
    momentum: Decay | None = None
    nesterov: Flag | None = None
    do_bias_correction: Flag | None = None
    ratio_min: Number | None = None
    ratio_max: Number | None = None
    learning_rate_factor: NonNegative | None = None


AttributesOfWeight = Callable[[str], Mapping[str, Any]]
"""In Python, `optimizer_attributes` may be a function of the weight's name that returns its attributes."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients become updates.

    Attributes:
        training_optimizer_name: SGDOptimizer, Adam, AdamW or Lamb.
        max_norm_clip: the global gradient norm is clipped to this; absent: no clipping.
        optimizer_attributes: rules, or in Python a function of the weight's name.
    """

    __pydantic_config__ = STRICT
    training_optimizer_name: OptimizerName = "SGDOptimizer"
    max_norm_clip: Positive | None = None
    optimizer_attributes: tuple[AttributeRule, ...] | AttributesOfWeight = ()

    @pydantic.field_validator("training_optimizer_name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        names = {"sgd": "SGDOptimizer", "sgdoptimizer": "SGDOptimizer", "adamw": "AdamW", "adamwoptimizer": "AdamW"}
        names |= {"adam": "Adam", "adamoptimizer": "Adam", "lamb": "Lamb", "lamboptimizer": "Lamb"}
        return names.get(str(value).lower(), value)


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Computing in 16 bits with fp32 masters.

    Attributes:
        use_mixed_precision: compute in fp16, or bf16 with `use_bfloat16`.
        use_bfloat16: bf16 needs no loss scale.
        loss_scale: of fp16; 0: dynamic, from 65536; else fixed.
        float8: multiply activations and weights in 8-bit floats where both sizes of a weight divide by 16; everything
            else computes as without it, and weights and moments stay in fp32. Needs an Ada, Hopper or newer GPU;
            on a CPU it is for trying out.
    """

    __pydantic_config__ = STRICT
    use_mixed_precision: Flag = False
    use_bfloat16: Flag = False
    loss_scale: NonNegative = 0.0
    float8: Flag = False


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What makes a step faster or smaller without changing what it computes.

    Attributes:
        fuse: compute attention, norms, activations, rotary embeddings and the last linear layer with its loss in one
            call each where the model writes them out in many nodes; `onward inspect` lists them. What is exported
            never contains them.
        fusions_off: fusions to leave out: `attention`, `normalization`, `gelu`, `swish`, `swiglu`,
            `rotary_embedding`, `cross_entropy`, `linear`, `joined_relu`.
        join_layers: where nothing is compiled, linear layers that read the same (queries, keys and values; gate and
            value) are one function that adds up the gradient of what they read in place. Their weights stay their
            own.
        compile: whether torch compiles the code of each segment of the model, one piece for equal segments. `auto`:
            on GPUs, not on CPUs; a note says what was chosen and why. After eight different shapes of batches, others
            run uncompiled.
        channels_last: convolve images with the channels of a pixel side by side in memory, which is faster on CPUs, and
            on GPUs in 16 bits; compiled code lies as torch's compiler wants it.
        cuda_graphs: record the compiled training passes as CUDA graphs and replay them. For one process whose batches
            have one shape, without accumulation and recompute. Not tried on a GPU yet.
    """

    __pydantic_config__ = STRICT
    fuse: Flag = True
    fusions_off: tuple[FusionName, ...] = ()
    join_layers: Flag = True
    compile: Literal["auto", True, False] = "auto"
    channels_last: Flag = True
    cuda_graphs: Flag = False

    @pydantic.field_validator("compile", mode="before")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        if value == "auto" or isinstance(value, bool):
            return value
        raise ValueError("expected auto, true or false")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming.

    Attributes:
        checkpoints_dir: folder of checkpoints; absent: none are written.
        checkpoint_period: weight updates between two checkpoints; 0: only at the end of a round.
        max_num_checkpoints: how many are kept.
        checkpoint_to_load_path: a checkpoint, or a folder of them, from which a run starts that has none of its own;
            what `checkpoints_dir` holds comes first, so that the same command goes on after a stop.
        blocking: stand still until a checkpoint is on disk.
    """

    __pydantic_config__ = STRICT
    checkpoints_dir: Path | None = None
    checkpoint_period: CountFromZero = 0
    max_num_checkpoints: Count = 1
    checkpoint_to_load_path: Path | None = None
    blocking: Flag = False


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """What goes to TensorBoard, beside the standard scalars.

    Attributes:
        log_dir: folder of event files and of `metrics.jsonl`; absent: neither is written.
        scalar_names, histogram_names, norm_names: values of the graph, weights, or gradients (`<weight>_grad`);
            `*`-patterns match weights and gradients.
    """

    __pydantic_config__ = STRICT
    log_dir: Path | None = None
    scalar_names: tuple[str, ...] = ()
    histogram_names: tuple[str, ...] = ()
    norm_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """Profiling a range of steps.

    Attributes:
        first_step, last_step: steps of the round to profile, the last included; absent: none.
        trace_dir: folder of the trace and the per-node table; absent: `profile` in `output_dir`.
        top_nodes: rows of the table that are printed.
    """

    __pydantic_config__ = STRICT
    first_step: Count | None = None
    last_step: Count | None = None
    trace_dir: Path | None = None
    top_nodes: Count = 20


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The part of `Environment` that a RUN.yaml may set.

    Attributes:
        execution_provider: `CPU` or `CUDA`; absent: CUDA where there is a GPU.
        threads: CPU threads of one process; absent: torch's choice.
        deterministic: refuse operators whose result depends on timing.
        memory_gb: memory for the tensors of one process in GB (10^9 bytes), for `training.find_batch_size` and the
            verdict of `onward plan`; absent: nine tenths of what its GPU, or its share of the machine, has free.
    """

    __pydantic_config__ = STRICT
    execution_provider: Literal["CPU", "CUDA"] | None = None
    threads: Count | None = None
    deterministic: Flag = False
    memory_gb: Positive | None = None
