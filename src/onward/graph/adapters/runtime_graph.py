"""The user's own graph with adapters: as optional inputs, for ONNX Runtime's `.onnx_adapter` files, or as initializers.

Without an adapter the inputs are zeros, and the graph computes what it did; with one, what the merged model would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.branches import Branches, operand_type
from onward.graph.adapters.inserting import Inserter
from onward.graph.adapters.uses import Use, uses_of
from onward.graph.repair.split_weights import Tie

RANK = "lora_rank"
"""The open dimension of an adapter's rank: adapters of one base may differ in it."""


def with_optional_adapters(
    source: ir.Model, adapters: Mapping[str, AdaptedWeight], ties: Mapping[str, Tie], full: Collection[str] = ()
) -> ir.Model:
    """A copy of a user's graph that takes adapters as inputs, `<weight>.lora_A` and `<weight>.lora_B`, B scaled.

    Args:
        source: the user's own graph.
        adapters: the adapted weights.
        ties: copies of weights in the graph.
        full: stored tensors that are inputs, too, and have their values where none are given.

    Raises:
        ModelError: a weight is not stored in the main graph as it is trained.
    """
    unscaled = {name: replace(adapted, scale=1.0) for name, adapted in adapters.items()}
    model = _with_branches(source, unscaled, ties, _optional_input, 0.0)
    for name in full:
        if name not in model.graph.initializers:
            raise ModelError(
                f"{name!r}, which is trained in full, cannot be an input of the graph, since it is no initializer of "
                "the main graph in the file. Write 'merged' or 'peft' instead of 'onnx_adapter'."
            )
        if not model.graph.initializers[name].is_graph_input():
            model.graph.inputs.append(model.graph.initializers[name])
    model.ir_version = max(model.ir_version or 4, 4)
    return model


def with_stored_adapters(
    source: ir.Model,
    adapters: Mapping[str, AdaptedWeight],
    ties: Mapping[str, Tie],
    values: Mapping[str, ir.TensorProtocol],
    dropout: float,
) -> ir.Model:
    """A copy of a user's graph with adapters as initializers, which any program trains or merges.

    Args:
        source, adapters, ties: as `with_optional_adapters`.
        values: what the adapters begin as.
        dropout: on the adapters' side, in training.

    Raises:
        ModelError: a weight is not stored in the main graph as it is trained.
    """

    def add(inserter: Inserter, adapted: AdaptedWeight, name: str, dtype: ir.DataType) -> ir.Value:
        return inserter.add_tensor(name, ir.Tensor(values[name].numpy(), dtype=dtype, name=name))

    return _with_branches(source, adapters, ties, add, dropout)


_AddTensor = Callable[[Inserter, AdaptedWeight, str, ir.DataType], ir.Value]


def _with_branches(
    source: ir.Model,
    adapters: Mapping[str, AdaptedWeight],
    ties: Mapping[str, Tie],
    add: _AddTensor,
    dropout: float,
) -> ir.Model:
    model = source.clone()
    model.meta.update(source.meta)
    inserter = Inserter(model)
    for name, adapted in adapters.items():
        places = [(name, False), *((copy, _is_turned(copy, tie)) for copy, tie in ties.items() if tie.weight == name)]
        found = [(model.graph.initializers.get(copy), is_turned) for copy, is_turned in places]
        uses = [_turned(use) if is_turned else use for value, is_turned in found for use in _uses(value, model, name)]
        weight = found[0][0]
        assert weight is not None
        dtype = operand_type(uses[0], weight)
        names = (adapted.a, adapted.b, *([adapted.factor] if adapted.has_magnitude else []))
        tensors = {one: add(inserter, adapted, one, dtype) for one in names}
        branches = Branches(inserter, adapted, tensors, dtype, dropout)
        for use in uses:
            branches.add(use, use.node)
    return model


def _is_turned(copy: str, tie: Tie) -> bool:
    permutation = tie.how.permutation
    if tie.how.elements is None and tie.how.shape is None:
        if tie.how.is_identity:
            return False
        if permutation == (*range(len(permutation) - 2), len(permutation) - 1, len(permutation) - 2):
            return True
    raise ModelError(
        f"the adapter of {tie.weight!r} cannot be an input of the graph, since the file holds the weight again, "
        f"{tie.relation}, as {copy!r}. Write 'merged' or 'peft' instead of 'onnx_adapter'."
    )


def _turned(use: Use) -> Use:
    return replace(use, outputs_first=not use.outputs_first, is_turned=not use.is_turned)


def _uses(value: ir.Value | None, model: ir.Model, name: str) -> list[Use]:
    if value is None or value.const_value is None:
        raise ModelError(
            f"the adapter of {name!r} cannot be an input of the graph, since the weight is no initializer of the main "
            "graph in the file. Write 'merged' or 'peft' instead of 'onnx_adapter'."
        )
    order = {node: index for index, node in enumerate(model.graph)}
    return sorted(uses_of(value, model.graph), key=lambda use: order.get(use.node, len(order)))


def _optional_input(inserter: Inserter, adapted: AdaptedWeight, name: str, dtype: ir.DataType) -> ir.Value:
    """An initializer of zeros and rank 1 that is an input, too, of any rank; factors are ones."""
    if name == adapted.factor:
        ones = np.ones(adapted.shapes[adapted.magnitude], dtype.numpy())
        inserter.graph.inputs.append(value := inserter.add_tensor(name, ir.Tensor(ones, dtype=dtype, name=name)))
        return value
    shape, axis = list(adapted.shapes[name]), adapted.rank_axes[name]
    zeros = [1 if place == axis else size for place, size in enumerate(shape)]
    value = inserter.add_tensor(name, ir.Tensor(np.zeros(zeros, dtype.numpy()), dtype=dtype, name=name))
    value.shape = ir.Shape([RANK if place == axis else size for place, size in enumerate(shape)])
    inserter.graph.inputs.append(value)
    return value
