"""What the values of a graph are for inputs of given shapes: their own shapes, and the numbers of shape arithmetic.

They are found by running the graph's program on torch's fake tensors, which have shapes but no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from onward.errors import ModelError
from onward.graph.reading.expansion import expand_function_operators
from onward.graph.reading.tensor_storage import close_file
from onward.graph.training_graph import TrainingGraph
from onward.lowering.building.builder import build_program
from onward.lowering.building.specialization import _UNKNOWN, _is_host, _ShapeInterpreter
from onward.lowering.kernels.dtypes import TORCH_DTYPE, is_trainable, tensor_from_ir, torch_dtype
from onward.lowering.kernels.host import LARGEST_HOST_ELEMENTS, HostValue, host_shape
from onward.lowering.program import Program
from onward.lowering.registry import find_lowering


@dataclass(frozen=True)
class ValueFacts:
    """What is known of a graph's values without running it; what depends on data is absent.

    Attributes:
        shapes: name of a value of the main graph (inputs and initializers, too) -> its sizes.
        numbers: name of a value that is shape arithmetic -> its number or nested tuple of numbers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    numbers: Mapping[str, HostValue]


def find_value_facts(graph: TrainingGraph, input_shapes: Mapping[str, tuple[int, ...]]) -> ValueFacts:
    """Runs a graph on fake tensors.

    Operators that have no lowering of their own are expanded in `graph.model`, in place, as `OnnxModule` does.

    Args:
        graph: any training graph.
        input_shapes: name of every tensor input (labels included) -> sizes.

    Raises:
        ModelError: an input's shape is missing.
    """
    expand_function_operators(graph.model, lambda *operator: find_lowering(*operator) is not None)
    main = graph.model.graph
    small = small_tensors(graph)
    names = [str(value.name) for node in main for value in node.outputs if value.name]
    program = build_program(main, graph.model.opset_imports, small, names)
    shapes = {name: _shape_of(value) for name, value in main.initializers.items()}
    shapes.update({name: tuple(input_shapes[name]) for name in program.inputs if name in input_shapes})
    numbers: dict[str, HostValue] = {name: _numbers_of(tensor) for name, tensor in small.items()}
    for name, value in _run(program, graph, main, input_shapes, small).items():
        if isinstance(value, torch.Tensor):
            shapes[name] = tuple(int(size) for size in value.shape)
        elif _is_host(value):
            numbers[name] = value
            shapes[name] = host_shape(value)
    return ValueFacts(shapes, numbers)


def _run(
    program: Program,
    graph: TrainingGraph,
    main: ir.Graph,
    input_shapes: Mapping[str, tuple[int, ...]],
    small: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Name -> fake tensor or host value of every output of the program that could be computed."""
    device = torch.device("cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    by_name = {str(value.name): value for value in main.inputs}
    constants = {**program.attribute_tensors, **small}
    placeholders = [node for node in program.code.graph.nodes if node.op == "placeholder"]
    named = zip(placeholders[2 + len(program.inputs) :], program.tensors, strict=True)
    known = {placeholders[1]: device, **{node: constants[name] for node, name in named if name in constants}}
    interpreter = _ShapeInterpreter(program.code, known, mode)
    with mode, torch.no_grad():
        inputs: list[Any] = []
        for name in program.inputs:
            if isinstance(by_name[name].type, ir.TensorType) and name not in input_shapes:
                raise ModelError(f"the shape of the input {name!r} is missing; given: {', '.join(input_shapes)}.")
            declared = by_name[name].dtype
            dtype = torch.float32 if declared is None else torch_dtype(declared, f"input {name!r}")
            inputs.append(torch.empty(input_shapes[name], dtype=dtype) if name in input_shapes else _UNKNOWN)
        tensors: list[torch.Tensor] = []
        for name in program.tensors:
            if name in constants:
                tensors.append(mode.from_tensor(constants[name], static_shapes=True))
            else:
                stored = main.initializers[name].const_value
                assert stored is not None
                tensors.append(torch.empty(_shape_of(main.initializers[name]), dtype=TORCH_DTYPE[stored.dtype]))
        interpreter.run(False, device, *inputs, *tensors)
    (output,) = (node for node in program.code.graph.nodes if node.op == "output")
    found = {}
    for name, node in zip(program.outputs, output.args[0], strict=True):
        value = interpreter.env.get(node, _UNKNOWN) if isinstance(node, fx.Node) else node
        host = _host_source(node, interpreter)
        found[name] = value if host is _UNKNOWN else host
    return {name: value for name, value in found.items() if value is not _UNKNOWN}


def _host_source(node: Any, interpreter: _ShapeInterpreter) -> Any:
    """The numbers that a tensor was made of at the end of a program, where it is shape arithmetic."""
    if not isinstance(node, fx.Node) or getattr(node.target, "__name__", "") != "to_tensor":
        return _UNKNOWN
    return fx.node.map_arg(node.args[0], lambda source: interpreter.env.get(source, _UNKNOWN))


def small_tensors(graph: TrainingGraph) -> dict[str, torch.Tensor]:
    """Constants that may be part of shape arithmetic: few elements, of a type that Python numbers can hold."""
    found = {}
    for name, value in graph.model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.size > LARGEST_HOST_ELEMENTS or name in graph.weights or name in graph.states:
            continue
        if tensor.dtype.is_integer() or tensor.dtype is ir.DataType.BOOL or is_trainable(tensor.dtype):
            found[name] = materialize(value)
    return found


def materialize(value: ir.Value) -> torch.Tensor:
    """Copies an initializer out of its file, and closes the file again so that its pages can go."""
    assert value.const_value is not None
    tensor = tensor_from_ir(value.const_value, f"initializer {value.name!r}")
    close_file(value.const_value)
    return tensor


def _shape_of(value: ir.Value) -> tuple[int, ...]:
    stored = value.const_value
    assert stored is not None
    return tuple(int(size) for size in stored.shape.numpy())


def _numbers_of(tensor: torch.Tensor) -> HostValue:
    def frozen(value: Any) -> Any:
        return tuple(frozen(item) for item in value) if isinstance(value, list) else value

    return frozen(tensor.tolist())  # type: ignore[no-any-return]
