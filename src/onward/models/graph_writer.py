"""Writes an ONNX graph node by node, in order, with readable names and seeded initial weights.

Weights are made when they are read, one at a time: a model of many gigabytes can be written to disk without ever
being in memory in full.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

import onward
from onward.graph.nodes.node_writer import TakenNames, free_name

IR_VERSION = 10
"""Read by every onnxruntime from 1.18 on; newer ones add nothing that these graphs use."""

Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Makes the initial value of a weight of a shape, as float32."""


def normal(std: float) -> Fill:
    """Normally distributed around 0."""

    def fill(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(std)
        return values

    return fill


def uniform(bound: float) -> Fill:
    """Uniformly distributed in [-bound, bound)."""

    def fill(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = generator.random(shape, dtype=np.float32)
        values *= np.float32(2 * bound)
        values -= np.float32(bound)
        return values

    return fill


def constant(value: float) -> Fill:
    """The same number everywhere."""

    def fill(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, value, dtype=np.float32)

    return fill


class GraphWriter:
    """One graph being written. Names of weights, nodes and values carry the open scopes: `h.0.attn/Softmax`."""

    def __init__(self, name: str, opset: int, seed: int) -> None:
        self.opset = opset
        self._seed = seed
        self._scopes: list[str] = []
        self._names = TakenNames()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=name)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Weights and nodes written inside carry this name in front."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """An input of the graph; a named dimension is symbolic."""
        value = ir.Value(name=free_name(name, self._names), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return value

    def weight(self, name: str, shape: tuple[int, ...], fill: Fill) -> ir.Value:
        """A float32 initializer. Its values depend on the seed and on its full name alone."""
        full_name = free_name(".".join([*self._scopes, name]), self._names)
        key = [self._seed, zlib.crc32(full_name.encode())]

        def make() -> ir.TensorProtocol:
            return ir.Tensor(fill(np.random.default_rng(key), shape), name=full_name)

        tensor = ir.LazyTensor(make, ir.DataType.FLOAT, ir.Shape(shape), name=full_name)
        return self._initializer(full_name, tensor, shape)

    def integers(self, values: int | Sequence[int]) -> ir.Value:
        """An int64 constant; equal ones are one initializer."""
        return self._constant(np.asarray(values, dtype=np.int64))

    def number(self, value: float) -> ir.Value:
        """A rank-0 float32 constant; equal ones are one initializer."""
        return self._constant(np.asarray(value, dtype=np.float32))

    def declare(self, value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """States the type and shape of a value where inference cannot know them."""
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
        return value

    def op(self, op_type: str, *inputs: ir.Value | None, name: str | None = None, **attributes: Any) -> ir.Value:
        """A node with one output; `name` names that output."""
        return self.ops(op_type, *inputs, output_count=1, name=name, **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        output_count: int,
        name: str | None = None,
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """A node with several outputs."""
        node_name = free_name(f"{'.'.join(self._scopes)}/{op_type}" if self._scopes else op_type, self._names)
        suffixes = [""] if output_count == 1 else [f":{index}" for index in range(output_count)]
        names = [free_name(name or f"{node_name}_output{suffix}", self._names) for suffix in suffixes]
        outputs = [ir.Value(name=one) for one in names]
        found = [ir.convenience.convert_attribute(key, value) for key, value in attributes.items()]
        node = ir.Node("", op_type, list(inputs), found, outputs=outputs, name=node_name, version=None)
        self._graph.append(node)
        return node.outputs

    def finish(
        self, outputs: Sequence[tuple[ir.Value, Sequence[int | str]]], metadata: Mapping[str, str] | None = None
    ) -> ir.Model:
        """The model, its outputs (with their shapes) given, every value's type and shape inferred."""
        for value, shape in outputs:
            self._graph.outputs.append(self.declare(value, ir.DataType.FLOAT, shape))
        model = ir.Model(
            self._graph, ir_version=IR_VERSION, producer_name="onward", producer_version=onward.__version__
        )
        model.metadata_props.update(metadata or {})
        order = list(self._graph.initializers)
        passes.CheckerPass(full_check=True)(model)
        passes.ShapeInferencePass()(model)
        # Both take large initializers out and put them back at the end; readers expect the order of computation.
        for name in order:
            self._graph.initializers.add(self._graph.initializers.pop(name))
        return model

    def _constant(self, array: np.ndarray) -> ir.Value:
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            # Without dots, which would make "0" of "0.1" a folder of tensors in torch's naming of modules.
            kind = "number" if array.dtype == np.float32 else "integers" if array.shape else "integer"
            text = "_".join(f"{number:g}".replace(".", "p") for number in array.reshape(-1).tolist())
            name = free_name(f"{kind}_{text}", self._names)
            self._constants[key] = self._initializer(name, ir.Tensor(array, name=name), array.shape)
        return self._constants[key]

    def _initializer(self, name: str, tensor: ir.TensorProtocol, shape: tuple[int, ...]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=tensor)
        self._graph.register_initializer(value)
        return value
