"""Models of one adapted weight each: every way in which nodes read weights, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass(frozen=True)
class Reading:
    """A weight `w`, the nodes that read it, and inputs.

    Attributes:
        weight: shape of `w`.
        nodes: between the inputs and `y`.
        inputs: name -> array.
        others: further initializers.
        delta: what A and B, times the scale, must add to the stored weight, in numpy; None: `B A`.
        domains: further opset imports.
    """

    weight: tuple[int, ...]
    nodes: list[onnx.NodeProto]
    inputs: dict[str, np.ndarray]
    others: dict[str, np.ndarray]
    delta: Callable[[np.ndarray, np.ndarray], np.ndarray]
    domains: tuple[str, ...] = ()

    def model(self, opset: int = 17) -> onnx.ModelProto:
        random = np.random.default_rng(3)
        stored = {"w": random.standard_normal(self.weight).astype(np.float32) * 0.3, **self.others}
        types = {np.dtype("float32"): TensorProto.FLOAT, np.dtype("int64"): TensorProto.INT64,
                 np.dtype("int32"): TensorProto.INT32, np.dtype("bool"): TensorProto.BOOL}  # fmt: skip
        graph = helper.make_graph(
            self.nodes,
            "one_weight",
            [helper.make_tensor_value_info(n, types[a.dtype], a.shape) for n, a in self.inputs.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in stored.items()],
        )
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in self.domains)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _node(op_type: str, *inputs: str, output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, list(inputs), [output], name=f"{op_type}_{output}", **attributes)


def _as_is(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return b @ a


def _turned(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.swapaxes(b @ a, -1, -2)


def _one(
    weight: tuple[int, ...],
    node: onnx.NodeProto | list[onnx.NodeProto],
    delta: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *arrays: np.ndarray,
    **others: np.ndarray,
) -> Reading:
    inputs = {f"x{index}" if index else "x": array for index, array in enumerate(arrays)}
    return Reading(weight, node if isinstance(node, list) else [node], inputs, others, delta)


def _branches() -> onnx.NodeProto:
    """An If, both branches of which multiply with the weight of the outer graph."""

    def branch(sign: str) -> onnx.GraphProto:
        nodes = [_node("MatMul", "x", "w", output=f"{sign}_p"), _node(sign, f"{sign}_p", output=f"{sign}_y")]
        return helper.make_graph(nodes, sign, [], [helper.make_tensor_value_info(f"{sign}_y", TensorProto.FLOAT, None)])

    return _node("If", "x1", then_branch=branch("Neg"), else_branch=branch("Abs"))


_ids = np.array([[1, 4, 4], [0, 6, 2]])
READINGS: dict[str, Reading] = {
    "MatMul": _one((5, 4), _node("MatMul", "x", "w"), _turned, _floats(2, 3, 5)),
    "MatMul with a bias": _one(
        (5, 4), [_node("MatMul", "x", "w", output="p"), _node("Add", "b", "p")], _turned, _floats(2, 3, 5),
        b=_floats(4),
    ),
    "MatMul from the left": _one((4, 5), _node("MatMul", "w", "x"), _as_is, _floats(2, 5, 3)),
    "Gemm": _one((5, 4), _node("Gemm", "x", "w", "b", alpha=0.5, beta=2.0), _turned, _floats(3, 5), b=_floats(4)),
    "Gemm transB": _one((4, 5), _node("Gemm", "x", "w", "b", transB=1), _as_is, _floats(3, 5), b=_floats(4)),
    "Gemm transA": _one((5, 4), _node("Gemm", "x", "w", transA=1), _turned, _floats(5, 3)),
    "Gemm from the left": _one((4, 5), _node("Gemm", "w", "x", alpha=3.0), _as_is, _floats(5, 3)),
    "Gemm from the left, both turned": _one(
        (5, 4), _node("Gemm", "w", "x", transA=1, transB=1), _turned, _floats(3, 5)
    ),
    "turned": _one(
        (4, 5), [_node("Transpose", "w", output="t"), _node("MatMul", "x", "t")], _as_is, _floats(2, 3, 5)
    ),
    "stack of experts": _one((3, 5, 4), _node("MatMul", "x", "w"), _turned, _floats(3, 2, 5)),
    "stack of turned experts": _one(
        (3, 4, 5), [_node("Transpose", "w", output="t", perm=[0, 2, 1]), _node("MatMul", "x", "t")], _as_is,
        _floats(3, 2, 5),
    ),
    "Einsum of experts": _one((3, 5, 4), _node("Einsum", "x", "w", equation="ebi,eio->ebo"), _as_is, _floats(3, 2, 5)),
    "Einsum from the left, turned": _one(
        (3, 4, 5), [_node("Transpose", "w", output="t", perm=[0, 2, 1]),
                    _node("Einsum", "t", "x", equation="eio,ebi->beo")], _turned, _floats(3, 2, 5),
    ),
    "Einsum along a stack": _one((3, 5, 4), _node("Einsum", "x", "w", equation="bh,hnd->bnd"), _as_is, _floats(2, 3)),
    "Conv": _one(
        (6, 3, 3, 2), _node("Conv", "x", "w", "b", strides=[2, 1], pads=[1, 0, 1, 1], dilations=[1, 2]),
        lambda a, b: np.einsum("orxy,rikl->oikl", b, a), _floats(2, 3, 7, 8), b=_floats(6),
    ),
    "Conv of one dimension": _one(
        (6, 3, 3), _node("Conv", "x", "w"), lambda a, b: np.einsum("orx,rik->oik", b, a), _floats(2, 3, 9)
    ),
    "Conv in groups": _one(
        (6, 2, 3, 3), _node("Conv", "x", "w", group=2), lambda a, b: (b @ a).reshape(6, 2, 3, 3), _floats(2, 4, 7, 8)
    ),
    "ConvTranspose": _one(
        (3, 6, 2, 2), _node("ConvTranspose", "x", "w"), lambda a, b: (b @ a).reshape(3, 6, 2, 2), _floats(2, 3, 4, 4)
    ),
    "Gather": _one((7, 4), _node("Gather", "w", "x"), _turned, _ids),
    "table tied to the output layer": _one(
        (7, 4),
        [_node("Gather", "w", "x", output="e"), _node("Tanh", "e", output="h"), _node("Transpose", "w", output="t"),
         _node("MatMul", "h", "t")],
        _turned, _ids,
    ),
    "output layer tied to a table": _one(
        (7, 4),
        [_node("Gemm", "x1", "w", output="l", transB=1), _node("Gather", "w", "x", output="e"),
         _node("ReduceSum", "e", output="s", keepdims=0), _node("Add", "l", "s")],
        _as_is, _ids, _floats(2, 4),
    ),
    "nested graphs": _one((5, 4), _branches(), _turned, _floats(2, 5), np.array(True)),
    "LSTM": _one(
        (1, 12, 5), _node("LSTM", "x", "w", "r", hidden_size=3), _as_is, _floats(4, 2, 5), r=_floats(1, 12, 3)
    ),
    "MoE": Reading(
        (3, 6, 4),
        [_node("MoE", "x", "x1", "w", "", "v", domain="com.microsoft", k=2, activation_type="silu",
               normalize_routing_weights=1)],
        {"x": _floats(5, 4), "x1": _floats(5, 3)}, {"v": _floats(3, 4, 6)}, _as_is, ("com.microsoft",),
    ),
    "fused attention": Reading(
        (8, 24), [_node("Attention", "x", "w", "b", domain="com.microsoft", num_heads=2)],
        {"x": _floats(2, 3, 8)}, {"b": _floats(24)}, _turned, ("com.microsoft",),
    ),
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "pissa": {"start": "pissa"},
    "gaussian": {"start": "gaussian"},
}
