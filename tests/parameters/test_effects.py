"""Every field of RUN.yaml has an effect by itself, or says what it needs: without that it is refused or reported."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.parameters.effects import NEEDS, fields_without_effect
from tests.mlp import parameters, start

# Fields that have an effect in every run.
ALWAYS = {
    "paths": {
        "model_path", "model_with_loss_func_path", "model_with_training_graph_path", "optimizer_graph_path",
        "train_data_dir", "output_dir",
    },
    "loss": {"type", "prediction", "label", "class_axis", "reduction", "label_type", "function"},
    "training": {
        "batch_size", "num_train_steps", "num_updates", "num_epochs", "gradient_accumulation_steps",
        "display_loss_steps", "skip_evaluation", "seed", "weights_to_train", "weights_not_to_train",
        "train_last", "unfreeze", "tied_weights", "untied_weights",
        "immutable_weights", "revive_dropout", "mapped_dimensions", "find_batch_size", "is_perf_test",
        "freeze_batch_norm",
        "halve_batch_on_out_of_memory",
    },
    "learning_rate": {"initial_lr", "warmup_mode"},
    "data": {
        "input_name_map", "fixed_inputs", "segment_masks", "shuffle_data", "max_num_files_preload", "last_batch",
        "skip_corrupt_files",
    },
    "optimizer": {
        "training_optimizer_name", "max_norm_clip", "layer_decay", "optimizer_attributes", "optimizer_int_attributes",
    },
    "adapter": {"rank"},
    "augmentation": {"feature"},
    "mixed_precision": {"use_mixed_precision", "float8"},
    "frozen_weights": {"dtype"},
    "speed": {"fuse", "join_layers", "compile", "channels_last", "update_in_backward"},
    "distributed": {
        "layout", "data_parallel_size", "horizontal_parallel_size", "pipeline_parallel_size",
        "context_parallel_size", "expert_capacity_factor", "max_restarts",
    },
    "averaging": {"kind"},
    "pruning": {"pattern"},
    "quantize_aware": {"weights"},
    "distillation": {"teacher_path"},
    "recompute": {"memory_budget", "cheap_activations"},
    "checkpoint": {"checkpoints_dir", "checkpoint_to_load_path"},
    "early_stopping": {"patience"},
    "on_bad_loss": {"skip"},
    "tensorboard": {"log_dir", "scalar_names", "histogram_names", "norm_names"},
    "wandb": {"project"},
    "mlflow": {"experiment"},
    "aim": {"experiment"},
    "profiler": {"first_step", "last_step"},
    "machine": {"execution_provider", "threads", "deterministic", "memory_gb", "check_weights_period"},
    "limits": {
        "model_gb", "nodes", "nesting", "tensor_axes", "shape_numbers", "constant_gb", "array_gb",
        "template_seconds", "template_characters",
        "preparation_seconds",
    },
}  # fmt: skip

# Fields that `checks` or the run refuse by themselves where they would do nothing -> such a run, and words of it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "loss.ignore_index": ({"loss": {"type": "mean_squared_error", "ignore_index": 0}}, "belongs to softmax"),
    "loss.class_weights": ({"loss": {"type": "mean_squared_error", "class_weights": [1.0]}}, "belongs to softmax"),
    "loss.dense_labels": ({"loss": {"type": "mean_squared_error", "dense_labels": True}}, "belongs to softmax"),
    "loss.from_logits": ({"loss": {"type": "mean_squared_error", "from_logits": True}}, "belongs to binary"),
    "loss.label_smoothing": (
        {"loss": {"type": "l1", "label_smoothing": 0.1}}, "belongs to softmax_cross_entropy or dpo,",
    ),
    "loss.focal_gamma": ({"loss": {"type": "l1", "focal_gamma": 1.0}}, "belongs to focal or softmax_focal,"),
    "loss.focal_alpha": ({"loss": {"type": "l1", "focal_alpha": None}}, "belongs to focal,"),
    "loss.dice_background": ({"loss": {"type": "l1", "dice_background": False}}, "belongs to dice or binary_dice,"),
    "loss.dice_per_channel": ({"loss": {"type": "l1", "dice_per_channel": True}}, "belongs to binary_dice,"),
    "loss.dice_smoothing": ({"loss": {"type": "l1", "dice_smoothing": 1.0}}, "belongs to dice or binary_dice,"),
    "loss.temperature": ({"loss": {"type": "l1", "temperature": 1.0}}, "belongs to info_nce,"),
    "loss.logit_scale": ({"loss": {"type": "l1", "logit_scale": "s"}}, "belongs to info_nce,"),
    "loss.normalize_embeddings": ({"loss": {"type": "l1", "normalize_embeddings": False}}, "belongs to info_nce,"),
    "loss.symmetric": ({"loss": {"type": "l1", "symmetric": False}}, "belongs to info_nce,"),
    "loss.dpo_beta": ({"loss": {"type": "l1", "dpo_beta": 1.0}}, "belongs to dpo,"),
    "loss.reference_model_path": ({"loss": {"type": "l1", "reference_model_path": "r.onnx"}}, "belongs to dpo,"),
    "loss.reference_log_probabilities": (
        {"loss": {"type": "l1", "reference_log_probabilities": "r"}}, "belongs to dpo,",
    ),
    **{
        f"adapter.{name}": ({"adapter": {name: value}}, "rank is missing")
        for name, value in {
            "alpha": 1.0, "dropout": 0.1, "targets": ["w"], "rules": [{"weights": "w"}], "rslora": True, "dora": True,
            "start": "pissa", "pissa_iterations": 4, "start_path": "a",
            "learning_rate_ratio": 2.0, "train_too": ["w"], "outputs": ["peft"],
            "module_prefix": "model.",
        }.items()
    },
    "loss.blank": ({"loss": {"type": "mean_squared_error", "blank": 0}}, "belongs to ctc"),
    "loss.time_axis": ({"loss": {"type": "mean_squared_error", "time_axis": 1}}, "belongs to ctc"),
    "loss.prediction_lengths": ({"loss": {"type": "mean_squared_error", "prediction_lengths": "n"}}, "belongs to ctc"),
    "loss.zero_infinity": ({"loss": {"type": "mean_squared_error", "zero_infinity": True}}, "belongs to ctc"),
    "loss.graph": ({"loss": {"type": "mean_squared_error", "graph": "x.onnx"}}, "belongs to graph"),
    "loss.graph_inputs": ({"loss": {"type": "mean_squared_error", "graph_inputs": {"a": "b"}}}, "belongs to graph"),
    "loss.graph_output": ({"loss": {"type": "mean_squared_error", "graph_output": "y"}}, "belongs to graph"),
    "learning_rate.warmup_ratio": ({"learning_rate": {"warmup_ratio": 0.5}}, "warmup_mode is none"),
    "learning_rate.warmup_steps": ({"learning_rate": {"warmup_steps": 2}}, "warmup_mode is none"),
    "mixed_precision.use_bfloat16": ({"mixed_precision": {"use_bfloat16": True}}, "use_mixed_precision is false"),
    "mixed_precision.loss_scale": ({"mixed_precision": {"loss_scale": 8.0}}, "use_mixed_precision is false"),
    "speed.cuda_graphs": ({"speed": {"cuda_graphs": True, "compile": False}}, "speed.compile is false"),
    "distributed.expert_parallel_size": ({"distributed": {"expert_parallel_size": 2}}, "of which there are 1"),
    "distributed.zero_offload_to_cpu": ({"distributed": {"zero_offload_to_cpu": True}}, "zero_stage is 0"),
    "distributed.zero_group_size": ({"distributed": {"zero_group_size": 2}}, "zero_stage is 0"),
    "distributed.sync_every_updates": ({"distributed": {"sync_every_updates": 2}}, "a worker is 1 of 1 replicas"),
    "distributed.sum_in_fp32": ({"distributed": {"sum_in_fp32": True}}, "gradients travel in fp32"),
    "distributed.sequence_parallel": ({"distributed": {"sequence_parallel": True}}, "horizontal_parallel_size is 1"),
    "distributed.allow_whole_layers": ({"distributed": {"allow_whole_layers": True}}, "horizontal_parallel_size is 1"),
    "distributed.pipeline_partition_cut_list": (
        {"distributed": {"pipeline_partition_cut_list": "a"}}, "pipeline_parallel_size is 1",
    ),
    "distributed.op_id_to_stage": ({"distributed": {"op_id_to_stage": {"a": 0}}}, "pipeline_parallel_size is 1"),
    "distributed.pipeline_stage_paths": (
        {"distributed": {"pipeline_stage_paths": ["a"]}}, "pipeline_parallel_size is 1",
    ),
    "distributed.stage_memory_gb": ({"distributed": {"stage_memory_gb": 1.0}}, "pipeline_parallel_size is 1"),
    "distributed.elastic": ({"distributed": {"elastic": True}}, "checkpoint.checkpoints_dir is missing"),
    "distributed.stages_per_rank": ({"distributed": {"stages_per_rank": 3}}, "but 1F1B has 1"),
    "checkpoint.checkpoint_period": ({"checkpoint": {"checkpoint_period": 2}}, "checkpoints_dir is missing"),
    "checkpoint.keep_best": ({"checkpoint": {"keep_best": True}}, "checkpoints_dir is missing"),
    "on_bad_loss.spike_threshold": ({"on_bad_loss": {"spike_threshold": 9.0}}, "checkpoints_dir is not"),
    "checkpoint.keep_every": ({"checkpoint": {"keep_every": 2}}, "checkpoints_dir is missing"),
    "checkpoint.memory_period_updates": ({"checkpoint": {"memory_period_updates": 2}}, "checkpoints_dir is missing"),
    "checkpoint.export": ({"checkpoint": {"export": "best"}}, "keep_best is false"),
}  # fmt: skip

# For each field that needs another: a value that is set for nothing, and what else makes it so.
SKIPPED: dict[str, Any] = {"training": {"skip_evaluation": True}}
SET: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "paths.eval_model_path": (Path("e.onnx"), SKIPPED),
    "paths.test_data_dir": (Path("test"), SKIPPED),
    "training.accumulate_as": ("mean", {}),
    "training.eval_batch_size": (2, SKIPPED),
    "training.evaluation_period": (2, SKIPPED),
    "training.evaluation_period_epochs": (2.0, SKIPPED),
    "training.metrics": (("accuracy",), SKIPPED),
    "learning_rate.power": (2.0, {}),
    "learning_rate.min_ratio": (0.1, {}),
    "learning_rate.cycles": (3, {}),
    "learning_rate.cycle_growth": (2.0, {}),
    "learning_rate.decay_ratio": (0.2, {}),
    "learning_rate.decay_shape": ("cosine", {}),
    "learning_rate.points": (((0.5, 1.0),), {}),
    "distillation.alpha": (0.25, {}),
    "distillation.pairs": ({"a": "b"}, {}),
    "distillation.teacher_logits": ("logits", {}),
    "distillation.temperature": (4.0, {}),
    "distillation.pairs_weight": (4.0, {}),
    "quantize_aware.activations": ("none", {}),
    "quantize_aware.per_channel": (False, {}),
    "quantize_aware.observer": ("moving_average", {}),
    "pruning.sparsity": (0.5, {}),
    "pruning.initial_sparsity": (0.5, {}),
    "pruning.end_update": (5, {}),
    "pruning.every_updates": (5, {}),
    "pruning.start_update": (5, {}),
    "pruning.weights": (("w",), {}),
    "averaging.decay": (0.5, {}),
    "averaging.start_update": (5, {}),
    "averaging.every_updates": (5, {}),
    "averaging.export": ("last", {}),
    "data.test_data": ("partitioned", {}),
    "speed.fusions_off": (("gelu",), {"speed": {"fuse": False}}),
    "frozen_weights.block_size": (32, {}),
    "distributed.ranks": (4, {}),
    "distributed.zero_stage": (1, {}),
    "distributed.enable_adasum": (True, {}),
    "distributed.replicas_per_worker": (2, {}),
    "distributed.outer_optimizer": ("sgd", {}),
    "distributed.outer_lr": (0.5, {}),
    "distributed.outer_momentum": (0.5, {}),
    "distributed.reduction_type": ("bf16", {}),
    "distributed.synchronize_batch_norm": (True, {}),
    "distributed.pipeline_schedule": ("GPipe", {}),
    "distributed.use_nccl": (False, {}),
    "distributed.timeout_seconds": (5.0, {}),
    "distributed.start_timeout_seconds": (5.0, {}),
    "recompute.segments": (True, {"recompute": {"memory_budget": 0.5}}),
    "recompute.attention": (True, {"recompute": {"memory_budget": 0.5}}),
    "recompute.number_recompute_layers": (1, {}),
    "checkpoint.max_num_checkpoints": (3, {}),
    "checkpoint.blocking": (True, {}),
    "checkpoint.memory_dir": (Path("memory"), {}),
    "checkpoint.if_damaged": ("earlier", {}),
    "checkpoint.on_sigusr1": ("stop", {}),
    "checkpoint.grace_seconds": (30.0, {}),
    "distributed.slow_rank_period": (5, {}),
    "distributed.slow_rank_ratio": (2.0, {}),
    "machine.check_computation_period": (5, {}),
    "on_bad_loss.spike_window": (64, {}),
    "on_bad_loss.max_rollbacks": (1, {}),
    "early_stopping.metric": ("accuracy", {}),
    "early_stopping.mode": ("max", {}),
    "early_stopping.min_delta": (0.5, {}),
    "wandb.entity": ("team", {}),
    "wandb.name": ("first", {}),
    "wandb.mode": ("offline", {}),
    "mlflow.tracking_uri": ("sqlite:///m.db", {}),
    "mlflow.name": ("first", {}),
    "aim.repo": ("runs", {}),
    "aim.name": ("first", {}),
    **{
        f"augmentation.{field}": (0.5, {})
        for field in (
            "horizontal_flip",
            "vertical_flip",
            "smallest_crop",
            "brightness",
            "contrast",
            "saturation",
            "mixup_alpha",
        )
    },
    "head.num_classes": (3, {"loss": {"type": "bert", "prediction": None, "label": None}}),
    "augmentation.channels": ("last", {}),
    "augmentation.crop_padding": (4, {}),
    "augmentation.mean": ((0.5,), {}),
    "augmentation.std": ((0.5,), {}),
    "profiler.trace_dir": (Path("profile"), {}),
    "profiler.top_nodes": (5, {}),
    **{field: ("other", {}) for field in NEEDS if field.startswith("loss.")},
}


def test_every_field_has_one_statement() -> None:
    fields = {
        f"{section}.{one.name}"
        for section, kind in typing.get_type_hints(Parameters).items()
        if dataclasses.is_dataclass(kind)
        for one in dataclasses.fields(kind)
    }
    always = {f"{section}.{name}" for section, names in ALWAYS.items() for name in names}
    assert always | set(REFUSED) | set(NEEDS) == fields
    assert not always & set(REFUSED)
    assert not (always | set(REFUSED)) & set(NEEDS)
    assert set(SET) == set(NEEDS)


@pytest.mark.parametrize("field", REFUSED)
def test_what_would_do_nothing_is_refused(field: str, tmp_path: Path) -> None:
    sections, words = REFUSED[field]
    with pytest.raises(ParametersError, match=words) as caught:
        parameters(tmp_path, **sections)
    assert field.split(".")[1] in str(caught.value)


@pytest.mark.parametrize("field", NEEDS)
def test_what_has_no_effect_is_told_or_refused(field: str, tmp_path: Path) -> None:
    value, beside = SET[field]
    section, name = field.split(".")
    sections = {key: dict(values) for key, values in beside.items()}
    asked = dataclasses.replace(
        parameters(tmp_path, **sections),
        **{section: dataclasses.replace(getattr(parameters(tmp_path, **sections), section), **{name: value})},
    )
    found = fields_without_effect(asked, NEEDS[field].is_refused)
    shown = str(value).lower() if isinstance(value, bool) else value
    assert found == [
        f"{field} is {shown}, but it has an effect only {NEEDS[field].text}. Change that, or remove {field}."
    ]
    assert fields_without_effect(parameters(tmp_path, **sections), NEEDS[field].is_refused) == []


def test_layers_to_recompute_without_recomputing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParametersError) as caught:
        parameters(tmp_path, recompute={"number_recompute_layers": 1})
    assert str(caught.value) == (
        "recompute.number_recompute_layers is 1, but it has an effect only with recompute.segments or "
        "recompute.attention, whose layers it limits, and without recompute.memory_budget. Change that, or "
        "remove recompute.number_recompute_layers."
    )
    parameters(tmp_path, recompute={"number_recompute_layers": 1, "segments": True})


def test_a_run_reports_what_has_no_effect(tmp_path: Path) -> None:
    _, recorder = start(tmp_path, profiler={"top_nodes": 5}, learning_rate={"power": 2.0})
    assert recorder.messages == [
        "learning_rate.power is 2.0, but it has an effect only with learning_rate.warmup_mode polynomial. Change that, "
        "or remove learning_rate.power.",
        "profiler.top_nodes is 5, but it has an effect only with profiler.first_step and last_step. Change that, or "
        "remove profiler.top_nodes.",
    ]
