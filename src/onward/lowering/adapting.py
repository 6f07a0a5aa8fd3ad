"""`onward.add_adapter`: low-rank adapters in a model file, or in a module that `to_torch` made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import onnx
import onnx_ir as ir
import torch

from onward.errors import ModelError
from onward.graph.adapters.passes import add_adapters
from onward.graph.adapters.runtime_graph import with_stored_adapters
from onward.graph.reading.model_file import ModelSource
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters.adapter import Adapter
from onward.parameters.limits import DEFAULT_LIMITS, Limits


@overload
def add_adapter(model: OnnxModule, rank: int = 8, **options: Any) -> OnnxModule: ...
@overload
def add_adapter(model: ir.Model, rank: int = 8, **options: Any) -> ir.Model: ...
@overload
def add_adapter(model: str | os.PathLike[str] | onnx.ModelProto, rank: int = 8, **options: Any) -> onnx.ModelProto: ...


def add_adapter(
    model: ModelSource | OnnxModule,
    rank: int = 8,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    seed: int = 0,
    limits: Limits = DEFAULT_LIMITS,
    **fields: Any,
) -> onnx.ModelProto | ir.Model | OnnxModule:
    """Adds low-rank adapters (LoRA): `<weight>.lora_A` and `<weight>.lora_B` next to each target.

    What the model computes changes only when they are trained.

    Args:
        model: a path, an `onnx.ModelProto` or an `onnx_ir.Model`, of which a copy is returned; or a module of
            `onward.to_torch`, whose weights are frozen and shared by the module that is returned.
        rank: of the two matrices.
        alpha: their product is multiplied by `alpha / rank`; None: by 1.
        dropout: fraction of a layer's input that its adapter does not see, in training.
        targets: names or `*`-patterns of initializers or module paths; empty: the linear layers of repeated blocks.
        seed: of what adapters begin as.
        limits: what a model file may ask of the machine.
        fields: further fields of the section `adapter` of a RUN.yaml: `rslora`, `dora`, `start`, `start_path`, `rules`,
            `train_too`, `module_prefix`.

    Returns:
        The model with adapters as initializers; or a module that trains its adapters and that `onward.export` merges.

    Raises:
        ModelError: a pattern matches nothing, or the model has adapters already.
        ParametersError: a field is unknown or impossible.
    """
    given = {"rank": rank, "alpha": alpha, "dropout": dropout, "targets": tuple(targets), **fields}
    settings = Adapter.from_fields(given)
    if isinstance(model, OnnxModule):
        return _in_module(model, settings, seed)
    if settings.dora or settings.start == "pissa":
        what = "dora" if settings.dora else "start='pissa'"
        raise ModelError(
            f"{what} changes more than a model file can hold in plain operators; pass the module that onward.to_torch "
            "makes of it, or set the same in the section adapter of a RUN.yaml."
        )
    graph = make_training_graph(model, adapter=settings, seed=seed, limits=limits)
    values = {name: _tensor(graph.model.graph, name) for one in graph.adapters.values() for name in one.names}
    adapted = with_stored_adapters(graph.source, graph.adapters, graph.ties, values, settings.dropout)
    return adapted if isinstance(model, ir.Model) else ir.to_proto(adapted)


def _tensor(graph: ir.Graph, name: str) -> ir.TensorProtocol:
    tensor = graph.initializers[name].const_value
    assert tensor is not None
    return tensor


def _in_module(net: OnnxModule, settings: Adapter, seed: int) -> OnnxModule:
    """A module with adapters that shares all tensors of `net`, whose weights get no gradient any more."""
    graph, own = net.graph, net.tensors_by_name()
    model = graph.model.clone()
    model.meta.update(graph.model.meta)
    for name in graph.weights:  # adapters begin with the weights as they are, which may have been trained
        value = model.graph.initializers.get(name)
        if value is not None:
            value.const_value = ir.tensor_adapters.TorchTensor(own[name].detach().cpu(), name=name)
    added = add_adapters(model, graph.weights, graph.frozen, graph.known_as, settings, seed)
    trained = [name for name in added.weights if name not in graph.weights]
    changed = replace(
        graph,
        model=model,
        weights=(*graph.weights, *trained),
        frozen=added.frozen,
        known_as=added.known_as,
        adapters=added.adapters,
    )
    adapted = OnnxModule(changed, context=net.context)
    _share(own, adapted, set(added.changed))
    for name in graph.weights:
        adapted.weights[name].requires_grad_(name in added.weights)
    return adapted.train(net.training)


def _share(tensors: Mapping[str, torch.Tensor], adapted: OnnxModule, changed: set[str]) -> None:
    """Lets a module have the tensors of another in place of its own copies, but for those that adapters changed."""
    for name in adapted.tensors_by_name():
        if name in tensors and name not in changed:
            adapted.place(name, tensors[name], name in adapted.graph.states)
