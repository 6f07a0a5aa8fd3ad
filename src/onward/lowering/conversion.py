"""`onward.to_torch`: an ONNX file becomes a `torch.nn.Module`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from onward.errors import ModelError, ParametersError
from onward.graph.reading.model_file import ModelSource
from onward.graph.reading.widening import widen_to_float32
from onward.graph.rebatching.passes import NotRebatched, fixed_batch_size
from onward.graph.training_graph import make_training_graph
from onward.lowering.inspection import why_not_lowered
from onward.lowering.module import OnnxModule
from onward.lowering.rebatching_proof import prove_rebatching
from onward.parameters.adapter import Adapter
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.parameters.training import DropoutRule


def to_torch(
    model: ModelSource,
    *,
    weights_to_train: Sequence[str] = (),
    weights_not_to_train: Sequence[str] = (),
    tied_weights: Sequence[str] = (),
    untied_weights: Sequence[str] = (),
    revive_dropout: Sequence[DropoutRule] = (),
    fuse: bool = True,
    fusions_off: Collection[str] = (),
    fixed_inputs: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = None,
    any_batch_size: bool = False,
    adapter: Adapter | None = None,
    seed: int = 0,
    limits: Limits = DEFAULT_LIMITS,
) -> OnnxModule:
    """Turns an ONNX model into a torch module that computes and trains it.

    Args:
        model: path of an `.onnx` file, an `onnx.ModelProto`, or an `onnx_ir.Model`; opset 7 or newer.
        weights_to_train: exact names or `*`-patterns, of initializers or module paths; empty: all that can train.
        weights_not_to_train: exact names or patterns taken out again.
        tied_weights: patterns of initializers, read by several layers, that stay shared.
        untied_weights: patterns of initializers, read by several layers, that become one weight for each, and of
            those that are not tied to others by equal numbers alone.
        revive_dropout: rules by which dropout that an export left out is put back, for `net.train()` only.
        fuse: compute attention, norms, activations and rotary embeddings in one call each where the model writes
            them out, but for `fusions_off`; without it, gradients of gradients exist wherever operators have any.
        fixed_inputs: input -> the number that fills it; the module has no such input, the exported model keeps it.
        dtype: `torch.float32` turns the fp16 and bf16 of a file into fp32 throughout: weights, computation, outputs.
            Inputs may have the file's types or fp32; under `torch.autocast` the same fp32 weights compute in lower
            precision. `onward.export` writes the file's own types back. None: as the file has it.
        any_batch_size: where the export fixed the batch size, rewrite the graph for any, as a run does; samples
            computed together and one by one prove that they stay independent. `onward.export` writes the file's size.
        adapter: freeze the weights and train adapters next to them (`onward.parameters.Adapter`, with a rank).
        seed: of what adapters begin as.
        limits: what the model may ask of the machine.

    Returns:
        A module in evaluation mode: `net(*inputs)` gives a tensor, or a tuple of tensors in graph order; `net.weights`
        maps initializer names to parameters; `net.train()` turns dropout and batch statistics on.

    Raises:
        ModelError: the model is missing, broken, of an unknown opset, or cannot have another batch size.
        OperatorError: operators without a lowering, all of them, with node names.
        ParametersError: another `dtype`.

    Warns:
        UserWarning: trainable weights are fp16, in which most optimizers fail.
    """
    _check_dtype(dtype)
    read = partial(
        make_training_graph,
        model,
        weights_to_train=weights_to_train,
        weights_not_to_train=weights_not_to_train,
        tied_weights=tied_weights,
        untied_weights=untied_weights,
        revive_dropout=revive_dropout,
        fuse=fuse,
        fusions_off=fusions_off,
        fixed_inputs=fixed_inputs,
        why_not_lowered=why_not_lowered,
        adapter=adapter,
        seed=seed,
        limits=limits,
    )
    graph = read()
    if any_batch_size and (fixed := fixed_batch_size(graph.source.graph)) is not None:
        _prove(model, fixed, fixed_inputs, limits)
        graph = read(rebatch=True)
    if not graph.weights and graph.frozen and not weights_not_to_train:
        warnings.warn(graph.why_nothing_trains(), stacklevel=2)
    if dtype is not None:
        widen_to_float32(graph.model)
    return _warned_of_float16(OnnxModule(graph))


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.float32):
        raise ParametersError(f"dtype is {dtype!r}; pass torch.float32, or leave it out for the file's own types.")


def _prove(model: ModelSource, fixed: int, fixed_inputs: Mapping[str, float] | None, limits: Limits) -> None:
    """Refuses a model that cannot compute other numbers of samples than its export fixed."""
    try:
        prove_rebatching(model, fixed_inputs, limits)
    except NotRebatched as error:
        raise ModelError(
            f"any_batch_size is set, but the batch size in the model is fixed to {fixed}, and the graph cannot be "
            f"rewritten for another, because {error}. Pass batches of {fixed} and accumulate their gradients, or "
            "export the model with a dynamic batch axis (dynamic_shapes of torch.onnx.export)."
        ) from error


def _warned_of_float16(net: OnnxModule) -> OnnxModule:
    narrow = [name for name, weight in net.weights.items() if weight.dtype is torch.float16]
    if narrow:
        warnings.warn(
            f"{len(narrow)} of the {len(net.weights)} trainable weights are fp16, the first {narrow[0]!r}. In your own "
            "training loop small updates are rounded away, and Adam gives NaN within a few steps, since its eps is 0 "
            "in fp16. Pass dtype=torch.float32 to onward.to_torch to train in fp32; onward.export writes fp16 back. "
            "To "
            'compute without training, pass weights_not_to_train=["*"].',
            stacklevel=3,
        )
    return net
