"""A torch function of the user's own: computed from the model's outputs, outside of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.losses.kind import LossKind

if TYPE_CHECKING:
    from onward.parameters import Parameters


def _find_problems(parameters: Parameters) -> list[str]:
    """What is sharded or written of the graph cannot hold a loss outside of it."""
    split, paths, training = parameters.distributed, parameters.paths, parameters.training
    obstacles = {
        "distributed.pipeline_parallel_size": split.pipeline_parallel_size > 1 or split.pipeline_stage_paths,
        "distributed.horizontal_parallel_size": split.horizontal_parallel_size > 1,
        "paths.model_with_loss_func_path": paths.model_with_loss_func_path,
        "paths.model_with_training_graph_path": paths.model_with_training_graph_path,
        "paths.optimizer_graph_path": paths.optimizer_graph_path,
        "training.find_batch_size": training.find_batch_size,
        "training.is_perf_test": training.is_perf_test,
    }
    missing = "loss.type 'function' is for Python: pass loss=Loss(type='function', function=...) there."
    return [missing] * (parameters.loss.function is None) + [
        f"loss.type is 'function', which is computed outside of the graph from complete outputs, and {field} needs the "
        "loss in the graph; use a type of loss that is part of the graph ('graph' takes an ONNX model of your own), or "
        f"leave {field} out."
        for field, is_met in obstacles.items()
        if is_met
    ]


FUNCTION = LossKind(
    name="function",
    add=None,
    remark="in Python only",
    required=(),
    reads=("function",),
    find_problems=_find_problems,
)
