"""A quantized weight of a file read as numbers, and other numbers written in its place: same codes, blocks and nodes.

A block keeps its scale and zero point unless others are closer to the new numbers; those that others share are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onward.graph.nodes.known_values import integer
from onward.graph.packed_weights.blocks import BNB4_TABLES, in_blocks
from onward.graph.weights.quantized_weights import PACKED, UNPACKING

Array = NDArray[Any]
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Requantization:
    """How far new codes are from the numbers that they stand for.

    Attributes:
        weight: name of the codes.
        largest_error: of an element.
        mean_error: of all elements.
        largest_steps, mean_steps: the same in steps: the distance between the numbers of two codes, on average.
        changed: share of the codes that are others now.
    """

    weight: str
    largest_error: float
    mean_error: float
    largest_steps: float
    mean_steps: float
    changed: float


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """The numbers of a weight by what shares a scale: arrays of [blocks, elements], and of [blocks, 1].

    Attributes:
        codes: the stored numbers; of 4-bit floats, places in their table.
        scales, points: of the blocks; `points` is None where nothing is subtracted.
        table: what codes stand for before scaling; None: themselves.
        limits: least and greatest code.
        join: from [blocks, elements] to the shape of the weight.
        split: and back.
    """

    codes: NDArray[np.int64]
    scales: Floats
    points: Floats | None
    table: Floats | None
    limits: tuple[int, int]
    join: Callable[[Array], Array]
    split: Callable[[Array], Array]

    @property
    def step(self) -> float:
        """How far the numbers of two neighboring codes are apart before scaling, on average."""
        return 1.0 if self.table is None else float(np.ptp(self.table)) / (len(self.table) - 1)

    def numbers(self, codes: NDArray[np.int64], scales: Floats, points: Floats | None) -> Floats:
        """What codes stand for."""
        bare = codes.astype(np.float32) if self.table is None else self.table[codes]
        return np.asarray((bare if points is None else bare - points) * scales, np.float32)

    def nearest(self, numbers: Floats, scales: Floats, points: Floats | None) -> NDArray[np.int64]:
        """The codes that are closest to numbers."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(scales == 0, np.float32(0), numbers / scales)
        if self.table is not None:
            order = np.argsort(self.table, kind="stable")
            table = self.table[order]
            places = np.searchsorted((table[1:] + table[:-1]) / 2, scaled)
            return np.asarray(order[places], np.int64)
        shifted = np.rint(scaled if points is None else scaled + points)
        return np.asarray(np.clip(shifted, *self.limits), np.int64)

    def fitted(self, numbers: Floats, has_free_points: bool) -> tuple[Floats, Floats | None]:
        """Scales and zero points that cover the numbers of each block."""
        least, greatest = numbers.min(1, keepdims=True), numbers.max(1, keepdims=True)
        if self.table is not None:
            return np.maximum(np.abs(least), np.abs(greatest)), None
        low, high = self.limits
        if has_free_points:
            least, greatest = np.minimum(least, 0), np.maximum(greatest, 0)
            scales = np.asarray((greatest - least) / (high - low), np.float32)
            with np.errstate(divide="ignore", invalid="ignore"):
                points = np.where(scales == 0, np.float32(0), np.rint(low - least / scales))
            return scales, np.clip(points, low, high).astype(np.float32)
        middle = np.float32(0) if self.points is None else self.points
        with np.errstate(divide="ignore", invalid="ignore"):
            below, above = (np.nan_to_num(one / (end - middle)) for one, end in ((least, low), (greatest, high)))
        return np.asarray(np.maximum(below, above), np.float32), self.points


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A quantized weight of a graph.

    Attributes:
        name: of its codes.
        node: which dequantizes it.
        inputs: names of codes, scales and zero points, as far as they are stored.
        shape: of the weight that the codes stand for.
    """

    name: str
    node: ir.Node
    inputs: Mapping[str, str] = field(default_factory=dict)
    shape: tuple[int, ...]

    @property
    def replaced(self) -> tuple[str, ...]:
        """The initializers that other numbers change."""
        roles = [role for role in ("scales", "points") if self._owns("scales") and self._owns(role)]
        return (self.name, *(self.inputs[role] for role in roles))

    def matrix(self) -> Floats:
        """The numbers that it stands for."""
        blocks = self._blocks()
        return np.asarray(blocks.join(blocks.numbers(blocks.codes, blocks.scales, blocks.points)), np.float32)

    def requantized(self, matrix: Floats) -> tuple[dict[str, Array], Requantization]:
        """What is stored instead for other numbers, by name, and how far it is from them."""
        blocks = self._blocks()
        wanted = np.asarray(blocks.split(matrix), np.float32)
        scales, points = blocks.scales, blocks.points
        codes = blocks.nearest(wanted, scales, points)
        if self._owns("scales"):
            is_free = "points" in self.inputs and self._owns("points") and self._stored("points").dtype.is_integer()
            other_scales, other_points = blocks.fitted(wanted, is_free)
            other_scales = self._as_stored("scales", other_scales).astype(np.float32).reshape(-1, 1)
            other = blocks.nearest(wanted, other_scales, other_points)
            kept = np.square(blocks.numbers(codes, scales, points) - wanted).sum(1, keepdims=True)
            fitted = np.square(blocks.numbers(other, other_scales, other_points) - wanted).sum(1, keepdims=True)
            is_closer = fitted < kept
            codes, scales = np.where(is_closer, other, codes), np.where(is_closer, other_scales, scales)
            if points is not None and other_points is not None:
                points = np.where(is_closer, other_points, points)
        if blocks.table is not None:  # FP4 has two zeros
            codes = np.where(blocks.table[codes] == blocks.table[blocks.codes], blocks.codes, codes)
        numbers = np.asarray(blocks.join(blocks.numbers(codes, scales, points)), np.float32)
        error, changed = np.abs(numbers - matrix), blocks.join(codes != blocks.codes)
        steps = blocks.join(np.broadcast_to(np.abs(scales) * blocks.step, codes.shape))
        in_steps = np.divide(error, steps, out=np.zeros_like(error), where=steps > 0)
        report = Requantization(
            weight=self.name,
            largest_error=float(error.max(initial=0)),
            mean_error=float(error.mean()),
            largest_steps=float(in_steps.max(initial=0)),
            mean_steps=float(in_steps.mean()),
            changed=float(changed.mean()),
        )
        found: dict[str, Array] = {self.name: self._as_stored("codes", np.asarray(self._packed(blocks, codes)))}
        if self._owns("scales"):
            found[self.inputs["scales"]] = self._as_stored("scales", scales)
            if points is not None and "points" in self.inputs and self._owns("points"):
                found[self.inputs["points"]] = self._as_stored("points", points)
        return found, report

    def _value(self, role: str) -> ir.Value:
        value = self.node.inputs[_codes_input(self.node) + ("codes", "scales", "points").index(role)]
        assert value is not None
        return value

    def _stored(self, role: str) -> ir.TensorProtocol:
        tensor = self._value(role).const_value
        assert tensor is not None
        return tensor

    def _owns(self, role: str) -> bool:
        """Whether nobody else reads scales or zero points, and each is one of a block."""
        return role in self.inputs and len(self._value(role).uses()) == 1 and self._groups is None

    @property
    def _groups(self) -> ir.Value | None:
        """Which scale every element has, where they are not in blocks."""
        place = _codes_input(self.node) + 3
        return self.node.inputs[place] if place < len(self.node.inputs) and self._kind == "MatMulNBits" else None

    @property
    def _kind(self) -> str:
        """The operator of a file that has such codes."""
        return {"DequantizeNBits": "MatMulNBits", "DequantizeBnb4": "MatMulBnb4"}.get(
            self.node.op_type, self.node.op_type
        )

    def _as_stored(self, role: str, array: Array) -> Array:
        """Numbers of blocks in shape and type of what the file has."""
        tensor = self._stored(role)
        shape = tuple(int(size) for size in tensor.shape.numpy())
        if role == "points" and self._kind == "MatMulNBits" and tensor.dtype is ir.DataType.UINT8:
            bits = integer(self.node, "bits", 4)
            rows = unpack(tensor.numpy().reshape(self.shape[0], -1), bits)  # what fills up its last byte stays
            rows[:, : array.size // self.shape[0]] = array.reshape(self.shape[0], -1)
            array = pack(rows, bits)
        if array.dtype.kind == "f" and role != "scales" and tensor.dtype.is_integer():
            array = array.astype(np.int64)
        return array.reshape(shape).astype(tensor.dtype.numpy())

    def _blocks(self) -> _Blocks:
        read = {"DequantizeLinear": self._linear, "MatMulNBits": self._n_bits, "MatMulBnb4": self._bnb4}
        return read[self._kind]()

    def _packed(self, blocks: _Blocks, codes: NDArray[np.int64]) -> Array:
        if self._kind == "DequantizeLinear":
            return blocks.join(codes)
        if self._kind == "MatMulNBits":
            bits, stored = integer(self.node, "bits", 4), self._stored("codes").numpy()
            rows = unpack(stored.reshape(self.shape[0], -1), bits)
            rows[:, : self.shape[1]] = blocks.join(codes)
            return pack(rows, bits)
        flat = codes.reshape(-1).astype(np.uint8)[: self.shape[0] * self.shape[1]]
        flat = np.pad(flat, (0, flat.size % 2))
        return (flat[0::2] << np.uint8(4)) | flat[1::2]

    def _linear(self) -> _Blocks:
        codes, scales = self._stored("codes").numpy().astype(np.int64), self._stored("scales").numpy()
        points = self._stored("points").numpy().astype(np.float32) if "points" in self.inputs else None
        dtype, shape = self._stored("codes").dtype, codes.shape
        limits = {ir.DataType.INT4: (-8, 7), ir.DataType.UINT4: (0, 15), ir.DataType.INT2: (-2, 1),
                  ir.DataType.UINT2: (0, 3)}.get(dtype)  # fmt: skip
        if limits is None:
            limits = int(np.iinfo(dtype.numpy()).min), int(np.iinfo(dtype.numpy()).max)
        axis, size = integer(self.node, "axis", 1) % max(len(shape), 1), integer(self.node, "block_size", 0)
        if scales.size == 1:

            def split(x: Array) -> Array:
                return x.reshape(1, -1)

            def join(x: Array) -> Array:
                return x.reshape(shape)

        elif size:
            moved = np.moveaxis(in_blocks(codes, axis, size), axis + 1, -1).shape

            def split(x: Array) -> Array:
                return np.moveaxis(in_blocks(x, axis, size), axis + 1, -1).reshape(-1, size)

            def join(x: Array) -> Array:
                back = np.moveaxis(x.reshape(moved), -1, axis + 1)
                joined = back.reshape(*shape[:axis], -1, *shape[axis + 1 :])
                return np.take(joined, range(shape[axis]), axis)

        else:
            rest = np.moveaxis(codes, axis, 0).shape

            def split(x: Array) -> Array:
                return np.moveaxis(x, axis, 0).reshape(shape[axis], -1)

            def join(x: Array) -> Array:
                return np.moveaxis(x.reshape(rest), 0, axis)

        return _Blocks(
            codes=np.asarray(split(codes), np.int64),
            scales=scales.reshape(-1, 1).astype(np.float32),
            points=None if points is None else points.reshape(-1, 1),
            table=None,
            limits=limits,
            join=join,
            split=split,
        )

    def _n_bits(self) -> _Blocks:
        bits, size = integer(self.node, "bits", 4), integer(self.node, "block_size", 0)
        rows, columns = self.shape
        scales = self._stored("scales").numpy().reshape(rows, -1).astype(np.float32)
        codes = unpack(self._stored("codes").numpy().reshape(rows, -1), bits)[:, :columns].astype(np.int64)
        points = np.full(scales.shape, 2 ** (bits - 1), np.float32)
        if "points" in self.inputs:
            stored = self._stored("points").numpy()
            is_packed = stored.dtype == np.uint8
            given = unpack(stored.reshape(rows, -1), bits)[:, : scales.shape[1]] if is_packed else stored
            points = given.reshape(scales.shape).astype(np.float32)
        groups = self._groups
        if groups is not None and groups.const_value is not None:  # a block of its own for every element
            place = groups.const_value.numpy()[:columns].astype(np.int64)
            scales, points, size = scales[:, place], points[:, place], 1

        def split(x: Array) -> Array:
            return in_blocks(x, 1, size).reshape(-1, size)

        def join(x: Array) -> Array:
            return x.reshape(rows, -1)[:, :columns]

        return _Blocks(
            codes=np.asarray(split(codes), np.int64),
            scales=scales.reshape(-1, 1),
            points=points.reshape(-1, 1),
            table=None,
            limits=(0, 2**bits - 1),
            join=join,
            split=split,
        )

    def _bnb4(self) -> _Blocks:
        size, elements = integer(self.node, "block_size", 0), self.shape[0] * self.shape[1]
        stored = self._stored("codes").numpy().reshape(-1)
        codes = np.stack([stored >> 4, stored & 15], 1).reshape(-1)[:elements].astype(np.int64)

        def split(x: Array) -> Array:
            return in_blocks(x.reshape(-1), 0, size)

        def join(x: Array) -> Array:
            return x.reshape(-1)[:elements].reshape(self.shape)

        return _Blocks(
            codes=np.asarray(split(codes), np.int64),
            scales=self._stored("scales").numpy().reshape(-1, 1).astype(np.float32),
            points=None,
            table=np.asarray(BNB4_TABLES[integer(self.node, "quant_type", 1)], np.float32),
            limits=(0, 15),
            join=join,
            split=split,
        )


def _codes_input(node: ir.Node) -> int:
    return 1 if node.op_type in PACKED else 0


def find_stored_weight(graph: ir.Graph, name: str) -> StoredWeight | None:
    """The quantized weight whose codes are an initializer; None where it is none, or no single node dequantizes it."""
    value = graph.initializers[name]
    kinds = PACKED | UNPACKING | {"DequantizeLinear"}
    uses = [use for use in value.uses() if use.node.op_type in kinds and use.idx == _codes_input(use.node)]
    if len(uses) != 1 or len(value.uses()) != 1 or value.const_value is None:
        return None
    node, first = uses[0].node, uses[0].idx
    shape = tuple(int(size) for size in value.const_value.shape.numpy())
    if node.op_type in UNPACKING and node.outputs[0].shape is not None:
        shape = tuple(int(size) for size in node.outputs[0].shape.numpy())
    elif node.op_type != "DequantizeLinear":
        shape = (integer(node, "N", 0), integer(node, "K", 0))
        shape = shape if node.op_type == "MatMulNBits" or integer(node, "transB", 1) else shape[::-1]
    inputs = {"codes": name}
    for role, place in (("scales", first + 1), ("points", first + 2)):
        found = node.inputs[place] if place < len(node.inputs) else None
        if found is not None and found.const_value is None:
            return None
        if found is not None:
            inputs[role] = str(found.name)
    return StoredWeight(name=name, node=node, inputs=inputs, shape=shape)


def unpack(rows: Array, bits: int) -> NDArray[np.uint8]:
    """[..., bytes] -> [..., numbers], the low bits of a byte first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (rows[..., None] >> shifts) & np.uint8(2**bits - 1)
    return np.asarray(numbers.reshape(*rows.shape[:-1], -1), np.uint8)


def pack(rows: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """[..., numbers] -> [..., bytes], the low bits of a byte first."""
    each = 8 // bits
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % each)])
    parts = padded.reshape(*rows.shape[:-1], -1, each)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(parts << shifts, axis=-1), np.uint8)
