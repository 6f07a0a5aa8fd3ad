"""Two training steps of an exported architecture in stock ONNX Runtime, compared with those of the torch module."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch
import yaml
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onward.device.bundle import write_bundle
from onward_device import Bundle, Trainer
from tests.device.rounding import RoundingComparison, compare_rounding
from tests.lowering.architecture import Architecture, export_program
from tests.lowering.vision_models import randomize

RELATIVE = 1e-4
FLOOR = 1e-2
"""What a tensor's update is compared with at least, as a share of the largest update of the network: a bias before a
normalization has an update of rounding errors only."""

RATE, MOMENTUM = 0.25, 0.9
LOSS = "total_loss"


@dataclass(frozen=True)
class StepDifference:
    """How far a step on a device is from the module's; both relative.

    Attributes:
        loss: of the loss in any of the steps, compared with itself.
        update: of what a weight or running statistic changed by in the first step, compared with the largest such
            change in the tensor.
        gradient: of a weight's gradient in the first step, which is the momentum after it, compared with its largest
            element: what a step changes may be little beside what float32 rounds off the weight.
        tensors: how many were compared.
        steps: how many steps, the later ones with another batch size where the export leaves it open.
        beyond: where one of these is above `RELATIVE`: both compared with torch in float64, over several batches.
    """

    loss: float
    update: float
    gradient: float
    tensors: int
    steps: int
    beyond: RoundingComparison | None = None

    @property
    def is_equal(self) -> bool:
        """Whether it is the module's step, as nearly as torch itself computes it in float32."""
        return self.largest <= RELATIVE or (self.beyond is not None and self.beyond.is_alike)

    @property
    def largest(self) -> float:
        """Of the three."""
        return max(self.loss, self.update, self.gradient)


def compare_steps(architecture: Architecture, folder: Path) -> StepDifference:
    """Writes the device bundle of an architecture into a folder, and trains two steps with it and with torch."""
    torch.manual_seed(0)
    module = randomize(architecture.make()).eval()
    with torch.no_grad():
        outputs = _float_outputs(module, architecture.inputs)
    scales = [1.0 / max(out.abs().max().item(), 1e-6) for out in outputs]
    model = export_program(module, architecture).model_proto
    names = [value.name for value in model.graph.input]
    _write_run(model, scales, module, folder, len(architecture.inputs[0]))
    trainer = Trainer.load(write_bundle(folder / "run.yaml", folder / "bundle"))
    return _compare(trainer, _trained_like_onward(module), _batches(architecture), names, scales)


def _float_outputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    outputs = module(*inputs)
    return [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out.is_floating_point()]


def _loss(outputs: list[Tensor], scales: list[float]) -> Tensor:
    """The sum over all outputs of mean(o^2) + mean(o), o being scaled."""
    scaled = [out * scale for out, scale in zip(outputs, scales, strict=True)]
    return torch.stack([(one * one).mean() + one.mean() for one in scaled]).sum()


