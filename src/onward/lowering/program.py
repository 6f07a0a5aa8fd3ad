"""The code of a graph: one `torch.fx` graph, and how it is called. `builder` makes it from ONNX nodes.

The fx graph is functional: the network's inputs and every tensor it reads are placeholders, so the same code
runs with fp32 masters, with their low-precision copies, and with another layer's weights. fx writes it as
straight Python that drops each value after its last use, and `torch.compile` reads it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onward.errors import NodeError
from onward.lowering.passes import is_recomputing


@dataclass(frozen=True)
class NodeLabel:
    """Which ONNX node a step of the program came from; `module` is the path of the layer, where the file notes it."""

    name: str
    op_type: str
    module: str = ""

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op_type}){f' of {self.module}' if self.module else ''}"


@dataclass(frozen=True, kw_only=True)
class Program:
    """The code of a graph and the names of what goes in and comes out.

    `code(training, device, *inputs, *tensors)` returns the outputs as a tuple. `tensors` names the model's own
    tensors (weights, running statistics, constants) that the code reads, in the order of its arguments;
    `attribute_tensors` holds those of them that were attributes of nodes. `run` is called instead of `code`
    where it is given: the same, compiled.
    """

    code: fx.GraphModule
    inputs: tuple[str, ...]
    tensors: tuple[str, ...]
    outputs: tuple[str, ...]
    attribute_tensors: Mapping[str, torch.Tensor]
    run: Callable[..., tuple[Any, ...]] | None = None

    def __call__(
        self, training: bool, device: torch.device, inputs: Sequence[Any], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Any, ...]:
        """Runs the code; a failing node is named in the error."""
        arguments = (training, device, *inputs, *(self.tensor(name, tensors) for name in self.tensors))
        if torch.compiler.is_compiling():
            return self.code(*arguments)  # type: ignore[no-any-return]
        try:
            return (self.run or self.code)(*arguments)
        except (NodeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if is_recomputing():
                raise  # torch ends a repetition by an exception as soon as it has all that the backward pass needs
            raise _name_the_node(self.code, arguments, error) from error

    def tensor(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One of the tensors the code reads: from `tensors`, or the program's own."""
        found = tensors.get(name)
        return self.attribute_tensors[name] if found is None else found


def name_placeholders(graph: fx.Graph) -> None:
    """Gives every argument of the code the name of its node, which no other node has.

    fx would copy an argument that is called otherwise into its node's name first, over an argument of that name.
    """
    for node in graph.nodes:
        if node.op == "placeholder":
            node.target = node.name


def prune_unused_optional_inputs(graph: fx.Graph) -> None:
    """Takes spare arguments out of calls: values that a function can do without, unless they are computed anyway.

    `meta["spare"]` of a call holds the places of such arguments; they stay if one of them is needed elsewhere.
    """
    calls = [node for node in graph.nodes if node.meta.get("spare")]
    if not calls:
        return
    spare = {call: {arg for place, arg in enumerate(call.args) if place in call.meta["spare"]} for call in calls}
    needed: set[fx.Node] = set()
    stack = [node for node in graph.nodes if node.op == "output"]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend({*node.all_input_nodes} - spare.get(node, set()))
    for call in calls:
        if not spare[call] & needed:
            call.args = tuple(None if place in call.meta["spare"] else arg for place, arg in enumerate(call.args))


def _name_the_node(code: fx.GraphModule, arguments: tuple[Any, ...], error: Exception) -> Exception:
    """Finds the failing node by running the program again, node by node."""
    try:
        with torch.no_grad():
            interpreter = _NamingInterpreter(code)
            interpreter.extra_traceback = False  # fx would add lines of its own to the message
            interpreter.run(*arguments)
    except NodeError as named:
        return named
    except Exception:
        return error
    return error


class _NamingInterpreter(fx.Interpreter):
    """Runs a program node by node and turns a failure into a `NodeError`."""

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except NodeError:
            raise
        except Exception as error:
            label = n.meta.get("onnx")
            if label is None:
                raise
            shapes = ", ".join(
                f"{list(a.shape)} {str(a.dtype).removeprefix('torch.')}" if isinstance(a, torch.Tensor) else repr(a)
                for a in fx.node.map_arg(n.args, lambda arg: self.env[arg])
            )
            raise NodeError(f"{label} failed on inputs ({shapes}): {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """What an exception says, without the trace that fx appends."""
    return str(error).split("\n\nWhile executing", 1)[0].strip() or type(error).__name__


class Nested:
    """A nested graph with the outer values it reads, called with its own inputs; returns a tuple."""

    def __init__(
        self,
        code: Callable[..., tuple[Any, ...]],
        training: bool,
        device: torch.device,
        captured: tuple[Any, ...],
        input_count: int,
    ) -> None:
        self.code = code
        self.training = training
        self.device = device
        self.captured = captured
        self.input_count = input_count

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Runs the nested graph."""
        return self.code(self.training, self.device, *inputs, *self.captured)

    def reading(self, captured: tuple[Any, ...]) -> Nested:
        """The nested graph with others of these outer values."""
        return Nested(self.code, self.training, self.device, captured, self.input_count)


def pick(results: Any, index: int) -> Any:
    """One output of a node that has several."""
    return results[index]
