"""`generate_artifacts` with the arguments of `onnxruntime.training.artifacts`, which onnxruntime 1.20 removed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import onnx

from onward.device.bundle import device_graphs, why_no_bundle
from onward.device.bundle_files import save_bundle
from onward.errors import ParametersError
from onward.graph.reading.model_file import read_model
from onward.parameters import Parameters
from onward.parameters.limits import DEFAULT_LIMITS


class LossType(Enum):
    """The losses that `onnxruntime.training.artifacts` had; the value is the type of onward's."""

    MSELoss = "mean_squared_error"
    CrossEntropyLoss = "softmax_cross_entropy"
    BCEWithLogitsLoss = "binary_cross_entropy"
    L1Loss = "l1"


class OptimType(Enum):
    """The optimizers that `onnxruntime.training.artifacts` had; the value is the name of onward's."""

    AdamW = "AdamW"
    SGD = "SGDOptimizer"


def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: Any = None,
    optimizer: Any = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    label: str = "labels",
    learning_rate: float = 1e-3,
    gradient_accumulation_steps: int = 1,
    batch_size: int = 1,
    notify: Callable[[str], None] = lambda message: None,
) -> Path:
    """Writes a device bundle. `onward device RUN.yaml` can do more: schedules, clipping, every loss and optimizer.

    Args:
        model: the forward model.
        requires_grad: weights to train.
        frozen_params: weights not to train.
        loss: a `LossType`, or onnxruntime's; None: the first output is the loss.
        optimizer: an `OptimType`, or onnxruntime's; None: AdamW. AdamW has onnxruntime's epsilon (1e-6) and no decay.
        artifact_directory: where the bundle goes; None: the working folder.
        prefix: comes before the name of the folder, `bundle`.
        ort_format, custom_op_library, additional_output_names, nominal_checkpoint: refused, with what to do instead.
        loss_input_names: the output that is compared with the label; None: the first.
        label: the feature that it is compared with.
        learning_rate: of all updates.
        gradient_accumulation_steps: passes an update.
        batch_size: samples of a pass, for models whose batch is fixed.
        notify: takes what the user should know, one sentence a call.

    Returns:
        The folder of the bundle.

    Raises:
        ModelError: the model cannot be written in standard operators.
        ParametersError: an argument has no counterpart.
        StorageError: a file cannot be written.
    """
    _refuse(ort_format, custom_op_library, additional_output_names, nominal_checkpoint)
    with tempfile.TemporaryDirectory() as workplace:
        path = model
        if isinstance(model, onnx.ModelProto):
            path = Path(workplace) / "model.onnx"
            onnx.save(model, path)
        compared = (
            loss_input_names[0] if loss_input_names else str(read_model(path, DEFAULT_LIMITS).graph.outputs[0].name)
        )
        chosen = _chosen(optimizer, OptimType, "optimizer") if optimizer is not None else OptimType.AdamW
        rules = [{"epsilon": 1e-6}] if chosen is OptimType.AdamW else []
        parameters = Parameters.from_mapping(
            {
                "paths": {"model_path": os.path.abspath(path)},
                "loss": _loss(loss, compared, label),
                "training": {
                    "batch_size": batch_size,
                    "num_train_steps": gradient_accumulation_steps,
                    "gradient_accumulation_steps": gradient_accumulation_steps,
                    "weights_to_train": list(requires_grad or ()),
                    "weights_not_to_train": list(frozen_params or ()),
                },
                "optimizer": {"training_optimizer_name": chosen.value, "optimizer_attributes": rules},
                "learning_rate": {"initial_lr": learning_rate},
            }
        )
        if why := why_no_bundle(parameters):
            raise ParametersError(f"no device bundle can be written: {why}")
        graphs = device_graphs(parameters)
        for note in graphs.notes:
            notify(note)
        return save_bundle(graphs, Path(artifact_directory or ".") / f"{prefix}bundle")


def _loss(loss: Any, prediction: str, label: str) -> dict[str, Any]:
    if loss is None:
        return {"type": "output", "prediction": prediction}
    chosen = _chosen(loss, LossType, "loss")
    from_logits = {"from_logits": True} if chosen is LossType.BCEWithLogitsLoss else {}
    return {"type": chosen.value, "prediction": prediction, "label": label, **from_logits}


def _chosen(given: Any, kinds: type[Enum], argument: str) -> Enum:
    """The member of the name that a member of onnxruntime's enumeration has, too."""
    name = getattr(given, "name", given)
    if name not in kinds.__members__:
        raise ParametersError(
            f"{argument} is {given!r}; expected one of {', '.join(kinds.__members__)}. For any other, write a RUN.yaml "
            "and run `onward device`."
        )
    return kinds[name]


def _refuse(ort_format: bool, library: Any, outputs: Any, is_nominal: bool) -> None:
    told = {
        "ort_format is True; bundles are ONNX files, which every ONNX Runtime reads. Leave it out, or convert the "
        "files with onnxruntime.tools.convert_onnx_models_to_ort.": ort_format,
        "custom_op_library is given; operators of a library have no gradient. Leave it out.": bool(library),
        "additional_output_names are given; infer.onnx of a bundle has all outputs of the model. Leave them out.": bool(
            outputs
        ),
        "nominal_checkpoint is True; a bundle begins with the weights of the model. Leave it out.": is_nominal,
    }
    found = next((text for text, holds in told.items() if holds), None)
    if found is not None:
        raise ParametersError(found)
