"""RUN.yaml and `Parameters`: what loads, what the defaults are, what overrides, later rounds and Python may say."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from onward.errors import ParametersError
from onward.parameters import (
    AttributeRule,
    Checkpoint,
    Data,
    LearningRate,
    Loss,
    Machine,
    MixedPrecision,
    Optimizer,
    Parameters,
    Paths,
    Profiler,
    Speed,
    TensorBoard,
    Training,
    check,
)
from onward.parameters.adapter import Adapter
from onward.parameters.augmentation import Augmentation
from onward.parameters.averaging import Averaging
from onward.parameters.distillation import Distillation
from onward.parameters.distributed import Distributed, Recompute
from onward.parameters.evaluation import EarlyStopping, OnBadLoss
from onward.parameters.frozen_weights import FrozenWeights
from onward.parameters.head import Head
from onward.parameters.limits import Limits
from onward.parameters.pruning import Pruning
from onward.parameters.quantize_aware import QuantizeAware
from onward.parameters.trackers import Aim, Mlflow, Wandb
from onward.runner import TrainingRunner

DESIGN = """\
paths:
  model_path: gpt2.onnx             # also: eval_model_path, model_with_loss_func_path
  train_data_dir: data/train        # shards, sorted by name
  test_data_dir: data/test
  output_dir: out                   # out/gpt2_trained.onnx
data: {input_name_map: {tokens: input_ids}, shuffle_data: true, max_num_files_preload: 2, test_data: replicated, last_batch: wrap}
loss:
  type: softmax_cross_entropy       # classes on the last axis (class_axis: another)
  prediction: logits                # an output of the model
  label: labels                     # a feature of the data
training: {batch_size: 8, eval_batch_size: 8, num_train_steps: 400, gradient_accumulation_steps: 1, display_loss_steps: 10, evaluation_period: 100, seed: 0}
learning_rate: {initial_lr: 6.0e-4, warmup_mode: cosine, warmup_steps: 20}
optimizer:
  training_optimizer_name: AdamW    # SGDOptimizer (default), Adam, AdamW, Lamb
  max_norm_clip: 1.0                # absent: no clipping
  optimizer_attributes:             # later rules win
    - {weights: "*", alpha: 0.9, beta: 0.95, lambda: 0.1, epsilon: 1.0e-8}
    - {weights: ["*bias*", "*norm*"], lambda: 0.0}
