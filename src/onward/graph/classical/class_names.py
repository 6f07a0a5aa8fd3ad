"""The names that a classifier gives to its classes: of `ZipMap`, of classifiers of ai.onnx.ml, of a looked-up table."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.iteration import every_node
from onward.graph.nodes.structure import ML_DOMAIN

_ATTRIBUTES = ("classlabels_strings", "classlabels_int64s", "classlabels_ints")


def find_class_names(model: ir.Model) -> tuple[str, ...]:
    """The names in the order of the classes, whole numbers as text; none where the file holds none."""
    for node in every_node(model.graph):
        if node.domain != ML_DOMAIN:
            continue
        for name in _ATTRIBUTES:
            attribute = node.attributes.get(name)
            if attribute is None:
                continue
            if found := tuple(
                str(one) for one in (attribute.as_strings() if "strings" in name else attribute.as_ints())
            ):
                return found
        if node.op_type == "ArrayFeatureExtractor" and node.inputs[0] is not None:
            table = ir.convenience.get_const_tensor(node.inputs[0])
            if table is not None and table.dtype in (ir.DataType.STRING, ir.DataType.INT64, ir.DataType.INT32):
                return tuple(one.decode() if isinstance(one, bytes) else str(one) for one in table.numpy().reshape(-1))
    return ()
