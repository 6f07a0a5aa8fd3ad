"""ATen code of segments in ONNX, by torch's exporter; its own tracing, which takes most of its time, is left out.

The exporter takes an `ExportedProgram`, and decomposes it by tracing it anew, twice. The code here is a trace already,
of sizes that may be open: it becomes such a program as it is, and only what has operators that ONNX lacks is traced
once more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.experimental.proxy_tensor import make_fx

from onward.artifacts.backward_decompositions import COMPLEX_DECOMPOSITIONS
from onward.artifacts.joint_segments import SegmentCode
from onward.errors import ModelError, chain_of

aten = torch.ops.aten


def translate(codes: Sequence[SegmentCode], opset: int) -> ir.Model:
    """Code of segments in ONNX, next to each other, since the exporter takes long to begin with.

    Returns:
        A model with the inputs and outputs of all codes in order, under names of the exporter's.

    Raises:
        ModelError: an operator cannot be written in ONNX.
    """
    with _quiet():
        try:
            program = torch.onnx.export(
                _program_of(codes), dynamo=True, opset_version=opset, optimize=False, verbose=False
            )
        except torch.onnx.OnnxExporterError as error:
            raise ModelError(
                "the training graph cannot be written in standard ONNX operators. torch's exporter reports: "
                f"{_untranslated(error)}. Train this model with `onward train`, which needs none."
            ) from error
    from onward.artifacts.simplification import simplify  # onnxscript takes long to import, as the exporter does

    assert program is not None
    simplify(program.model)
    return program.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's talk on the screen; what matters comes as exceptions."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _untranslated(error: BaseException) -> str:
    """The innermost cause of a failed export, in one line."""
    *_, first = chain_of(error, only_causes=True)
    return str(first).strip().split("\n", 1)[0].removesuffix(".")


def _program_of(codes: Sequence[SegmentCode]) -> ExportedProgram:
    if any(code.has_loops for code in codes):
        return _retraced(codes)
    return _TracedProgram.of(codes)


class _SideBySide(torch.nn.Module):
    """Code of segments that have nothing to do with each other."""

    def __init__(self, codes: Sequence[SegmentCode]) -> None:
        super().__init__()
        self.codes = torch.nn.ModuleList(code.code for code in codes)
        self.counts = [len(code.examples) for code in codes]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, rest = list[torch.Tensor](), list(inputs)
        for code, count in zip(self.codes, self.counts, strict=True):
            results += code(*rest[:count])
            rest = rest[count:]
        return tuple(results)


def _retraced(codes: Sequence[SegmentCode]) -> ExportedProgram:
    """The program as torch exports it: code with loops has graphs inside, which it decomposes, too."""
    examples = [example for code in codes for example in code.examples]
    dynamic = tuple(
        {
            axis: torch.export.Dim.DYNAMIC
            for axis, size in enumerate(tuple[Any, ...](example.shape))
            if isinstance(size, torch.SymInt)
        }
        for example in examples
    )
    arguments = tuple(map(_allocated, examples))
    exported = torch.export.export(_SideBySide(codes), arguments, dynamic_shapes=(dynamic,), strict=False)
    _sort_without_asking_for_stability(exported.graph)
    return exported


def _allocated(fake: torch.Tensor) -> torch.Tensor:
    """A tensor with memory, of the layout of one that has none; what is in it does not matter."""
    sizes, strides = ([_hint(size) for size in sizes] for sizes in (fake.shape, fake.stride()))
    return torch.empty_strided(sizes, strides, dtype=fake.dtype)


class _TracedProgram(ExportedProgram):
    """A program of code that is traced; the operators that ONNX lacks are written out where there are any."""

    codes: Sequence[SegmentCode]

    @classmethod
    def of(cls, codes: Sequence[SegmentCode]) -> _TracedProgram:
        """The program that computes all codes next to each other."""
        graph, constants, inputs, outputs = fx.Graph(), dict[str, Any](), list[InputSpec](), list[Any]()
        placeholders = [
            [graph.placeholder(f"input_{number}_{place}") for place in range(len(code.examples))]
            for number, code in enumerate(codes)
        ]
        for code, given in zip(codes, placeholders, strict=True):
            _write_sizes_out(code.code.graph)
            _sort_without_asking_for_stability(code.code.graph)
            for node, example in zip(given, code.examples, strict=True):
                node.meta["val"] = example
                inputs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None))
        stored = dict[str, fx.Node]()
        for number, code in enumerate(codes):
            for node in code.code.graph.find_nodes(op="get_attr"):
                name = f"constant_{number}_{len(constants)}"
                constants[name] = getattr(code.code, str(node.target))
                stored[f"{number}.{node.target}"] = placeholder = graph.placeholder(name)
                placeholder.meta["val"] = node.meta.get("val", constants[name])
                inputs.append(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(placeholder.name), name))
        for number, (code, given) in enumerate(zip(codes, placeholders, strict=True)):
            _append(graph, code.code.graph, given, stored, number, outputs)
        graph.output(tuple(outputs))
        specs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in outputs]
        program = cls(
            root=torch.nn.Module(),
            graph=graph,
            graph_signature=ExportGraphSignature(inputs, specs),
            state_dict={},
            range_constraints={},
            module_call_graph=[ModuleCallEntry(fqn="", signature=None)],
            constants=constants,
        )
        program.codes = codes
        return program

    def validate(self) -> None:
        """Not done: what changes tensors in place goes with the operators that ONNX lacks, in one trace."""

    def run_decompositions(
        self, decomp_table: dict[Any, Callable[..., Any]] | None = None, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        """The program with only such operators as the table does not list."""
        table = decomp_table or {}
        codes = [replace(code, code=_written_out(code, table)) for code in self.codes]
        changed = any(new.code is not old.code for new, old in zip(codes, self.codes, strict=True))
        return _TracedProgram.of(codes) if changed else self


def _append(
    graph: fx.Graph,
    code: fx.Graph,
    given: Sequence[fx.Node],
    stored: Mapping[str, fx.Node],
    number: int,
    outputs: list[Any],
) -> None:
    """Copies the nodes of code to a graph, without those that change nothing."""
    places, copies = iter(given), dict[fx.Node, Any]()
    for node in code.nodes:
        if node.op == "placeholder":
            copies[node] = next(places)
        elif node.op == "get_attr":
            copies[node] = stored[f"{number}.{node.target}"]
        elif node.op == "output":
            outputs += [copies[result] for result in node.args[0]]
        elif "val" not in node.meta and not node.users:
            continue  # a gradient that was not asked for: none of an operator's several results
        elif node.target in (aten.detach.default, aten.alias.default):
            copies[node] = copies[node.args[0]]
        else:
            copies[node] = graph.node_copy(node, lambda source: copies[source])


def _written_out(code: SegmentCode, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """Code without operators that the table lists, and without such as change tensors in place."""
    targets = {node.target for node in code.code.graph.nodes if node.op == "call_function"}
    if not any(target in table or _changes_in_place(target) for target in targets):
        return code.code
    function = torch.func.functionalize(code.code, remove="mutations")
    written = {**table, **COMPLEX_DECOMPOSITIONS}
    return make_fx(function, decomposition_table=written, tracing_mode="symbolic")(*code.examples)


def _write_sizes_out(graph: fx.Graph) -> None:
    """The exporter knows the size of an axis, not the count of elements nor strides: these are products of sizes."""
    for target in (aten.sym_numel.default, aten.sym_stride.int):
        for node in graph.find_nodes(op="call_function", target=target):
            tensor: Any = node.args[0]
            shape, strides = tensor.meta["val"].shape, tensor.meta["val"].stride()
            axes = list(range(len(shape)))
            if target is aten.sym_stride.int:
                own = strides[node.args[1]]
                axes = [axis for axis in axes if _hint(strides[axis]) < _hint(own) and shape[axis] != 1]
                assert math.prod(shape[axis] for axis in axes) == own, "a tensor of which every element is stored once"
            with graph.inserting_before(node):
                product: Any = 1
                for axis in axes:
                    size = shape[axis]
                    if isinstance(size, torch.SymInt):
                        size = graph.call_function(aten.sym_size.int, (tensor, axis))
                        size.meta["val"] = shape[axis]
                    product = _times(graph, product, size)
            node.replace_all_uses_with(product)
            graph.erase_node(node)


def _times(graph: fx.Graph, left: fx.Node | int, right: fx.Node | int) -> fx.Node | int:
    values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in (left, right)]
    if not any(isinstance(one, fx.Node) for one in (left, right)) or left == 1:
        return right if left == 1 else math.prod(values)
    made = graph.call_function(operator.mul, (left, right))
    made.meta["val"] = math.prod(values)
    return made


def _hint(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _changes_in_place(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _sort_without_asking_for_stability(graph: fx.Graph) -> None:
    """The exporter translates plain sorting alone, by TopK, which is stable: of equal values the first comes first."""
    for node in graph.find_nodes(op="call_function", target=aten.sort.stable):
        node.target = aten.sort.default
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "stable"}
