"""The sections `paths` and `data` of RUN.yaml: which files a run reads and writes, and how shards become batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from onward.parameters.field_types import STRICT, Count, FiniteNumber, Flag


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
        fixed_inputs: input of the model, or `*`-pattern -> the number that fills it in every batch, for inputs that are
            no feature of a sample: a sampling rate, an initial state of zeros. A cache of keys and values that is
            filled with 0 holds no tokens. The exported model keeps them as inputs.
        segment_masks: attention mask among the inputs of the model, [batch, 1, sequence, sequence] -> feature with the
            number of each token's conversation, from which the training graph computes it: a token sees the earlier
            tokens of its own. `onward pack --several-per-sequence` writes `segment_ids`.
        shuffle_data: draw a new order of files, and of samples within a file, for every epoch from the seed.
        max_num_files_preload: files held in memory at most, the current one included.
        test_data: `replicated`: every rank evaluates all test data; `partitioned`: each rank a part.
        last_batch: `wrap`: the last batch of an epoch is filled with the next epoch's first samples;
            `drop`: it is left out, and counted; `short`: it is smaller.
        skip_corrupt_files: skip files that cannot be read, with a count, instead of stopping.
    """

    __pydantic_config__ = STRICT
    input_name_map: Mapping[str, str] = field(default_factory=dict)
    fixed_inputs: Mapping[str, FiniteNumber] = field(default_factory=dict)
    segment_masks: Mapping[str, str] = field(default_factory=dict)
    shuffle_data: Flag = False
    max_num_files_preload: Count = 2
    test_data: Literal["replicated", "partitioned"] = "replicated"
    last_batch: Literal["wrap", "drop", "short"] = "wrap"
    skip_corrupt_files: Flag = False
