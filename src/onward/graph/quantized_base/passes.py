"""Frozen weights in fewer bits, ONNX to ONNX: the stored tensor replaced, and nodes that give back what it stands for.

Quantizing happens when a tensor is read, one at a time: the weights of a large model are never in memory together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.graph.nodes.node_writer import Attribute, NodeFactory
from onward.graph.packed_weights.blocks import pack_nibbles, quantize_integers, quantize_nf4
from onward.graph.quantized_base.choice import StoredBase
from onward.graph.reading.tensor_storage import close_file
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.frozen_weights import LARGEST_TABLE_ELEMENTS

NARROW = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT2: 2, ir.DataType.UINT2: 2}
"""Element types that ONNX packs, several a byte -> their bits."""


def store_frozen_weights(graph: TrainingGraph, base: StoredBase) -> TrainingGraph:
    """A graph whose frozen weights are stored as a run wants them, and integers of a file packed as the file has them.

    Args:
        graph: of a rank, or of one of its stages; it is left as it is.
        base: the choice for the entire graph.
    """
    initializers = graph.model.graph.initializers
    chosen = [name for name in base.axes if name in initializers]
    packed = [name for name, value in initializers.items() if _is_packable(value)]
    if not chosen and not packed:
        return graph
    model = graph.model.clone()
    writer = _Writer(model)
    for name in chosen:
        writer.store_narrow(model.graph.initializers[name], base)
    for name in packed:
        writer.pack(model.graph.initializers[name])
    return replace(graph, model=model)


def _is_packable(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype in NARROW and tensor.size > LARGEST_TABLE_ELEMENTS


class _Writer(NodeFactory):
    """Replaces initializers of one model."""

    def store_narrow(self, value: ir.Value, base: StoredBase) -> None:
        """Puts a weight's stored form in its place, and the nodes that compute it before its first reader."""
        tensor, readers = value.const_value, [(use.node, use.idx) for use in value.uses()]
        assert tensor is not None
        shape, axis = tuple(int(size) for size in tensor.shape.numpy()), base.axes[str(value.name)]
        if base.dtype == "bf16":
            read = _reading(tensor, lambda array: (array.astype(ml_dtypes.bfloat16),))
            (narrow,) = self._initializers(value, read, [("bf16", ir.DataType.BFLOAT16, shape)])
            self._cast_readers(value, narrow, readers)
        else:
            to_float = self._nf4 if base.dtype == "nf4" else self._integers
            result = to_float(value, tensor, shape, axis, base)
            if tensor.dtype is not ir.DataType.FLOAT:
                result = self._node("Cast", [result], value, shape, tensor.dtype, domain="", to=int(tensor.dtype))
            for node, index in readers:
                node.replace_input_with(index, result)
        self.graph.initializers.pop(str(value.name))

    def _integers(
        self, value: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...], axis: int, base: StoredBase
    ) -> ir.Value:
        bits = 8 if base.dtype == "int8" else 4

        def quantize(array: np.ndarray) -> tuple[np.ndarray, ...]:
            codes, scales = quantize_integers(array.astype(np.float32, copy=False), axis, base.block_size, bits)
            return (codes if bits == 8 else pack_nibbles(codes)), scales

        blocks = (*shape[:axis], -(-shape[axis] // base.block_size), *shape[axis + 1 :])
        is_packed = bits == 4
        dtype = ir.DataType.UINT8 if is_packed else ir.DataType.INT8
        size = (-(-math.prod(shape) // 2),) if is_packed else shape
        made = [("codes", dtype, size), ("scales", ir.DataType.FLOAT, blocks)]
        codes, scales = self._initializers(value, _reading(tensor, quantize), made)
        if is_packed:
            codes = self._unpack(codes, value, shape, ir.DataType.INT4)
        return self._node("DequantizeLinear", [codes, scales], value, shape, axis=axis, block_size=base.block_size)

    def _nf4(
        self, value: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...], axis: int, base: StoredBase
    ) -> ir.Value:
        order = [*(place for place in range(len(shape)) if place != axis), axis]  # blocks are along the last axis
        stored, elements = tuple(shape[place] for place in order), math.prod(shape)
        read = _reading(tensor, lambda array: quantize_nf4(array.transpose(order), base.block_size))
        made = [
            ("codes", ir.DataType.UINT8, (-(-elements // 2),)),
            ("scales", ir.DataType.FLOAT, (-(-elements // base.block_size),)),
        ]
        sources = self._initializers(value, read, made)
        result = self._node(
            "DequantizeBnb4", sources, value, stored, quant_type=1, block_size=base.block_size, shape=stored
        )
        if order == sorted(order):
            return result
        return self._node(
            "Transpose", [result], value, shape, domain="", perm=[order.index(i) for i in range(len(order))]
        )

    def _cast_readers(self, value: ir.Value, narrow: ir.Value, readers: Sequence[tuple[ir.Node, int]]) -> None:
        """Lookups give a few rows, which are cast afterwards; others read the cast weight."""
        assert value.dtype is not None
        cast = None
        for node, index in readers:
            if node.op_type == "Gather" and index == 0:
                node.replace_input_with(0, narrow)
                self._cast_rows(node.outputs[0], value.dtype)
            else:
                sizes = [int(size) for size in narrow.shape.numpy()] if narrow.shape is not None else []
                cast = cast or self._node("Cast", [narrow], value, sizes, value.dtype, domain="", to=int(value.dtype))
                node.replace_input_with(index, cast)

    def _cast_rows(self, rows: ir.Value, dtype: ir.DataType) -> None:
        """What a lookup gives, in the type that it had, under its name."""
        node = rows.producer()
        assert node is not None
        cast = self.new_node("Cast", [rows], f"{node.name}/cast", {"to": int(dtype)})
        cast.outputs[0].type = ir.TensorType(dtype)
        self.substitute(rows, cast.outputs[0], "/bf16")
        rows.type = ir.TensorType(ir.DataType.BFLOAT16)
        cast.replace_input_with(0, rows)
        self.graph.insert_after(node, cast)

    def pack(self, value: ir.Value) -> None:
        """Keeps a file's integers of 2 or 4 bits as the file packs them."""
        tensor, readers = value.const_value, [(use.node, use.idx) for use in value.uses()]
        assert tensor is not None
        shape = tuple(int(size) for size in tensor.shape.numpy())

        def read() -> tuple[np.ndarray, ...]:
            content = np.frombuffer(tensor.tobytes(), np.uint8)
            close_file(tensor)
            return (content,)

        made = [("packed", ir.DataType.UINT8, (tensor.nbytes,))]
        (packed,) = self._initializers(value, read, made)
        result = self._unpack(packed, value, shape, tensor.dtype)
        for node, index in readers:
            node.replace_input_with(index, result)
        self.graph.initializers.pop(str(value.name))

    def _unpack(self, packed: ir.Value, value: ir.Value, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        is_signed = int(dtype in (ir.DataType.INT4, ir.DataType.INT2))
        return self._node("Unpack", [packed], value, shape, dtype, bits=NARROW[dtype], signed=is_signed, shape=shape)

    def _initializers(
        self,
        value: ir.Value,
        read: Callable[[], tuple[np.ndarray, ...]],
        made: Sequence[tuple[str, ir.DataType, tuple[int, ...]]],
    ) -> list[ir.Value]:
        """New initializers that are read together."""
        both, found = _Together(read), []
        for place, (suffix, dtype, shape) in enumerate(made):
            name = self.unique(f"{value.name}/{suffix}")
            tensor = ir.LazyTensor(both.taking(place, dtype, name), dtype=dtype, shape=ir.Shape(shape), name=name)
            found.append(self.register_tensor(name, tensor))
        return found

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        value: ir.Value,
        sizes: Sequence[int],
        dtype: ir.DataType = ir.DataType.FLOAT,
        domain: str = FUSED,
        **attributes: Attribute,
    ) -> ir.Value:
        """A node that computes the weight `value`, or a step on the way; before all readers."""
        node = self.new_node(op_type, inputs, f"{value.name}/{op_type}", attributes, domain=domain)
        result = node.outputs[0]
        result.shape, result.type = ir.Shape(sizes), ir.TensorType(dtype)
        producers = [one.producer() for one in inputs]
        last = next((producer for producer in producers if producer is not None), None)
        if last is not None:
            self.graph.insert_after(last, node)
        else:
            users = {use.node for use in value.uses()}
            self.graph.insert_before(next(node for node in self.graph if node in users), node)
        return result


def _reading(
    tensor: ir.TensorProtocol, convert: Callable[[np.ndarray], tuple[np.ndarray, ...]]
) -> Callable[[], tuple[np.ndarray, ...]]:
    def read() -> tuple[np.ndarray, ...]:
        made = convert(tensor.numpy())
        close_file(tensor)
        return made

    return read


class _Together:
    """Arrays that one call makes and that are taken one after the other, each as often as it is asked for."""

    def __init__(self, read: Callable[[], tuple[np.ndarray, ...]]) -> None:
        self._read = read
        self._made: dict[int, np.ndarray] = {}

    def taking(self, place: int, dtype: ir.DataType, name: str) -> Callable[[], ir.TensorProtocol]:
        """A function that gives one of them, and reads them again where it was taken before."""

        def take() -> ir.TensorProtocol:
            if place not in self._made:
                self._made = dict(enumerate(self._read()))
            return ir.Tensor(self._made.pop(place), dtype=dtype, name=name)

        return take
