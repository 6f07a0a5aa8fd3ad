"""All operators of ai.onnx.ml that are rewritten, and the pass that does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir

from onward.graph.classical import encoders, linear, support_vectors, trees
from onward.graph.classical.rewriting import NodeRewriter, Rewritten, is_classical
from onward.graph.nodes.iteration import every_node
from onward.graph.nodes.node_writer import NodeFactory
from onward.graph.nodes.shape_inference import inferred_values
from onward.graph.nodes.structure import ML_DOMAIN, NEWEST_ML_OPSET

REWRITERS: Mapping[str, Callable[[NodeRewriter], None]] = {
    "Binarizer": encoders.rewrite_binarizer,
    "Imputer": encoders.rewrite_imputer,
    "LabelEncoder": encoders.rewrite_label_encoder,
    "LinearClassifier": linear.rewrite_linear_classifier,
    "LinearRegressor": linear.rewrite_linear_regressor,
    "Normalizer": encoders.rewrite_normalizer,
    "OneHotEncoder": encoders.rewrite_one_hot_encoder,
    "SVMClassifier": support_vectors.rewrite_svm_classifier,
    "SVMRegressor": support_vectors.rewrite_svm_regressor,
    "Scaler": linear.rewrite_scaler,
    "TreeEnsemble": trees.rewrite_tree_ensemble,
    "TreeEnsembleClassifier": trees.rewrite_tree_classifier,
    "TreeEnsembleRegressor": trees.rewrite_tree_regressor,
    "ZipMap": encoders.rewrite_zip_map,
}
"""Operator of ai.onnx.ml -> what writes it out; a node that it leaves in place is computed as it is."""

_OPSET = 18
"""Version of the standard domain for a model that imports ai.onnx.ml alone."""


def is_rewritten(domain: str, op_type: str) -> bool:
    """Whether an operator is written out before a model is lowered."""
    return domain == ML_DOMAIN and op_type in REWRITERS


def rewrite_classical(model: ir.Model) -> Rewritten:
    """Rewrites the nodes of ai.onnx.ml of a prepared model in place, those of nested graphs included.

    Raises:
        ModelError: the attributes of a node contradict each other.
    """
    done = Rewritten()
    nodes = [node for node in every_node(model.graph) if is_classical(node)]
    if not nodes:
        return done
    model.opset_imports.setdefault("", _OPSET)
    _declare_types(nodes)
    _infer_types(model)
    writer = NodeFactory(model)
    for node in nodes:
        if node.op_type in REWRITERS:
            REWRITERS[node.op_type](NodeRewriter(writer, node, done))
    _infer_types(model)
    return done


def _declare_types(nodes: Sequence[ir.Node]) -> None:
    """Types that the standard fixes, where neither the file nor ONNX's shape inference says them."""
    for node in nodes:
        schema = onnx.defs.get_schema(node.op_type, NEWEST_ML_OPSET, ML_DOMAIN)
        for value, formal in zip(node.outputs, schema.outputs, strict=False):
            if value.type is None and formal.type_str == "tensor(float)":
                value.type = ir.TensorType(ir.DataType.FLOAT)


def _infer_types(model: ir.Model) -> None:
    """Fills in types and shapes of the main graph's values, which converters leave out."""
    inferred = inferred_values(model)
    for node in model.graph:
        for value in node.outputs:
            known = inferred.get(str(value.name))
            if known is not None and known.type is not None:
                value.type = value.type or known.type
                if value.shape is None and known.shape is not None:
                    value.shape = ir.Shape([size if isinstance(size, int) else _own(size) for size in known.shape])


def _own(size: ir.SymbolicDim) -> ir.SymbolicDim | None:
    """A dimension with the name that the file gives it; shape inference makes up names of its own."""
    return None if size.value is None or size.value.startswith("unk__") else size
