"""A small GPT-2 in little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from onward.engine.building.preparation import read_training_graph
from onward.engine.forecast.batch_size import find_batch_size
from onward.models import create_model
from onward.parallel.launch.process import in_world_of_one
from onward.parameters import Parameters


def save_gpt2(folder: Path) -> Path:
    path = folder / "model.onnx"
    options: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "vocab_size": 32, "context_length": 8}
    ir.save(create_model("gpt2", size="tiny", dropout=0.0, **options), path)
    return path


def gpt2_parameters(path: Path, gb: float, **distributed: Any) -> Parameters:
    return Parameters.from_mapping(
        {
            "paths": {"model_path": path},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {
                "batch_size": 2,
                "num_train_steps": 16,
                "gradient_accumulation_steps": 4,
                "mapped_dimensions": {"sequence": 8},
                "find_batch_size": True,
            },
            "learning_rate": {"initial_lr": 0.01},
            "optimizer": {"training_optimizer_name": "AdamW"},
            "machine": {"memory_gb": gb},
            "distributed": distributed,
        }
    )


def found_by_one(parameters: Parameters) -> int:
    graph = read_training_graph(parameters, parameters.paths.model_path)
    return find_batch_size(parameters, in_world_of_one(), graph, {})[0].training.batch_size
