"""Parameters that torch's exporter took for constants: a module that keeps them in a dict or list hides them.

The exporter then lifts the tensor itself out of each call, as `lifted_tensor_0`, `lifted_tensor_1`, ...
"""

from __future__ import annotations

import re
from collections.abc import Collection

import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.weights.gradients import TRAINABLE_TYPES
from onward.spelling import shortened

_LIFTED = re.compile(r"lifted_tensor_\d+$")
_SHOWN = 4


def is_lifted(name: str) -> bool:
    """Whether torch's exporter names tensors so that it lifted out of a call."""
    return _LIFTED.search(name) is not None


def lifted_parameters(graph: ir.Graph) -> frozenset[str]:
    """The lifted tensors that must be parameters, gone ones that others were folded from included.

    They must where the module declares parameters that the file does not have, and a node of the same module reads
    them; or where the module declares none at all.
    """
    kinds = provenance.declared_kinds(graph)
    lifted = [value for name, value in graph.initializers.items() if is_lifted(name) and _is_float(value)]
    if not lifted:
        return frozenset()
    declared = [name for name, kind in kinds.items() if kind == "PARAMETER"]
    present = set(graph.initializers)
    present.update(source for value in graph.initializers.values() for source in provenance.folded_sources(value))
    scopes = {name.rpartition(".")[0] for name in declared if name not in present}
    if declared:
        lifted = [
            value
            for value in lifted
            if any(provenance.has_scope(u.node) and provenance.module_scope(u.node) in scopes for u in value.uses())
        ]
    if not lifted:
        return frozenset()
    gone = {name for name in kinds if is_lifted(name) and name not in graph.initializers}
    return frozenset({str(value.name) for value in lifted} | gone)


def note_on_lifted(weights: Collection[str]) -> tuple[str, ...]:
    """A sentence on the weights that are lifted tensors."""
    names = [name for name in weights if is_lifted(name)]
    if not names:
        return ()
    return (
        f"{len(names)} weights ({shortened(map(repr, names), _SHOWN)}) lost their names at export: the module "
        "keeps its parameters in a dict or list, which torch.onnx.export treats as constants and folds where it "
        "can. They are trainable. Use torch.nn.ParameterDict or ParameterList to export all of them.",
    )


def _is_float(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype in TRAINABLE_TYPES and tensor.size > 1