def _write_run(model: onnx.ModelProto, scales: list[float], module: nn.Module, folder: Path, batch: int) -> None:
    """The model with its loss as an output, and the run."""
    graph = model.graph
    floats = [v.name for v in graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT]
    parts = []
    for name, scale in zip(floats, scales, strict=True):
        here = [f"{name}/{part}" for part in ("scale", "scaled", "square", "sum", "flat", "mean", "shape")]
        constants = {here[0]: np.array(scale, np.float32), here[6]: np.array([-1])}
        for constant, value in constants.items():
            graph.node.append(helper.make_node("Constant", [], [constant], value=onnx.numpy_helper.from_array(value)))
        graph.node.append(helper.make_node("Mul", [name, here[0]], [here[1]]))
        graph.node.append(helper.make_node("Mul", [here[1], here[1]], [here[2]]))
        graph.node.append(helper.make_node("Add", [here[2], here[1]], [here[3]]))
        graph.node.append(helper.make_node("ReduceMean", [here[3]], [here[5]], keepdims=0))
        parts.append(here[5])
    graph.node.append(helper.make_node("Sum", parts, [LOSS]))
    graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, ()))
    onnx.save(model, folder / "model.onnx")
    frozen = [name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]
    stored = {value.name for value in graph.initializer}
    run = {
        "paths": {"model_path": "model.onnx"},
        "loss": {"type": "output", "prediction": LOSS},
        "training": {
            "batch_size": batch,
            "num_train_steps": 10,
            "weights_not_to_train": [name for name in frozen if name in stored],
        },
        "optimizer": {
            "training_optimizer_name": "SGDOptimizer",
            "optimizer_attributes": [{"momentum": MOMENTUM}],
        },
        "learning_rate": {"initial_lr": RATE},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def _trained_like_onward(module: nn.Module) -> nn.Module:
    """Normalization by the batch, and no dropout, which an export in inference mode has not.

    The running variance is of the population, as ONNX defines it; torch has that of the sample.
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.train()
            part.register_forward_pre_hook(_note_variance)
            part.register_forward_hook(_correct_variance)
    return module


def _note_variance(part: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
    assert part.running_var is not None
    part.variance_before = part.running_var.clone()


def _correct_variance(part: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    assert part.running_var is not None
    assert part.momentum is not None
    assert isinstance(part.variance_before, Tensor)
    count = inputs[0].numel() // inputs[0].shape[1]
    old = (1 - part.momentum) * part.variance_before
    # Not seen by autograd, which keeps the buffer for a backward pass that does not read it.
    part.running_var.data.copy_(old + (part.running_var - old) * (count - 1) / count)


def _batches(architecture: Architecture) -> list[tuple[Tensor, ...]]:
    """Two batches, the second of another size where the export leaves it open."""
    first = architecture.inputs
    if 0 not in architecture.axes:
        return [first, first]
    return [first, tuple(torch.cat((x, x[:1])) for x in first)]


def _compare(
    trainer: Trainer, module: nn.Module, batches: list[tuple[Tensor, ...]], names: list[str], scales: list[float]
) -> StepDifference:
    kept = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    own = {one["name"] for one in trainer.bundle.manifest["state"] if one["kind"] in ("weight", "statistic")}
    foreign = sorted(own - kept.keys())
    assert not foreign, f"the bundle keeps {foreign}, which the module has not"
    parameters = [p for p in module.parameters() if p.requires_grad]
    missing = [n for n, p in module.named_parameters() if p.requires_grad and not _names_of(p, module) & own]
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    before = {name: kept[name].detach().clone() for name in own}
    untrained = copy.deepcopy(module)
    losses, update, gradient = [], None, 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss(_float_outputs(module, batch), scales)
        loss.backward()
        unreached = {id(p) for p in parameters if p.grad is None}
        lost = [name for name in missing if id(kept[name]) not in unreached]
        assert not lost, f"the bundle does not train {lost}"
        optimizer.step()
        actual = trainer.train_step({name: x.numpy() for name, x in zip(names, batch, strict=True)})
        losses.append(abs(actual - loss.item()) / max(abs(loss.item()), 1e-6))
        if update is None:
            after = {name: kept[name].detach() for name in own}
            update = _difference(trainer.state(), before, after)
            found = {name: kept[name].grad for name in own}
            known = {name: one for name, one in found.items() if one is not None}
            gradient = _gradient_difference(trainer.state(), known)
    assert update is not None
    assert not trainer.skipped_updates
    compared = StepDifference(loss=max(losses), update=update, gradient=gradient, tensors=len(own), steps=len(batches))
    if compared.largest <= RELATIVE:
        return compared
    beyond = compare_rounding(
        lambda given: _device_steps(trainer.bundle, given, names),
        lambda given, dtype: _torch_steps(untrained, given, scales, own, dtype),
        lambda state, exact: _difference(state, before, exact),
        batches,
    )
    return replace(compared, beyond=beyond)


def _gradient_difference(state: Mapping[str, np.ndarray], gradients: Mapping[str, Tensor]) -> float:
    largest, worst = max(one.abs().max().item() for one in gradients.values()), 0.0
    for name, one in gradients.items():
        difference = (torch.from_numpy(state[f"{name}_momentum_buffer"]) - one).abs().max().item()
        worst = max(worst, difference / max(one.abs().max().item(), FLOOR * largest, 1e-30))
    return worst


def _device_steps(
    bundle: Bundle, batches: list[tuple[Tensor, ...]], names: list[str]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of steps from the beginning, and the state after the first."""
    trainer, losses, first = Trainer(bundle), list[float](), dict[str, np.ndarray]()
    for batch in batches:
        losses.append(trainer.train_step({name: x.numpy() for name, x in zip(names, batch, strict=True)}))
        first = first or trainer.state()
    return losses, first


def _torch_steps(
    module: nn.Module, batches: list[tuple[Tensor, ...]], scales: list[float], names: Iterable[str], dtype: torch.dtype
) -> tuple[list[float], dict[str, Tensor]]:
    """As `_device_steps`, of a copy of a module in a type."""
    module = copy.deepcopy(module).to(dtype)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=RATE, momentum=MOMENTUM)
    kept = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    losses, first = list[float](), dict[str, Tensor]()
    for batch in batches:
        optimizer.zero_grad()
        outputs = _float_outputs(module, tuple(x.to(dtype) if x.is_floating_point() else x for x in batch))
        loss = _loss(outputs, scales)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        first = first or {name: kept[name].detach().clone() for name in names}
    return losses, first


def _difference(state: Mapping[str, np.ndarray], before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a change, less what float32 rounds off the tensor itself."""
    changes = {name: after[name] - before[name] for name in after}
    largest, worst = max(change.abs().max().item() for change in changes.values()), 0.0
    for name, change in changes.items():
        rounding = 2 * torch.finfo(torch.float32).eps * before[name].abs().max().item()
        difference = (torch.from_numpy(state[name]) - after[name]).abs().max().item()
        scale = max(change.abs().max().item(), FLOOR * largest)
        worst = max(worst, max(difference - rounding, 0.0) / max(scale, 1e-30))
    return worst


def _names_of(parameter: Tensor, module: nn.Module) -> set[str]:
    return {name for name, other in module.named_parameters(remove_duplicate=False) if other is parameter}
