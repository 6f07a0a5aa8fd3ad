"""Every mistake in a RUN.yaml is refused in a sentence with the field, its value, what was expected and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onward.errors import ParametersError
from onward.optimizers.registry import OPTIMIZERS, optimizer_named
from onward.parameters import AttributeRule, Parameters, check
from onward.parameters.checks import fixed_fields_changed
from onward.parameters.optimizer import SwitchRule

SMALL: dict[str, dict[str, Any]] = {
    "paths": {"model_path": "m.onnx"},
    "loss": {"type": "l1", "prediction": "p", "label": "t"},
    "training": {"batch_size": 8, "num_train_steps": 12},
    "learning_rate": {"initial_lr": 0.1},
}


def make(**changes: Any) -> Parameters:
    """The small parameters with some fields of sections changed; what is no mapping replaces the section."""
    sections: dict[str, Any] = {name: dict(fields) for name, fields in SMALL.items()}
    for name, fields in changes.items():
        sections[name] = {**sections.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return Parameters.from_mapping(sections)


def refusal(**changes: Any) -> str:
    with pytest.raises(ParametersError) as caught:
        make(**changes)
    return str(caught.value)


def load(folder: Path, content: str | bytes) -> Parameters:
    path = folder / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Parameters.load(path)


# -------------------------------------------------------------------------------------------------- the file itself


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", " is empty; expected sections such as `training:`."),
        ("- a\n- b\n", " holds a list; expected sections such as `training:`."),
        ("training: [\n", "line 2, column 1 is not YAML: expected the node content, but found '<stream end>'. Look"),
        ("a:\n\n  b: 1\nc:\n  d: 2\n e: 3\n", "Look at brackets and indentation there and in the lines before."),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1 is not YAML: the key 'a' is given a second time."),
        ("training: {seed: 1, seed: 2}\n", "line 1, column 21 is not YAML: the key 'seed' is given a second time."),
        ("? [a]\n: 1\n", "line 1, column 3 is not YAML: ['a'] cannot be the name of a field."),
        ("a: !!python/object:os.system x\n", "line 1, column 4 is not YAML: could not determine a constructor"),
        (b"\xff\xfea: 1\n", " is not text (UTF-8), as a RUN.yaml is; the model is named in it, as paths.model_path."),
    ],
)
def test_a_file_that_is_no_run(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(ParametersError) as caught:
        load(tmp_path, content)
    assert str(caught.value).startswith(repr(str(tmp_path / "run.yaml")))
    assert words in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match=r"run.yaml' does not exist; give the path of a RUN.yaml\.$"):
        Parameters.load(tmp_path / "run.yaml")
    with pytest.raises(ParametersError, match=r"is a folder; give the path of a RUN.yaml\.$"):
        Parameters.load(tmp_path)


# ----------------------------------------------------------------------------------------------------- single fields


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"training": {"batchsize": 8}},
            "training.batchsize is unknown. Did you mean 'batch_size'? Known here: batch_size, num_train_steps, ",
        ),
        ({"trainin": {"seed": 1}}, "trainin is unknown. Did you mean 'training'? Known here: paths, loss, training, "),
        (
            {"recompute": {"layers": 2}},
            "recompute.layers is unknown. Known here: segments, attention, number_recompute_layers, memory_budget, "
            "cheap_activations.",
        ),
        (
            {"optimizer": {"optimizer_attributes": [{"weights": "*"}, {"weights": "*", "lamda": 1}]}},
            "optimizer.optimizer_attributes[1].lamda is unknown. Did you mean 'lambda'? Known here: weights, alpha, ",
        ),
        ({"training": {"batch_size": "eight"}}, "training.batch_size is 'eight'; expected a whole number."),
        ({"training": {"batch_size": 8.0}}, "training.batch_size is 8.0; expected a whole number."),
        ({"training": {"batch_size": True}}, "training.batch_size is True; expected a whole number."),
        ({"training": {"batch_size": None}}, "training.batch_size is None; expected a whole number."),
        ({"training": {"batch_size": 0}}, "training.batch_size is 0; expected greater than or equal to 1."),
        (
            {"training": {"evaluation_period": -1}},
            "training.evaluation_period is -1; expected greater than or equal to",
        ),
        ({"training": {"seed": 2**64}}, "training.seed is 18446744073709551616; expected less than "),
        ({"training": {"mapped_dimensions": {"b": "x"}}}, "training.mapped_dimensions.b is 'x'; expected a whole"),
        ({"training": {"weights_to_train": "w"}}, "training.weights_to_train is 'w'; expected a list."),
        ({"training": {"weights_to_train": [7]}}, "training.weights_to_train[0] is 7; expected text, in quotes where"),
        (
            {"training": {"immutable_weights": {"Mul": [[0, 1.0, 2]]}}},
            "immutable_weights.Mul[0] is [0, 1.0, 2]; expected",
        ),
        ({"training": {2: 3}}, "training[2] is 2; expected the name of a field."),
        ({"training": 3}, "training is 3; expected a section with fields."),
        ({"training": [3]}, "training is [3]; expected a section with fields."),
        ({"learning_rate": {"initial_lr": "fast"}}, "learning_rate.initial_lr is 'fast'; expected a number."),
        ({"learning_rate": {"initial_lr": True}}, "learning_rate.initial_lr is True; expected a number."),
        ({"learning_rate": {"initial_lr": float("nan")}}, "learning_rate.initial_lr is nan; expected a finite number."),
        (
            {"learning_rate": {"initial_lr": -0.1}},
            "learning_rate.initial_lr is -0.1; expected greater than or equal to 0",
        ),
        (
            {"learning_rate": {"warmup_mode": "cosin"}},
            "learning_rate.warmup_mode is 'cosin'; expected none, constant, linear, polynomial, cosine, ",
        ),
        (
            {"learning_rate": {"warmup_ratio": 1.5}},
            "learning_rate.warmup_ratio is 1.5; expected less than or equal to 1",
        ),
        ({"learning_rate": {"decay_ratio": 0}}, "learning_rate.decay_ratio is 0; expected greater than 0."),
        (
            {"learning_rate": {"points": [[1.5, 1]]}},
            "learning_rate.points[0][0] is 1.5; expected less than or equal to 1.",
        ),
        ({"learning_rate": {"points": [[0.5]]}}, "learning_rate.points[0]"),
        ({"data": {"shuffle_data": "yes"}}, "data.shuffle_data is 'yes'; expected true or false."),
        ({"data": {"shuffle_data": 1}}, "data.shuffle_data is 1; expected true or false."),
        ({"data": {"last_batch": "pad"}}, "data.last_batch is 'pad'; expected 'wrap', 'drop' or 'short'."),
        ({"data": {"input_name_map": ["a"]}}, "data.input_name_map is ['a']; expected names with values."),
        ({"paths": {"model_path": 3}}, "paths.model_path is 3; expected a path."),
        ({"loss": {"type": "hinge"}}, "loss.type is 'hinge'; expected 'softmax_cross_entropy', 'mean_squared_error', "),
        (
            {"optimizer": {"training_optimizer_name": "Adamax"}},
            "optimizer.training_optimizer_name is 'Adamax'; expected 'SGDOptimizer', 'Adam', 'AdamW', 'Lamb', 'Lion', ",
        ),
        ({"optimizer": {"max_norm_clip": 0}}, "optimizer.max_norm_clip is 0; expected greater than 0."),
        ({"optimizer": {"optimizer_attributes": "none"}}, "optimizer.optimizer_attributes is 'none'; expected a list."),
        (
            {"optimizer": {"optimizer_attributes": [{"beta": 1}]}},
            "optimizer.optimizer_attributes[0].beta is 1; expected less than 1.",
        ),
        (
            {"mixed_precision": {"loss_scale": -1}},
            "mixed_precision.loss_scale is -1; expected greater than or equal to 0.",
        ),
        ({"machine": {"execution_provider": "TPU"}}, "machine.execution_provider is 'TPU'; expected 'CPU' or 'CUDA'."),
        ({"next_rounds": 3}, "next_rounds is 3; expected a list, one entry for each later round."),
        ({"next_rounds": [3]}, "next_rounds[0] is 3; expected sections with the fields that differ."),
        ({"next_rounds": [{"training": 3}]}, "next_rounds[0].training is 3; expected the fields that differ."),
        (
            {"next_rounds": [{}, {"training": {"batchsize": 3}}]},
            "next_rounds[1].training.batchsize is unknown. Did you mean 'batch_size'?",
        ),
    ],
)
def test_a_field_that_is_wrong(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("loss", "type"),
        ("training", "batch_size"),
        ("learning_rate", "initial_lr"),
    ],
)
def test_a_field_without_a_default_that_is_missing(section: str, name: str) -> None:
    sections = {key: {k: v for k, v in fields.items() if (key, k) != (section, name)} for key, fields in SMALL.items()}
    with pytest.raises(ParametersError) as caught:
        Parameters.from_mapping(sections)
    assert str(caught.value) == f"{section}.{name} is missing; it has no default."
    with pytest.raises(ParametersError, match=rf"^{section} is missing; it has no default\.$"):
        Parameters.from_mapping({key: fields for key, fields in SMALL.items() if key != section})


def test_all_mistakes_are_told_at_once() -> None:
    lines = refusal(training={"batch_size": 0, "num_train_step": 3}, paths={"modelpath": "x"}, extra=1).splitlines()
    assert len(lines) == 4
    assert {line.split()[0] for line in lines} == {
        "training.batch_size",
        "training.num_train_step",
        "paths.modelpath",
        "extra",
    }
    lines = refusal(
        training={"gradient_accumulation_steps": 5},
        learning_rate={"warmup_steps": 3},
        distributed={"zero_offload_to_cpu": True, "sequence_parallel": True},
    ).splitlines()
    assert len(lines) == 4


# ----------------------------------------------------------------------------------------- fields in combination


@pytest.mark.parametrize(
    ("steps", "accumulation", "advice"), [(12, 5, "use 10 or 15."), (3, 4, "use 4."), (400, 3, "use 399 or 402.")]
)
def test_steps_that_are_no_multiple_of_the_accumulation(steps: int, accumulation: int, advice: str) -> None:
    training = {"num_train_steps": steps, "gradient_accumulation_steps": accumulation}
    assert refusal(training=training) == (
        f"training.num_train_steps is {steps}, not a multiple of training.gradient_accumulation_steps, which is "
        f"{accumulation}; {advice}"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"learning_rate": {"warmup_mode": "linear", "warmup_ratio": 0.1, "warmup_steps": 2}},
            "learning_rate.warmup_ratio is 0.1 and learning_rate.warmup_steps is 2; set one of the two.",
        ),
        (
            {"learning_rate": {"warmup_mode": "linear", "warmup_steps": 13}},
            "learning_rate.warmup_steps is 13, more than training.num_train_steps, which is 12; "
            "the rate would never reach initial_lr.",
        ),
        (
            {"learning_rate": {"warmup_steps": 2}},
            "learning_rate.warmup_mode is none, which has no warm-up; use constant",
        ),
        (
            {"learning_rate": {"warmup_ratio": 0.5}},
            "learning_rate.warmup_mode is none, which has no warm-up; use const",
        ),
        (
            {"learning_rate": {"warmup_mode": "piecewise", "warmup_steps": 2, "points": [[0, 1]]}},
            "learning_rate.warmup_mode is piecewise, which has no warm-up; list it in learning_rate.points, or leave "
            "learning_rate.warmup_steps out.",
        ),
        (
            {"learning_rate": {"warmup_mode": "piecewise"}},
            "learning_rate.points is missing; learning_rate.warmup_mode piecewise needs it. List [fraction of the "
            "round's steps, fraction of initial_lr] pairs, such as [[0, 1], [0.5, 1], [1, 0.1]].",
        ),
        (
            {"learning_rate": {"warmup_mode": "piecewise", "points": [[0.5, 1], [0.1, 1]]}},
            "learning_rate.points are at 0.5, 0.1 of the round; sort them by the first number.",
        ),
        (
            {"optimizer": {"training_optimizer_name": "ScheduleFree"}, "averaging": {"kind": "ema"}},
            "averaging.kind is ema, but the optimizer AdamWScheduleFree averages the weights itself; remove averaging, "
            "or choose another optimizer.",
        ),
        (
            {
                "optimizer": {"training_optimizer_name": "AdamW8bit"},
                "distributed": {"data_parallel_size": 2, "zero_stage": 1},
            },
            "optimizer.training_optimizer_name is AdamW8bit, which needs full weights on every rank, since its moments "
            "are quantized in blocks of 256 elements, which shards would cut; distributed.zero_stage is 1. "
            "Use data or pipeline parallelism without it, or another optimizer.",
        ),
        ({"loss": {"prediction": None}}, "loss.prediction is missing; loss.type 'l1' needs it."),
        ({"loss": {"label": None}}, "loss.label is missing; loss.type 'l1' needs it."),
        ({"loss": {"type": "output", "prediction": None}}, "loss.prediction is missing; loss.type 'output' needs it."),
        ({"loss": {"type": "graph"}}, "loss.graph is missing; loss.type 'graph' needs it."),
        (
            {"loss": {"ignore_index": 0}},
            "loss.ignore_index is given, but belongs to softmax_cross_entropy, softmax_focal, dice, dpo, ctc or bert, "
            "not to 'l1'.",
        ),
        (
            {"loss": {"class_weights": [1.0]}},
            "loss.class_weights is given, but belongs to softmax_cross_entropy, softmax_focal or bert,",
        ),
        (
            {"loss": {"from_logits": True}},
            "loss.from_logits is given, but belongs to binary_cross_entropy, focal or binary_dice, not to 'l1'.",
        ),
        (
            {"loss": {"dense_labels": True}},
            "loss.dense_labels is given, but belongs to softmax_cross_entropy, not to 'l1'",
        ),
        ({"loss": {"graph": "l.onnx"}}, "loss.graph is given, but belongs to graph, not to 'l1'."),
        (
            {"mixed_precision": {"use_bfloat16": True}},
            "mixed_precision.use_bfloat16 is true while use_mixed_precision is false; "
            "set use_mixed_precision: true as well.",
        ),
        (
            {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True, "loss_scale": 128.0}},
            "mixed_precision.loss_scale is 128, but bf16 needs no loss scale; leave it out.",
        ),
        (
            {"mixed_precision": {"loss_scale": 128.0}},
            "mixed_precision.loss_scale is 128 while use_mixed_precision is false; fp32 needs no loss scale: leave it",
        ),
        (
            {"distributed": {"enable_adasum": True, "zero_stage": 1, "data_parallel_size": 2}},
            "distributed.enable_adasum is true and zero_stage is 1; Adasum needs every replica's full gradients.",
        ),
        (
            {"distributed": "auto", "recompute": {"segments": True, "number_recompute_layers": 2}},
            "recompute.number_recompute_layers is 2, layers of every process, but distributed.layout is auto, which",
        ),
        (
            {"distributed": {"zero_offload_to_cpu": True}},
            "distributed.zero_offload_to_cpu is true, but zero_stage is 0; set a stage from 1 to 3.",
        ),
        (
            {"distributed": {"sequence_parallel": True}},
            "distributed.sequence_parallel is true, but horizontal_parallel_size is 1; it shards the activations "
            "between",
        ),
        (
            {
                "distributed": {
                    "pipeline_partition_cut_list": ["h1"],
                    "op_id_to_stage": {"a": 1},
                    "pipeline_parallel_size": 2,
                },
                "training": {"gradient_accumulation_steps": 2},
            },
            "distributed: pipeline_partition_cut_list and op_id_to_stage are given, but the stages can be cut",
        ),
        (
            {"distributed": {"op_id_to_stage": {"a": 1}}},
            "distributed.op_id_to_stage is given, but pipeline_parallel_size is 1; there is nothing to cut.",
        ),
        (
            {"distributed": {"stage_memory_gb": 2.0}},
            "distributed.stage_memory_gb is 2, which bounds stages that are balanced, but pipeline_parallel_size is 1. "
            "Leave one of the two out.",
        ),
        (
            {"distributed": {"stages_per_rank": 3}},
            "distributed.stages_per_rank is 3, but 1F1B has 1; leave it out, or use an interleaved schedule.",
        ),
        (
            {
                "distributed": {"pipeline_parallel_size": 4, "pipeline_schedule": "Interleaved1F1B"},
                "training": {"gradient_accumulation_steps": 6},
            },
            "distributed.pipeline_schedule is Interleaved1F1B, whose micro-batches come in groups of the pipeline's "
            "size, 4; training.gradient_accumulation_steps, the micro-batches of an update, is 6. Use a multiple of 4.",
        ),
        (
            {"distributed": {"pipeline_parallel_size": 4}, "training": {"gradient_accumulation_steps": 2}},
            "distributed.pipeline_schedule is 1F1B over 4 processes, which needs at least 4 micro-batches for an",
        ),
        (
            {
                "optimizer": {
                    "training_optimizer_name": "Lamb",
                    "optimizer_attributes": [{"ratio_min": 2, "ratio_max": 1}],
                }
            },
            "optimizer.optimizer_attributes[0].ratio_min is 2, above ratio_max, which is 1.",
        ),
        (
            {"checkpoint": {"checkpoint_period": 5}},
            "checkpoint.checkpoint_period is 5, but checkpoint.checkpoints_dir is missing; set where checkpoints go.",
        ),
        (
            {"profiler": {"first_step": 1}},
            "profiler.first_step and profiler.last_step belong together; give both.",
        ),
        ({"profiler": {"last_step": 1}}, "profiler.first_step and profiler.last_step belong together; give both."),
        (
            {"profiler": {"first_step": 3, "last_step": 2}, "paths": {"output_dir": "o"}},
            "profiler.last_step is 2, before first_step, which is 3.",
        ),
        (
            {"profiler": {"first_step": 13, "last_step": 14}, "paths": {"output_dir": "o"}},
            "profiler.first_step is 13, but the round has 12 steps.",
        ),
        (
            {"profiler": {"first_step": 1, "last_step": 2}},
            "profiler.trace_dir is missing, and so is paths.output_dir; set one of them.",
        ),
        *(
            (
                {"paths": {"model_path": "m.onnx", name: "m.onnx"}},
                f"paths.{name} is the model itself, which would be written over;",
            )
            for name in ("model_with_loss_func_path", "model_with_training_graph_path", "optimizer_graph_path")
        ),
        ({"paths": {"model_path": None}}, "paths.model_path is missing; name the ONNX model to train, or the models"),
        (
            {
                "paths": {"model_path": None, "optimizer_graph_path": "b.onnx"},
                "distributed": {"pipeline_parallel_size": 2, "pipeline_stage_paths": ["a.onnx", "b.onnx"]},
                "training": {"gradient_accumulation_steps": 2},
            },
            "paths.optimizer_graph_path is the model itself",
        ),
    ],
)
def test_fields_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    text = refusal(**changes)
    assert text.startswith(words)
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": {"warmup_mode": "constant", "warmup_steps": 12}},
        {"learning_rate": {"warmup_steps": 0}},
        {"loss": {"type": "softmax_cross_entropy", "ignore_index": -100, "class_weights": [1, 2]}},
        {"loss": {"type": "bert", "ignore_index": -100}},
        {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 128.0}},
        {"mixed_precision": {"loss_scale": 1.0}},
        {"profiler": {"first_step": 12, "last_step": 12, "trace_dir": "t"}},
        {"checkpoint": {"checkpoint_period": 5, "checkpoints_dir": "c"}},
        {"training": {"immutable_weights": {"Mul": [[0, 1.0]]}}},
        {
            "distributed": {"pipeline_parallel_size": 4, "pipeline_schedule": "ZBVZeroBubble"},
            "training": {"gradient_accumulation_steps": 3, "num_train_steps": 6},
        },
    ],
)
def test_fields_that_look_alike_and_are_right(changes: dict[str, Any]) -> None:
    make(**changes)


VALUES: dict[str, Any] = {
    "options": {"eps": 1e-8},
    "nesterov": True,
    "do_bias_correction": True,
    "use_muon": True,
    "beta2_decay": -0.5,
    "clip_threshold": 2.0,
}


@pytest.mark.parametrize("optimizer", [kind.name for kind in OPTIMIZERS])
def test_an_attribute_that_the_optimizer_lacks(optimizer: str) -> None:
    """Exactly the attributes of an optimizer are taken; any other is refused by name."""
    every = [name for name in AttributeRule.__dataclass_fields__ if name != "weights"]
    for name in every:
        rule = {"weights": "*", name.rstrip("_"): VALUES.get(name, 0.5)}
        section = {"training_optimizer_name": optimizer, "optimizer_attributes": [{"weights": "*"}, rule]}
        if name.rstrip("_") in optimizer_named(optimizer).defaults or name == "learning_rate_factor":
            make(optimizer=section)
        else:
            text = refusal(optimizer=section)
            field = f"optimizer.optimizer_attributes[1].{name.rstrip('_')}"
            assert text.startswith(f"{field} is given, but {optimizer} has no such attribute; it has: ")
            assert "learning_rate_factor" in text


def test_switches_as_integers() -> None:
    """`optimizer_int_attributes` of the original runner: 1 and 0, after the other rules."""
    section = {"training_optimizer_name": "AdamW", "optimizer_int_attributes": [{"do_bias_correction": 0}]}
    assert make(optimizer=section).optimizer.optimizer_int_attributes == (SwitchRule(do_bias_correction=False),)
    section["optimizer_int_attributes"] = [{"do_bias_correction": 2}]
    text = "optimizer.optimizer_int_attributes[0].do_bias_correction is 2; expected true or false."
    assert text in refusal(optimizer=section)
    section = {"training_optimizer_name": "AdamW", "optimizer_int_attributes": [{"nesterov": 1}]}
    text = "optimizer.optimizer_int_attributes[0].nesterov is given, but AdamW has no such attribute; it has: alpha, "
    assert refusal(optimizer=section).startswith(text)
    section["optimizer_int_attributes"] = [{"weight_decay_mode": 1}]
    text = "optimizer.optimizer_int_attributes[0].weight_decay_mode is unknown. Did you mean 'weights'? Known here"
    assert refusal(optimizer=section).startswith(text)


# -------------------------------------------------------------------------------------------------------- all rounds


def test_a_later_round_is_checked_before_the_first_begins() -> None:
    text = refusal(training={"gradient_accumulation_steps": 4}, next_rounds=[{}, {"training": {"num_train_steps": 6}}])
    assert text.startswith("next_rounds[1].training.num_train_steps is 6, not a multiple of ")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"paths": {"model_path": "other.onnx"}}, "paths.model_path"),
        ({"paths": {"eval_model_path": "other.onnx"}}, "paths.eval_model_path"),
        ({"loss": {"label": "u"}}, "loss"),
        ({"optimizer": {"max_norm_clip": 2.0}}, "optimizer"),
        ({"mixed_precision": {"use_mixed_precision": True}}, "mixed_precision"),
        ({"machine": {"threads": 2}}, "machine"),
        ({"training": {"seed": 2}}, "training.seed"),
        ({"training": {"weights_to_train": ["a"]}}, "training.weights_to_train"),
        ({"training": {"weights_not_to_train": ["a"]}}, "training.weights_not_to_train"),
        ({"training": {"tied_weights": ["a"]}}, "training.tied_weights"),
        ({"training": {"untied_weights": ["a"]}}, "training.untied_weights"),
        ({"training": {"immutable_weights": {"Mul": [[0, 1.0]]}}}, "training.immutable_weights"),
        ({"checkpoint": {"checkpoints_dir": "c"}}, "checkpoint.checkpoints_dir"),
        ({"checkpoint": {"max_num_checkpoints": 2}}, "checkpoint.max_num_checkpoints"),
        ({"tensorboard": {"log_dir": "t"}}, "tensorboard.log_dir"),
    ],
)
def test_what_no_later_round_can_change_is_named(changes: dict[str, dict[str, Any]], named: str) -> None:
    assert refusal(next_rounds=[changes]) == f"next_rounds[0]: {named} cannot change between the rounds of one run."
    assert fixed_fields_changed(make(), make(**changes)) == [named]


def test_what_a_later_round_can_change() -> None:
    changes = {
        "paths": {"train_data_dir": "long", "test_data_dir": "t", "output_dir": "o"},
        "data": {"shuffle_data": True, "input_name_map": {"a": "b"}},
        "training": {"batch_size": 2, "num_train_steps": 6, "gradient_accumulation_steps": 3, "evaluation_period": 2},
        "learning_rate": {"initial_lr": 0.2, "warmup_mode": "linear", "warmup_ratio": 0.5},
        "tensorboard": {"scalar_names": ["loss"]},
        "checkpoint": {"checkpoint_period": 0},
    }
    assert make(next_rounds=[changes]).next_rounds == (make(**changes),)


def test_rounds_within_rounds_are_refused() -> None:
    inner = make(next_rounds=[{}])
    with pytest.raises(ParametersError, match=r"^next_rounds\[0\]\.next_rounds is given; list all later rounds in the"):
        check(replace(make(), next_rounds=(inner,)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speed": {"compile": False}}, "speed.compile is false, and what is recorded is compiled code"),
        ({"distributed": {"data_parallel_size": 2}}, "the sizes of distributed make 2 processes, and it is for one"),
        (
            {"training": {"gradient_accumulation_steps": 3}},
            "training.gradient_accumulation_steps is 3, and gradients of a pass would be written over by the next",
        ),
        ({"training": {"find_batch_size": True}}, "training.find_batch_size may accumulate"),
        ({"recompute": {"attention": True}}, "recompute runs parts of a pass twice"),
        ({"data": {"last_batch": "short"}}, "data.last_batch is short, and graphs are for batches of one shape"),
    ],
)
def test_what_cuda_graphs_do_not_go_with(changes: dict[str, Any], reason: str) -> None:
    speed = {**changes.pop("speed", {}), "cuda_graphs": True}
    assert refusal(speed=speed, **changes) == f"speed.cuda_graphs is true, but {reason}; leave one of the two out."
    assert make(speed={"cuda_graphs": True}).speed.cuda_graphs


def test_frozen_weights_in_fewer_bits_and_another_evaluation_model_are_refused() -> None:
    assert refusal(frozen_weights={"dtype": "nf4"}, paths={"eval_model_path": "eval.onnx"}) == (
        "frozen_weights.dtype is nf4 and paths.eval_model_path is 'eval.onnx', whose frozen weights are those of its "
        "own file: training and evaluation would compute with different ones. Remove one of the two."
    )
    assert "expected 'as_stored', 'bf16', 'int8', 'int4' or 'nf4'" in refusal(frozen_weights={"dtype": "int3"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"distributed": {"layout": "auto"}}, "distributed.layout is auto"),
        (
            {"distributed": {"enable_adasum": True, "data_parallel_size": 2}},
            "distributed.enable_adasum is true, whose updates depend on the number of replicas",
        ),
        ({"training": {"find_batch_size": True}}, "training.find_batch_size is true"),
        (
            {"data": {"last_batch": "drop"}},
            "data.last_batch is drop, with which updates have fewer samples than others",
        ),
    ],
)
def test_what_an_elastic_run_does_not_go_with(changes: dict[str, Any], reason: str) -> None:
    distributed = {**changes.pop("distributed", {}), "elastic": True}
    said = refusal(distributed=distributed, checkpoint={"checkpoints_dir": "c"}, **changes)
    assert said == f"distributed.elastic is true, but {reason}. Leave one of the two out."
    assert make(distributed={"elastic": True}, checkpoint={"checkpoints_dir": "c"}).distributed.elastic
