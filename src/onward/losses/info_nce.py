"""InfoNCE (van den Oord et al., 2018; CLIP): embeddings that belong together, against all others of the batch.

The others are those of all replicas: each gathers the embeddings of all, so that replicas train as one process does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.errors import ModelError
from onward.losses.classes import Rows, count_correct, count_up, cross_entropy, describe_shape, known_size
from onward.losses.kind import LossKind

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter
    from onward.parameters import Parameters

GATHER_REPLICAS = "GatherReplicas"
"""Operator of the domain `onward.fused`: rows of all replicas, its own first; without replicas its input."""


def _add(writer: LossWriter) -> LossNames:
    spec = writer.spec
    first = writer.prediction("prediction", rank=2)
    second = writer.prediction("paired_prediction", rank=2)
    sizes = [known_size(value, 1) for value in (first, second)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ModelError(
            f"loss.prediction: {first.name!r} is {describe_shape(first)}, loss.paired_prediction: {second.name!r} is "
            f"{describe_shape(second)}; info_nce compares embeddings of one size. Name two outputs of the same size."
        )
    writer.compute_like(first)
    embeddings = [_unit_length(writer, writer.computed(value)) for value in (first, second)]
    rows = count_up(writer, embeddings[0], 0, known_size(first, 0), "own_rows")
    losses: list[ir.Value] = []
    counts: tuple[ir.Value, ...] = ()
    for own, other in [(0, 1), (1, 0)][: 2 if spec.symmetric else 1]:
        gathered = writer.apply_own("onward.fused", GATHER_REPLICAS, embeddings[other], name="of_all_replicas")
        products = writer.apply("MatMul", embeddings[own], writer.apply("Transpose", gathered, perm=[1, 0]))
        logits = Rows(writer.apply("Mul", products, _scale(writer), name="similarities"), None, flat=True)
        losses.append(cross_entropy(writer, logits, rows, None))
        counts = counts or count_correct(writer, logits, rows, None)
    total = losses[0]
    if spec.symmetric:
        total = writer.apply("Mul", writer.apply("Add", *losses), writer.number(0.5, "half"))
    return writer.finish(total, counts=counts)


def _unit_length(writer: LossWriter, value: ir.Value) -> ir.Value:
    """Rows divided by their lengths, as `torch.nn.functional.normalize` does it."""
    if not writer.spec.normalize_embeddings:
        return value
    squares = writer.sum_over(writer.apply("Mul", value, value), 1)
    length = writer.unsqueeze(writer.apply("Sqrt", writer.clip_to_positive(squares)), 1)
    return writer.apply("Div", value, length, name="unit_length")


def _scale(writer: LossWriter) -> ir.Value:
    """What similarities are multiplied by: the model's own, or the inverse of the temperature."""
    if writer.spec.logit_scale is None:
        return writer.number(1 / writer.spec.temperature, "inverse_temperature")
    scale = writer.prediction("logit_scale")
    if scale.shape is not None and any(size != 1 for size in scale.shape):
        raise ModelError(
            f"loss.logit_scale: {scale.name!r} is {describe_shape(scale)}; expected one number that similarities are "
            "multiplied by. Name another value, or set loss.temperature."
        )
    return writer.computed(scale)


def _find_problems(parameters: Parameters) -> list[str]:
    loss, path = parameters.loss, parameters.paths.model_with_training_graph_path
    problems = []
    if loss.logit_scale is not None and loss.temperature != type(loss)(type=loss.type).temperature:
        problems.append(
            f"loss.temperature is {loss.temperature:g} and loss.logit_scale is {loss.logit_scale!r}; both scale the "
            "similarities. Leave one out."
        )
    if path is not None and parameters.distributed.data_parallel_size > 1:
        problems.append(
            f"loss.type is 'info_nce', which gathers embeddings from all replicas, and an ONNX file is of one process: "
            f"write paths.model_with_training_graph_path {str(path)!r} in a run with data_parallel_size 1."
        )
    if parameters.distributed.context_parallel_size > 1:
        problems.append(
            "loss.type is 'info_nce', which compares the samples of all replicas, but replicas that share sequences "
            f"have the same. Set distributed.context_parallel_size to 1 (now "
            f"{parameters.distributed.context_parallel_size})."
        )
    return problems


INFO_NCE = LossKind(
    name="info_nce",
    add=_add,
    remark="contrastive: each embedding against those of all other samples, of all replicas",
    required=("prediction", "paired_prediction"),
    reads=("temperature", "logit_scale", "normalize_embeddings", "symmetric"),
    predictions=("prediction", "paired_prediction"),
    labels=(),
    find_problems=_find_problems,
    accuracy="retrieval_accuracy",
)
