"""Parameters of which a file holds several functions: each trains apart, with part of the gradient."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.weights.gradients import TRAINABLE_TYPES
from onward.graph.weights.stored_tensor import REARRANGING_CALL
from onward.spelling import shortened

_SHOWN = 4


def notes_on_split_parameters(graph: ir.Graph) -> tuple[str, ...]:
    """A sentence for each parameter that the file holds as it is, or rearranged, and computed with, too.

    `exp(w)` next to `w` is such; copies that are rearranged only are tied by now, and halves of one parameter have the
    gradients that they should have.
    """
    kinds = provenance.declared_kinds(graph)
    held: dict[str, list[ir.Value]] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in TRAINABLE_TYPES or not value.uses():
            continue
        is_parameter = value.metadata_props.get(provenance.KIND) == "PARAMETER"
        sources = (name,) if is_parameter else provenance.folded_sources(value)
        for source in dict.fromkeys(sources):
            if kinds.get(source) == "PARAMETER":
                held.setdefault(source, []).append(value)
    notes = []
    for parameter, values in held.items():
        computed = [value for value in values if _is_computed(value, parameter)]
        if len(values) > 1 and computed:
            names, folded = ([repr(str(value.name)) for value in some] for some in (values, computed))
            notes.append(
                f"the parameter {parameter!r} is stored {len(values)} times ({shortened(names, _SHOWN)}), "
                f"folded with constants at export ({shortened(folded, _SHOWN)}): "
                "each copy is trained separately, so gradients differ from those of the module. Export with "
                "torch.onnx.export(..., optimize=False) to store it once."
            )
    return tuple(notes)


def _is_computed(value: ir.Value, parameter: str) -> bool:
    """Whether a folded tensor is more than the parameter's own numbers in another order."""
    if provenance.KIND in value.metadata_props or REARRANGING_CALL.fullmatch(str(value.name)) is not None:
        return False
    assert value.const_value is not None
    array = np.asarray(value.const_value.numpy())
    if not array.any() or (array.size == 1 and _is_of_sizes(float(array.reshape(-1)[0]))):
        return False
    mark = provenance.placeholder(parameter)
    return not any(mark in provenance.called_parameters(use.node) for use in value.uses())


def _is_of_sizes(number: float) -> bool:
    """Whether a number is an integer, its root or the inverse of that: computed from a shape, as 1 / sqrt(d) is."""
    powers = [abs(number) ** exponent for exponent in (1, 2, 4)]
    both = [one for power in powers for one in (power, 1 / power)]
    return any(0.5 < one < 1e4 and abs(one - round(one)) < 1e-5 * one for one in both)
