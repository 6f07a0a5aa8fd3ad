"""From the state of a device to the user's own graph, and to a checkpoint that `onward train` resumes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from onward.artifacts.adapter_outputs import write_form
from onward.artifacts.optimizer_graph import RATE_SUMS
from onward.artifacts.trained_model import adapter_of, graph_as_trained
from onward.device.device_states import DeviceState, done_updates, read_manifest_of_bundle, read_state
from onward.device.layout import ACCUMULATED, FINITE_UPDATES, LOSS_SCALE, SKIPPED, average_name
from onward.device.run_fields import check_fields
from onward.environment import Environment
from onward.errors import CheckpointError, ParametersError
from onward.optim.building import slots_by_name
from onward.parameters import Parameters
from onward.parameters.adapter import AdapterOutput
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.runner import TrainingRunner
from onward.spelling import shortened


def export_device_state(
    model: str | Path,
    state: str | Path,
    output: str | Path,
    *,
    bundle: str | Path,
    form: AdapterOutput = "merged",
    limits: Limits = DEFAULT_LIMITS,
) -> Path:
    """Writes the user's own graph with the weights and running statistics of a device's state.

    Args:
        model: the ONNX file that the bundle was written of.
        state: what a client saved.
        output: where the trained model goes.
        bundle: that the state is of.
        form: of a model that was trained with adapters, as of `export_checkpoint`.
        limits: what the model may ask of the machine.

    Raises:
        CheckpointError: the state is of another bundle, or that of another model.
        StorageError: a file cannot be read or written.
    """
    held, output = read_state(state), Path(output)
    manifest = read_manifest_of_bundle(bundle, held)
    # Of weights that an optimizer averages, inference takes the averages; copies for a skipped update it does not take.
    taken = {one["name"] for one in manifest["graphs"]["infer"]["inputs"]}
    tensors, shapes = dict[str, np.ndarray](), dict[str, tuple[int, ...]]()
    for kind, prefix in (("weight", "weights"), ("statistic", "states")):
        for name in (one["name"] for one in manifest["state"] if one["kind"] == kind):
            found = next((one for one in (name, average_name(name)) if one in taken), None)
            if found is not None:
                tensors[name] = held.tensors[found]
                shapes[f"{prefix}/{name}"] = tuple(tensors[name].shape)
    about = manifest["model"]
    graph = graph_as_trained([model], about, shapes, about["base_checksum"], str(state), limits)
    write_form(form, graph, lambda name: torch.from_numpy(tensors[name]), output, adapter_of(about))
    return output


def write_checkpoint(
    run: str | Path,
    state: str | Path,
    *,
    overrides: Mapping[str, str] | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> Path:
    """Writes a checkpoint of a run with the weights, moments, statistics and counters of a device's state.

    `onward train` resumes the run from it, at the step where the device was, with its own data from their beginning.

    Args:
        run: the RUN.yaml that the bundle was written of.
        state: what a client saved.
        overrides: fields of the run.
        notify: takes what the user should know, one sentence a call.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: the state is of another run or of other fields, or the run has newer checkpoints.
        ParametersError: the run keeps no checkpoints.
        StorageError: it cannot be written.
    """
    parameters = Parameters.load(run, overrides)
    if parameters.checkpoint.checkpoints_dir is None:
        raise ParametersError("checkpoint.checkpoints_dir is not set; set it to the folder for the checkpoint.")
    held = read_state(state)
    if held.run_fields:
        check_fields(held.run_fields, parameters, held.path)
    else:
        notify(f"{state} does not record the fields it was trained with: they are not compared with those of {run}.")
    updates = int(held.tensors["update_count"])
    runner = TrainingRunner(parameters, Environment(execution_provider="CPU"), progress=False)
    runner.initialize()
    if runner.resumed_update is not None and runner.resumed_update >= updates:
        raise CheckpointError(
            f"{parameters.checkpoint.checkpoints_dir} holds a checkpoint of update {runner.resumed_update}, and "
            f"{state} is of update {updates}. Set another checkpoint.checkpoints_dir."
        )
    _take(runner, held)
    path = runner.save_checkpoint()
    runner.wait_for_checkpoint()
    notify(f"the state of a device after {updates:,} updates is the checkpoint {path}.")
    return path


@torch.no_grad()
def _take(runner: TrainingRunner, held: DeviceState) -> None:
    """Gives a run's state the tensors and counters of a device's."""
    state, tensors = runner.state, dict(held.tensors)
    # Schedule-Free's z, which a device keeps as its offset from the weight.
    tensors |= {f"{w}_z": tensors[w] + tensors[f"{w}_z_offset"] for w in held.tensors if f"{w}_z_offset" in tensors}
    if ACCUMULATED in tensors and int(tensors[ACCUMULATED]):
        raise CheckpointError(
            f"{held.path} was saved after {int(tensors[ACCUMULATED])} passes of an update that is not done. Save it "
            "after an update."
        )
    wanted = {**state.torch_parameters, **state.statistics()}
    # Before the first update a device's moments are zeros, a run's what its optimizer begins with.
    slots_of = slots_by_name(state.optimizer, state.torch_parameters) if done_updates(held) else {}
    for weight, slots in slots_of.items():
        wanted |= {f"{weight}_{slot}": tensor for slot, tensor in slots.items()}
    alike = _once_for_all(runner, held)
    wrong = [
        name
        for name, tensor in wanted.items()
        if name not in alike and (name not in tensors or tensors[name].shape != tuple(tensor.shape))
    ]
    if wrong:
        raise CheckpointError(
            f"{held.path} is of another run: it lacks {shortened(wrong, 5)}, or holds them in other shapes. Pass the "
            "RUN.yaml that the bundle was written of."
        )
    for name, tensor in wanted.items():
        if name in alike:
            tensor.fill_(alike[name])
        else:
            tensor.copy_(torch.from_numpy(tensors[name]))
    if LOSS_SCALE in tensors and state.loss_scale is not None:
        finite = int(tensors[FINITE_UPDATES])
        state.loss_scale = replace(state.loss_scale, scale=float(tensors[LOSS_SCALE]), finite_updates=finite)
    accumulation = runner.parameters.training.gradient_accumulation_steps
    updates = int(tensors["update_count"])
    state.counters = replace(
        state.counters,
        update=updates,
        skipped_updates=int(tensors[SKIPPED]),
        step=min(updates * accumulation, runner.parameters.training.steps),
    )


def _once_for_all(runner: TrainingRunner, held: DeviceState) -> dict[str, float]:
    """The slots that a run keeps for each weight and a device once: how many updates, and learning rates so far."""
    found, optimizer = dict[str, float](), runner.state.optimizer
    for weight, slots in slots_by_name(optimizer, runner.state.torch_parameters).items():
        parameter = runner.state.torch_parameters[weight]
        groups = (group for group in optimizer.param_groups if any(parameter is one for one in group["params"]))
        factor = next(groups)["learning_rate_factor"]
        shared = {"step": float(done_updates(held))}
        if "largest_rate" in held.tensors:
            largest, squares = (float(held.tensors[name]) for name in RATE_SUMS)
            shared |= {"largest_rate": largest * factor, "rate_squares": squares * factor**2}
        found |= {f"{weight}_{slot}": shared[slot] for slot in slots.keys() & shared.keys()}
    return {name: value for name, value in found.items() if name not in held.tensors}