mixed_precision: {use_mixed_precision: true, use_bfloat16: true, loss_scale: 0.0}
distributed: {data_parallel_size: 1, horizontal_parallel_size: 1, pipeline_parallel_size: 1, zero_stage: 0, enable_adasum: false, pipeline_partition_cut_list: null, use_nccl: null}
recompute: {}                       # whole segments, attention only, or a memory budget
checkpoint: {checkpoints_dir: out/checkpoints, checkpoint_period: 100, max_num_checkpoints: 3, checkpoint_to_load_path: null}
tensorboard: {log_dir: out/tensorboard, scalar_names: [], histogram_names: [], norm_names: []}
profiler: {}
"""  # noqa: E501
"""The example of the design, every field of it."""

SMALL = """\
paths: {model_path: m.onnx}
loss: {type: l1, prediction: p, label: t}
training: {batch_size: 8, num_train_steps: 4}
learning_rate: {initial_lr: 0.1}
"""


def load(folder: Path, text: str, overrides: Mapping[str, str] | None = None) -> Parameters:
    path = folder / "run.yaml"
    path.write_text(text)
    return Parameters.load(path, overrides)


def small() -> dict[str, Any]:
    return {
        "paths": Paths(model_path=Path("m.onnx")),
        "loss": Loss(type="l1", prediction="p", label="t"),
        "training": Training(batch_size=8, num_train_steps=4),
        "learning_rate": LearningRate(initial_lr=0.1),
    }


def test_the_example_of_the_design_loads_as_it_stands(tmp_path: Path) -> None:
    parameters = load(tmp_path, DESIGN)
    assert parameters == Parameters(
        paths=Paths(
            model_path=tmp_path / "gpt2.onnx",
            train_data_dir=tmp_path / "data" / "train",
            test_data_dir=tmp_path / "data" / "test",
            output_dir=tmp_path / "out",
        ),
        data=Data(input_name_map={"tokens": "input_ids"}, shuffle_data=True),
        loss=Loss(type="softmax_cross_entropy", prediction="logits", label="labels"),
        training=Training(batch_size=8, eval_batch_size=8, num_train_steps=400, evaluation_period=100),
        learning_rate=LearningRate(initial_lr=0.0006, warmup_mode="cosine", warmup_steps=20),
        optimizer=Optimizer(
            training_optimizer_name="AdamW",
            max_norm_clip=1.0,
            optimizer_attributes=(
                AttributeRule(weights="*", alpha=0.9, beta=0.95, lambda_=0.1, epsilon=1e-8),
                AttributeRule(weights=("*bias*", "*norm*"), lambda_=0.0),
            ),
        ),
        mixed_precision=MixedPrecision(use_mixed_precision=True, use_bfloat16=True),
        checkpoint=Checkpoint(
            checkpoints_dir=tmp_path / "out" / "checkpoints", checkpoint_period=100, max_num_checkpoints=3
        ),
        tensorboard=TensorBoard(log_dir=tmp_path / "out" / "tensorboard"),
    )


DEFAULTS: dict[type, dict[str, Any]] = {
    Adapter: {
        "rank": None,
        "alpha": None,
        "dropout": 0.0,
        "targets": (),
        "rules": (),
        "rslora": False,
        "dora": False,
        "pissa_iterations": None,
        "start": "kaiming",
        "start_path": None,
        "learning_rate_ratio": 1.0,
        "train_too": (),
        "outputs": ("merged",),
        "module_prefix": "",
    },
    Head: {"num_classes": None},
    FrozenWeights: {"dtype": "as_stored", "block_size": 64},
    Pruning: {
        "pattern": None,
        "sparsity": None,
        "initial_sparsity": 0.0,
        "start_update": 1,
        "end_update": None,
        "every_updates": 1,
        "weights": (),
    },
    QuantizeAware: {"weights": None, "activations": "uint8", "per_channel": True, "observer": "lsq"},
    Distillation: {
        "teacher_path": None,
        "teacher_logits": None,
        "temperature": 2.0,
        "alpha": 0.5,
        "pairs": {},
        "pairs_weight": 1.0,
    },
    Augmentation: {
        "feature": None,
        "channels": None,
        "horizontal_flip": 0.0,
        "vertical_flip": 0.0,
        "crop_padding": 0,
        "smallest_crop": 1.0,
        "brightness": 0.0,
        "contrast": 0.0,
        "saturation": 0.0,
        "mixup_alpha": 0.0,
        "mean": (0.0,),
        "std": (1.0,),
    },
    Averaging: {"kind": None, "decay": 0.999, "start_update": 0, "every_updates": 1, "export": "average"},
    Paths: {
        "eval_model_path": None,
        "model_with_loss_func_path": None,
        "model_with_training_graph_path": None,
        "optimizer_graph_path": None,
        "train_data_dir": None,
        "test_data_dir": None,
        "output_dir": None,
    },
    Data: {
        "input_name_map": {},
        "fixed_inputs": {},
        "segment_masks": {},
        "shuffle_data": False,
        "max_num_files_preload": 2,
        "test_data": "replicated",
        "last_batch": "wrap",
        "skip_corrupt_files": False,
    },
    Loss: {
        "prediction": None,
        "label": None,
        "class_axis": -1,
        "blank": None,
        "time_axis": None,
        "prediction_lengths": None,
        "zero_infinity": None,
        "ignore_index": None,
        "class_weights": None,
        "reduction": "mean",
        "from_logits": False,
        "dense_labels": False,
        "label_smoothing": 0.0,
        "focal_gamma": 2.0,
        "focal_alpha": 0.25,
        "dice_smoothing": 1e-5,
        "dice_background": True,
        "dice_per_channel": False,
        "paired_prediction": None,
        "temperature": 0.07,
        "logit_scale": None,
        "normalize_embeddings": True,
        "symmetric": True,
        "dpo_beta": 0.1,
        "reference_model_path": None,
        "reference_log_probabilities": None,
        "label_type": None,
        "graph": None,
        "graph_inputs": {},
        "graph_output": None,
        "function": None,
        "masked_lm_prediction": "output1",
        "next_sentence_prediction": "output2",
        "masked_lm_positions": "masked_lm_positions",
        "masked_lm_ids": "masked_lm_ids",
        "next_sentence_label": "next_sentence_labels",
    },
    Training: {
        "num_updates": None,
        "num_epochs": None,
        "metrics": (),
        "evaluation_period_epochs": None,
        "eval_batch_size": None,
        "gradient_accumulation_steps": 1,
        "accumulate_as": "one_batch",
        "display_loss_steps": 10,
        "evaluation_period": 0,
        "skip_evaluation": False,
        "seed": 0,
        "weights_to_train": (),
        "weights_not_to_train": (),
        "train_last": None,
        "unfreeze": (),
        "freeze_batch_norm": False,
        "tied_weights": (),
        "untied_weights": (),
        "immutable_weights": {},
        "revive_dropout": (),
        "mapped_dimensions": {},
        "is_perf_test": False,
        "find_batch_size": False,
        "halve_batch_on_out_of_memory": False,
    },
    LearningRate: {
        "warmup_mode": "none",
        "warmup_ratio": None,
        "warmup_steps": None,
        "power": 0.5,
        "min_ratio": 0.0,
        "cycles": 1,
        "cycle_growth": 1.0,
        "decay_ratio": 0.1,
        "decay_shape": "linear",
        "points": (),
    },
    Optimizer: {
        "training_optimizer_name": "SGDOptimizer",
        "max_norm_clip": None,
        "layer_decay": None,
        "optimizer_attributes": (),
        "optimizer_int_attributes": (),
    },
    MixedPrecision: {"use_mixed_precision": False, "use_bfloat16": False, "loss_scale": 0.0, "float8": False},
    Speed: {
        "fuse": True,
        "fusions_off": (),
        "join_layers": True,
        "compile": "auto",
        "channels_last": True,
        "cuda_graphs": False,
        "update_in_backward": False,
    },
    Distributed: {
        "layout": "manual",
        "ranks": None,
        "data_parallel_size": 1,
        "horizontal_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_parallel_size": 1,
        "expert_capacity_factor": None,
        "zero_stage": 0,
        "zero_group_size": None,
        "sync_every_updates": None,
        "replicas_per_worker": None,
        "outer_optimizer": "nesterov",
        "outer_lr": None,
        "outer_momentum": None,
        "zero_offload_to_cpu": False,
        "enable_adasum": False,
        "reduction_type": "fp32",
        "sum_in_fp32": False,
        "synchronize_batch_norm": False,
        "sequence_parallel": False,
        "allow_whole_layers": False,
        "pipeline_partition_cut_list": None,
        "op_id_to_stage": {},
        "pipeline_stage_paths": (),
        "pipeline_schedule": "1F1B",
        "stages_per_rank": None,
        "stage_memory_gb": None,
        "use_nccl": None,
        "timeout_seconds": 600.0,
        "start_timeout_seconds": 300.0,
        "max_restarts": None,
        "slow_rank_period": 20,
        "slow_rank_ratio": 1.5,
        "elastic": False,
    },
    Recompute: {
        "segments": False,
        "attention": False,
        "number_recompute_layers": 0,
        "memory_budget": None,
        "cheap_activations": True,
    },
    Checkpoint: {
        "checkpoints_dir": None,
        "checkpoint_period": 0,
        "max_num_checkpoints": 1,
        "checkpoint_to_load_path": None,
        "blocking": False,
        "if_damaged": "refuse",
        "on_sigusr1": "save",
        "grace_seconds": None,
        "memory_period_updates": 0,
        "memory_dir": None,
        "keep_best": False,
        "keep_every": 0,
        "export": "last",
    },
    EarlyStopping: {"metric": "loss", "mode": "auto", "patience": None, "min_delta": 0.0},
    OnBadLoss: {"skip": 10, "spike_threshold": None, "spike_window": 128, "max_rollbacks": 3},
    TensorBoard: {"log_dir": None, "scalar_names": (), "histogram_names": (), "norm_names": ()},
    Wandb: {"project": None, "entity": None, "name": None, "mode": "online"},
    Mlflow: {"experiment": None, "tracking_uri": None, "name": None},
    Aim: {"experiment": None, "repo": None, "name": None},
    Profiler: {"first_step": None, "last_step": None, "trace_dir": None, "top_nodes": 20},
    Machine: {
        "execution_provider": None,
        "threads": None,
        "deterministic": False,
        "memory_gb": None,
        "check_weights_period": 100,
        "check_computation_period": 0,
    },
    Limits: {
        "model_gb": 2000.0,
        "nodes": 500_000,
        "nesting": 30,
        "tensor_axes": 64,
        "shape_numbers": 1_000_000,
        "constant_gb": 16.0,
        "array_gb": 16.0,
        "template_seconds": 10.0,
        "template_characters": 250_000_000,
        "preparation_seconds": 3600.0,
    },
}
REQUIRED = {
    Paths: {"model_path"},
    Loss: {"type"},
    Training: {"batch_size", "num_train_steps"},
    LearningRate: {"initial_lr"},
}


def test_every_section_has_the_defaults_that_are_promised(tmp_path: Path) -> None:
    parameters = load(tmp_path, SMALL.replace("{type: l1, prediction: p, label: t}", "{type: bert}"))
    sections = {type(getattr(parameters, f.name)): getattr(parameters, f.name) for f in dataclasses.fields(parameters)}
    del sections[tuple]  # next_rounds
    assert sections.keys() == DEFAULTS.keys()
    for kind, section in sections.items():
        held = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
        assert {k: v for k, v in held.items() if k not in REQUIRED.get(kind, ())} == DEFAULTS[kind], kind
    assert parameters.next_rounds == ()


def test_an_empty_section_is_one_of_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL + "data:\nprofiler: {}\noptimizer: null\n") == load(tmp_path, SMALL)


@pytest.mark.parametrize("text", ["6e-4", "6.0e-4", "6E-4", "0.0006", "+6e-4", "0.06e-2"])
def test_a_rate_is_a_number_with_or_without_a_dot(tmp_path: Path, text: str) -> None:
    rate = load(tmp_path, SMALL.replace("0.1", text)).learning_rate.initial_lr
    assert rate == pytest.approx(0.0006, rel=1e-15)
    assert load(tmp_path, SMALL, {"learning_rate.initial_lr": text}).learning_rate.initial_lr == rate


def test_names_that_look_like_numbers_in_part_stay_names(tmp_path: Path) -> None:
    names = ["1e", "e5", "1e5x", "layer1e-4"]
    parameters = load(tmp_path, SMALL, {"tensorboard.scalar_names": f"[{', '.join(names)}]"})
    assert parameters.tensorboard.scalar_names == tuple(names)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("AdamOptimizer", "Adam"), ("adam", "Adam"), ("LambOptimizer", "Lamb"), ("LAMB", "Lamb"),
        ("SGD", "SGDOptimizer"),
        ("SGDOptimizer", "SGDOptimizer"), ("AdamW", "AdamW"), ("adamw", "AdamW"),
    ],
)  # fmt: skip
def test_spellings_of_optimizers(tmp_path: Path, given: str, name: str) -> None:
    assert load(tmp_path, SMALL, {"optimizer.training_optimizer_name": given}).optimizer.training_optimizer_name == name


@pytest.mark.parametrize(
    ("given", "mode"),
    [("Poly", "polynomial"), ("None", "none"), ("null", "none"), ("Linear", "linear"), ("Cosine", "cosine")],
)
def test_spellings_of_schedules(tmp_path: Path, given: str, mode: str) -> None:
    assert load(tmp_path, SMALL, {"learning_rate.warmup_mode": given}).learning_rate.warmup_mode == mode


# --------------------------------------------------------------------------------------------- overrides and paths


def test_overrides_win_over_the_file_and_make_sections(tmp_path: Path) -> None:
    overrides = {
        "training.batch_size": "16",
        "data.shuffle_data": "true",
        "training.weights_to_train": "[a, b*]",
        "optimizer.optimizer_attributes": "[{weights: '*', momentum: 0.9}]",
        "loss.label": "other",
    }
    parameters = load(tmp_path, SMALL, overrides)
    assert parameters.training == Training(batch_size=16, num_train_steps=4, weights_to_train=("a", "b*"))
    assert parameters.data.shuffle_data is True
    assert parameters.optimizer.optimizer_attributes == (AttributeRule(weights="*", momentum=0.9),)
    assert parameters.loss.label == "other"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("training", "3", "--training names no field; write --section.field, such as --training.batch_size 8."),
        ("training.batch_size", "[", "--training.batch_size '[' is not a YAML value: "),
        ("training.batch_size", "eight", "training.batch_size is 'eight'; expected a whole number."),
        ("training.batchsize", "8", "training.batchsize is unknown. Did you mean 'batch_size'?"),
        ("next_rounds.x", "8", "--next_rounds.x: section 'next_rounds' holds [{}], not fields."),
    ],
)
def test_overrides_that_make_no_sense_are_refused(tmp_path: Path, name: str, value: str, message: str) -> None:
    with pytest.raises(ParametersError) as caught:
        load(tmp_path, SMALL + "next_rounds: [{}]\n", {name: value})
    assert message in str(caught.value)


def test_paths_are_relative_to_the_file_and_overridden_ones_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(elsewhere)
    text = SMALL + "checkpoint: {checkpoints_dir: ../c}\n"
    overrides = {"paths.output_dir": "out", "paths.test_data_dir": "/data/test"}
    parameters = load(tmp_path / "runs", text, overrides)
    assert parameters.paths.model_path == tmp_path / "runs" / "m.onnx"
    assert parameters.paths.output_dir == elsewhere / "out"
    assert parameters.paths.test_data_dir == Path("/data/test")
    assert parameters.checkpoint.checkpoints_dir == tmp_path / "c"
    (tmp_path / "runs" / "deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "deep", target_is_directory=True)
    linked = load(tmp_path, SMALL.replace("m.onnx", "link/../m.onnx")).paths.model_path
    assert linked == tmp_path / "link" / ".." / "m.onnx", "a link before '..' leads elsewhere"
    assert load(tmp_path, SMALL.replace("m.onnx", "~/m.onnx")).paths.model_path == Path("~/m.onnx").expanduser()


# ------------------------------------------------------------------------------------------------------ later rounds


def test_a_later_round_holds_only_what_differs(tmp_path: Path) -> None:
    text = SMALL + (
        "data: {input_name_map: {a: b}, shuffle_data: true}\n"
        "next_rounds:\n"
        "  - {training: {batch_size: 2}, paths: {train_data_dir: long}}\n"
        "  - {learning_rate: {initial_lr: 1e-3, warmup_mode: linear}, data: {input_name_map: {c: d}}}\n"
    )
    parameters = load(tmp_path, text)
    second, third = parameters.next_rounds
    first = dataclasses.replace(parameters, next_rounds=())
    assert second == dataclasses.replace(
        first,
        training=dataclasses.replace(first.training, batch_size=2),
        paths=dataclasses.replace(first.paths, train_data_dir=tmp_path / "long"),
    )
    assert third == dataclasses.replace(
        first,
        learning_rate=LearningRate(initial_lr=1e-3, warmup_mode="linear"),
        data=Data(input_name_map={"c": "d"}, shuffle_data=True),
    )


def test_an_override_holds_for_every_round_that_does_not_say_otherwise(tmp_path: Path) -> None:
    text = SMALL + "next_rounds: [{training: {batch_size: 2}}, {}]\n"
    parameters = load(tmp_path, text, {"training.batch_size": "3"})
    assert [p.training.batch_size for p in (parameters, *parameters.next_rounds)] == [3, 2, 3]


# ------------------------------------------------------------------------------------------------------- from Python


def test_parameters_are_frozen() -> None:
    parameters = Parameters(**small())
    for section in dataclasses.fields(parameters):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(parameters, section.name, None)
        value = getattr(parameters, section.name)
        if dataclasses.is_dataclass(value) and dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, dataclasses.fields(value)[0].name, None)


def test_every_field_is_typed_and_checked() -> None:
    """An object of no meaning is refused in every field of every section."""
    parameters = Parameters(**small())
    for section in dataclasses.fields(parameters):
        value = getattr(parameters, section.name)
        if section.name == "next_rounds":
            continue
        for one in dataclasses.fields(value):
            wrong = dataclasses.replace(
                parameters, **{section.name: dataclasses.replace(value, **{one.name: object()})}
            )
            with pytest.raises(ParametersError, match=rf"^{section.name}\.{one.name} is <object"):
                check(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": Training(batch_size=typing.cast(int, "8"), num_train_steps=4)}, "training.batch_size is '8'"),
        ({"training": Training(batch_size=True, num_train_steps=4)}, "training.batch_size is True"),
        ({"paths": "m.onnx"}, "paths is 'm.onnx'; expected a section with fields."),
        ({"loss": None}, "loss is None; expected a section with fields."),
        ({"optimizer": Optimizer(optimizer_attributes=typing.cast(Any, 3))}, "optimizer.optimizer_attributes is 3"),
        (
            {"training": Training(batch_size=8, num_train_steps=0)},
            "num_train_steps is 0; expected greater than or equal",
        ),
    ],
)
def test_wrong_types_from_python_are_refused_by_the_runner(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParametersError) as caught:
        TrainingRunner(Parameters(**{**small(), **changes}))
    assert message in str(caught.value)


def test_what_python_says_differently_is_made_alike() -> None:
    given: dict[str, Any] = {
        **small(),
        "paths": Paths(model_path=typing.cast(Path, "m.onnx")),
        "optimizer": Optimizer(
            training_optimizer_name=typing.cast(Any, "AdamOptimizer"),
            optimizer_attributes=typing.cast(Any, [AttributeRule(weights=typing.cast(Any, ["a", "b"]), lambda_=1)]),
        ),
        "learning_rate": LearningRate(initial_lr=1, warmup_mode="Poly"),
    }
    parameters = TrainingRunner(Parameters(**given)).parameters
    assert parameters.paths.model_path == Path("m.onnx")
    assert parameters.optimizer.training_optimizer_name == "Adam"
    assert parameters.optimizer.optimizer_attributes == (AttributeRule(weights=("a", "b"), lambda_=1.0),)
    assert parameters.learning_rate == LearningRate(initial_lr=1.0, warmup_mode="polynomial")


def test_the_example_becomes_json_and_the_same_parameters_again(tmp_path: Path) -> None:
    parameters = load(tmp_path, DESIGN)
    mapping = json.loads(json.dumps(parameters.to_mapping(), allow_nan=False))
    assert mapping["optimizer"]["optimizer_attributes"][0]["lambda"] == 0.1
    assert mapping["paths"]["model_path"] == str(tmp_path / "gpt2.onnx")
    assert Parameters.from_mapping(mapping) == parameters


def test_what_json_cannot_hold_is_named() -> None:
    def decay_of(weight: str) -> dict[str, Any]:
        return {"lambda": 0.1}

    rounds = (Parameters(**small()),)
    parameters = Parameters(**small(), optimizer=Optimizer(optimizer_attributes=decay_of), next_rounds=rounds)
    mapping = json.loads(json.dumps(parameters.to_mapping(), allow_nan=False))
    assert mapping["optimizer"]["optimizer_attributes"].startswith("function ")
    assert "decay_of" in mapping["optimizer"]["optimizer_attributes"]
    assert mapping["next_rounds"][0]["training"]["batch_size"] == 8


@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_compile_is_auto_or_a_switch(value: Any) -> None:
    said = f"speed.compile is {value!r}; expected auto, true or false."
    with pytest.raises(ParametersError, match=re.escape(said)):
        Parameters.from_mapping({**small(), "speed": {"compile": value}})
