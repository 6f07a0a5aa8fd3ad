"""What `benchmarks.census` trains: the architectures of the coverage table at widths and lengths of ordinary use.

Networks of `transformers` are made eight times as wide and their sequences nine times as long; images have twice the
rows and columns. The others are built by code that fixes their widths: of those only the batch grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from tests.lowering.architecture import Architecture, export_program
from tests.lowering.architectures import ARCHITECTURES
from tests.lowering.architectures_transformers import Made
from torch import Tensor, nn

from benchmarks.census_held_out import HELD_OUT

WIDER, LONGER, SHARPER, MORE_WORDS = 8, 9, 2, 20
WIDTHS = frozenset(
    [
        "hidden_size",
        "intermediate_size",
        "embedding_size",
        "n_embd",
        "d_model",
        "ffn_dim",
        "d_ff",
        "d_kv",
        "dim",
        "head_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "word_embed_proj_dim",
        "intra_bottleneck_size",
        "hidden_sizes",
        "neck_hidden_sizes",
        "embed_dim",
        "conv_dim",
        "decoder_hidden_size",
        "projection_dim",
        "rotary_dim",
        "groups_width",
        "state_size",
        "depth_multiplier",
        "depth_divisible_by",
        "min_depth",
    ]
)
LENGTHS = frozenset(
    [
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "context_length",
        "max_target_positions",
        "sliding_window",
        "window_size",
        "chunk_size",
        "local_attention",
    ]
)
UNROLLED = frozenset({"mamba", "rwkv"})
"""Their modules loop over the tokens in Python: the export has nodes for each token, so they stay short."""
LEFT_OUT = {
    "graph_net": "its inputs, nodes and edges, have no axis of samples in common",
    "relative_windows": "its outputs are of windows, several for each image, and have no axis of samples",
}
WINDOWS_OF_IMAGES = frozenset({"swin", "swinv2"})


def names(are_held_out: bool = False) -> list[str]:
    """Of all architectures that are measured, in the order of the table; or of the networks that are held out."""
    return [one.name for one in (HELD_OUT if are_held_out else ARCHITECTURES) if one.name not in LEFT_OUT]


def enlarged(name: str) -> Architecture:
    """An architecture of the table in the size that is measured, with the table's batch; one held out, as it is."""
    one = next(one for one in (*ARCHITECTURES, *HELD_OUT) if one.name == name)
    if one in HELD_OUT or not isinstance(one.make, Made):
        return one
    is_unrolled = name in UNROLLED
    settings = _enlarged_settings(one.make.settings, is_unrolled, name in WINDOWS_OF_IMAGES)
    inputs = tuple(x if is_unrolled else _enlarged_input(x) for x in one.inputs)
    return dataclasses.replace(one, make=dataclasses.replace(one.make, settings=settings), inputs=inputs)


def _enlarged_settings(settings: Mapping[str, Any], is_unrolled: bool, keeps_windows: bool) -> dict[str, Any]:
    result = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            value = _enlarged_settings(value, is_unrolled, keeps_windows)
        elif key in WIDTHS:
            value = type(value)(v * WIDER for v in value) if isinstance(value, list | tuple) else value * WIDER
        elif key == "vocab_size":
            value *= MORE_WORDS
        elif key in LENGTHS and not is_unrolled and not (keeps_windows and key == "window_size"):
            value *= LONGER
        elif key == "image_size":
            value *= SHARPER
        result[key] = value
    return result


def _enlarged_input(x: Tensor) -> Tensor:
    """Token ids and masks with more tokens, images with more pixels; signals as they are."""
    if x.dim() == 2 and not x.is_floating_point():
        return x.repeat_interleave(LONGER, 1)
    if x.dim() == 4:
        return x.repeat_interleave(SHARPER, 2).repeat_interleave(SHARPER, 3)
    return x


def build(one: Architecture) -> nn.Module:
    """The module by hand, ready to be trained as its export is: without dropout, with batch statistics.

    Every trained parameter differs a little from its initial value: the exporter merges initializers that are equal.
    """
    torch.manual_seed(0)
    module = one.make().eval()
    for layer in module.modules():
        layer.training = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    with torch.no_grad():
        for parameter in (one for one in module.parameters() if one.requires_grad):
            parameter.add_(torch.randn_like(parameter), alpha=1e-2 if parameter.dim() == 1 else 1e-4)
    return module


def draw_inputs(one: Architecture, batch: int, seed: int) -> tuple[Tensor, ...]:
    """Inputs of so many samples: numbers and token ids at random, masks as they are."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for x in one.inputs:
        if x.is_floating_point() and x.unique().numel() > 3:
            drawn.append(torch.randn((batch, *x.shape[1:]), generator=generator))
        elif x.dtype == torch.int64 and x.max() > 1:
            low, high = int(x.min()), int(x.max()) + 1
            drawn.append(torch.randint(low, high, (batch, *x.shape[1:]), generator=generator))
        else:
            repeats = (-(-batch // x.shape[0]), *(1,) * (x.dim() - 1))
            drawn.append(x.repeat(repeats)[:batch].contiguous())
    return tuple(drawn)


def has_classes(one: Architecture) -> bool:
    """Whether its first output is logits, trained by the cross entropy; else by the squared error."""
    return isinstance(one.make, Made) and one.make.fields[0].startswith("logits")


def draw_labels(one: Architecture, output: Tensor, seed: int) -> Tensor:
    """What the first output is compared with."""
    generator = torch.Generator().manual_seed(seed)
    if not has_classes(one):
        return torch.randn(output.shape, generator=generator)
    axis = class_axis(output)
    shape = [size for index, size in enumerate(output.shape) if index != axis]
    return torch.randint(0, output.shape[axis], shape, generator=generator)


def class_axis(output: Tensor) -> int:
    """Images of logits have their classes on axis 1, others on the last."""
    return 1 if output.dim() == 4 else output.dim() - 1


def loss_by_hand(one: Architecture, outputs: Any, labels: Tensor) -> Tensor:
    """The mean loss of the first output."""
    first: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    if not has_classes(one):
        return F.mse_loss(first, labels)
    if first.dim() == 4:
        return F.cross_entropy(first, labels)
    return F.cross_entropy(first.flatten(0, -2), labels.flatten())


def loss_fields(one: Architecture, prediction: str, rank: int) -> dict[str, Any]:
    """The same loss in a RUN.yaml, for a prediction of so many axes."""
    names = {"prediction": prediction, "label": "labels"}
    if not has_classes(one):
        return {"type": "mean_squared_error", **names}
    return {"type": "softmax_cross_entropy", "class_axis": 1 if rank == 4 else -1, **names}


def export(one: Architecture, module: nn.Module, batch: int) -> Any:
    """Today's export of a module, in this batch; axes that the table leaves open stay open."""
    program = export_program(module.eval(), dataclasses.replace(one, inputs=draw_inputs(one, batch, 0)))
    for layer in module.modules():
        layer.training = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    return program
