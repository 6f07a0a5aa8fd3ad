"""The training graphs that a run asks for, as its RUN.yaml or the command line names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from onward.artifacts.optimizer_graph import write_optimizer_graph
from onward.artifacts.training_graph import write_train_step, write_training_graph
from onward.artifacts.training_info import write_training_info
from onward.checkpoint.reading import find_checkpoint, read_new_tensors
from onward.engine.building.preparation import read_training_graph
from onward.errors import CheckpointError, ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import OnnxModule
from onward.optim.building import with_exact_names
from onward.parameters import Parameters
from onward.spelling import shortened


def write_graphs(
    net: OnnxModule,
    parameters: Parameters,
    *,
    training_graph: Path | None = None,
    optimizer_graph: Path | None = None,
    train_step: Path | None = None,
) -> list[Path]:
    """Writes the graphs that are asked for, of a network whose first output is the loss.

    Dimensions in `training.mapped_dimensions` are fixed, all others stay open. The graphs compute in the types of the
    model, also in a run with mixed precision.

    Returns:
        The files written.

    Raises:
        ModelError: the graph cannot be written in standard operators.
        ParametersError: a step graph is asked for of a run that accumulates gradients, or `mapped_dimensions` names
            a dimension that the model's inputs do not have.
        StorageError: a file cannot be written.
    """
    sizes = parameters.training.mapped_dimensions
    rules = with_exact_names(parameters.optimizer, net.graph)
    if train_step is not None:
        _check_no_accumulation(parameters, "a step graph")
    if training_graph is not None:
        write_training_graph(net, training_graph, sizes)
    if optimizer_graph is not None:
        write_optimizer_graph(net, rules, optimizer_graph)
    if train_step is not None:
        write_train_step(net, rules, train_step, sizes)
    return [path for path in (training_graph, optimizer_graph, train_step) if path is not None]


def write_graphs_of_run(
    parameters: Parameters, graph: TrainingGraph, net: OnnxModule, is_entire: bool, notify: Callable[[str], None]
) -> None:
    """Writes the graphs that a run asks for under `paths`, on the one rank that writes.

    Args:
        parameters: of the run.
        graph: the unsharded one, with its loss.
        net: what this rank trains of it.
        is_entire: whether that is all of it. Frozen weights that it holds in fewer bits are read again.
        notify: called with the name of each file.

    Raises:
        ModelError, ParametersError, StorageError: as `write_graphs` does.
    """
    assert graph.loss is not None
    paths = parameters.paths
    is_as_stored = parameters.frozen_weights.dtype == "as_stored" and not parameters.mixed_precision.use_mixed_precision
    written = write_graphs(
        net if is_entire and is_as_stored else OnnxModule(graph, (graph.loss,)),
        parameters,
        training_graph=paths.model_with_training_graph_path,
        optimizer_graph=paths.optimizer_graph_path,
    )
    for path in written:
        notify(f"wrote {path}.")


def export_graphs(
    model: str | Path,
    run: str | Path,
    *,
    checkpoint: str | Path | None = None,
    training_graph: str | Path | None = None,
    optimizer_graph: str | Path | None = None,
    train_step: str | Path | None = None,
    training_info: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> list[Path]:
    """Writes training graphs of a model without training it.

    Args:
        model: the ONNX file.
        run: the RUN.yaml whose loss, optimizer, weights to train and dimensions count.
        checkpoint: whose weights and running statistics become the defaults; absent: the model's own.
        training_graph, optimizer_graph, train_step: where each goes; absent: it is not written.
        training_info: where the model goes with a `TrainingInfoProto` of its training.
        overrides: fields of the run.
        notify: takes what the user should know of it, one sentence a call.

    Returns:
        The files written.

    Raises:
        CheckpointError: no complete checkpoint, or one of another model.
        ModelError, ParametersError, StorageError: as `write_graphs` does.
    """
    parameters = Parameters.load(run, overrides)
    graph = read_training_graph(parameters, Path(model))
    rules = with_exact_names(parameters.optimizer, graph)
    assert graph.loss is not None
    as_read = replace(graph, model=graph.model.clone())  # lowering expands operators of the graph that it is given
    net = OnnxModule(graph, (graph.loss,))
    if checkpoint is not None:
        load_checkpoint(net, find_checkpoint(Path(checkpoint)))
    training, optimizer, step = (
        None if path is None else Path(path) for path in (training_graph, optimizer_graph, train_step)
    )
    written = write_graphs(net, parameters, training_graph=training, optimizer_graph=optimizer, train_step=step)
    if training_info is not None:
        _check_no_accumulation(parameters, "a TrainingInfoProto")
        tensors = net.tensors_by_name()
        for note in write_training_info(as_read, lambda name: tensors[name], rules, training_info):
            notify(note)
        written.append(Path(training_info))
    return written


def _check_no_accumulation(parameters: Parameters, what: str) -> None:
    accumulation = parameters.training.gradient_accumulation_steps
    if accumulation != 1:
        raise ParametersError(
            f"training.gradient_accumulation_steps is {accumulation}; {what} updates the weights at every call. "
            "Set it to 1, or write the training graph and the optimizer graph and accumulate gradients between them."
        )


def load_checkpoint(net: OnnxModule, checkpoint: Path) -> None:
    """Gives a network the weights and running statistics of a checkpoint.

    Raises:
        CheckpointError: it is of another model.
    """
    stored = {
        key.partition("/")[2]: tensor
        for prefix in ("weights/", "states/")
        for key, tensor in read_new_tensors(checkpoint, prefix).items()
    }
    own = net.tensors_by_name()
    learned = (*net.graph.weights, *net.graph.states)
    wrong = [name for name in learned if name not in stored or stored[name].shape != own[name].shape]
    if wrong:
        raise CheckpointError(
            f"{checkpoint} is of another model: it lacks {shortened(wrong, 5)}, or holds them in other shapes."
        )
    with torch.no_grad():
        for name in learned:
            own[name].copy_(stored[name])
