"""An ONNX graph as a `torch.nn.Module`: its program, its weights by ONNX name, and the graph it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from onward.errors import ModelError
from onward.graph.reading.expansion import expand_function_operators
from onward.graph.reading.garbage_collection import without_collection
from onward.graph.reading.widening import NARROW
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.frozen_weights import find_frozen_weights
from onward.lowering.building.builder import build_program
from onward.lowering.building.shapes import materialize, small_tensors
from onward.lowering.context import USUAL, ExecutionContext
from onward.lowering.kernels.dtypes import torch_dtype
from onward.lowering.program import Program
from onward.lowering.registry import find_lowering
from onward.lowering.summary import NetSummary, summarize_graph


class TensorTree(nn.Module):
    """Holds parameters and buffers under dotted ONNX names: `a.b.c` is tensor `c` of child `b` of child `a`.

    They are in the dictionaries of `nn.Module` itself, so that an ONNX name may equal an attribute ("train").
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the module are set next to tensors of the same name, not in their place."""
        parameters = self.__dict__.get("_parameters", ())
        taken = name in parameters or name in self.__dict__.get("_buffers", ())
        if isinstance(value, nn.Parameter) and name in parameters:
            self._parameters[name] = value  # torch would refuse a name with a dot in it
        elif taken and not isinstance(value, torch.Tensor):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def place(self, name: str, tensor: torch.Tensor, persistent: bool = True) -> None:
        """Puts a tensor under a name; `nn.Parameter` becomes a parameter, anything else a buffer."""
        holder: nn.Module = self
        *path, leaf = _parts(name)
        for part in path:
            if part not in holder._modules:
                holder._modules[part] = TensorTree()
            child = holder._modules[part]
            assert child is not None
            holder = child
        if isinstance(tensor, nn.Parameter):
            holder._parameters[leaf] = tensor
        else:
            holder._buffers[leaf] = tensor
            if not persistent:
                holder._non_persistent_buffers_set.add(leaf)

    def find_parameter(self, name: str) -> nn.Parameter:
        """The parameter that was placed under a name.

        Raises:
            KeyError: there is none.
        """
        holder, leaf = self._holder(name)
        found = holder._parameters.get(leaf)
        if found is None and "." not in leaf:
            found = getattr(holder, leaf, None)  # torch.nn.utils.parametrize and prune compute it from another
        if not isinstance(found, torch.Tensor):
            raise KeyError(name)
        return found

    def find_tensor(self, name: str) -> torch.Tensor | None:
        """The parameter or buffer that was placed under a name; None: there is none."""
        holder: nn.Module | None = self
        *path, leaf = _parts(name)
        for part in path:
            holder = None if holder is None else holder._modules.get(part)
        if holder is None:
            return None
        found = holder._buffers.get(leaf)
        return holder._parameters.get(leaf) if found is None else found

    def remove_parameter(self, name: str) -> None:
        """Takes the parameter of a name out of the tree.

        Raises:
            KeyError: there is none.
        """
        holder, leaf = self._holder(name)
        del holder._parameters[leaf]

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds the tensor of a name, and its name there."""
        holder: nn.Module = self
        *path, leaf = _parts(name)
        for part in path:
            child = holder._modules[part]
            assert child is not None
            holder = child
        return holder, leaf

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """torch takes the dot of ".b", which is one name here, for a child's; it is not unexpected."""
        unexpected: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs)
        own = {prefix + leaf for leaf in (*self._parameters, *self._buffers)}
        unexpected_keys.extend(key for key in unexpected if key not in own)


def _parts(name: str) -> list[str]:
    """The names of a tensor and of the modules above it; torch cannot spell a child of the root without a name."""
    return [name] if name.startswith(".") else name.split(".")


class WeightMapping(Mapping[str, nn.Parameter]):
    """The trained weights of a module by ONNX initializer name, read-only."""

    def __init__(self, tree: TensorTree, names: tuple[str, ...]) -> None:
        self._homes = dict.fromkeys(names, tree)
        self._names = names

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._homes[name].find_parameter(name)

    def move(self, name: str, home: TensorTree) -> None:
        """Gives a weight another tree to live in, where code that looks at modules finds it."""
        parameter = self[name]
        self._homes[name].remove_parameter(name)
        home.place(name, parameter)
        self._homes[name] = home

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"weights({', '.join(self._names)})"


class OnnxModule(TensorTree):
    """`net(*inputs)` computes the graph; inputs and outputs in graph order, inputs also by name.

    In evaluation mode (how `to_torch` gives it) the graph means what it says; `net.train()` turns dropout on and
    makes batch normalization use and update batch statistics, where those belong to the model itself.
    """

    @without_collection
    def __init__(
        self,
        graph: TrainingGraph,
        outputs: tuple[str, ...] | None = None,
        read: Callable[[ir.Value], torch.Tensor] | None = None,
        context: ExecutionContext = USUAL,
        lower: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Lowers a graph.

        Args:
            graph: with its weights, and its loss where it has one.
            outputs: values to compute; None: the graph's outputs.
            read: makes the tensors of trained and frozen weights instead of reading them.
            context: what operators must know of the run.
            lower: casts frozen weights to the type that passes compute with, but for those of the loss, a teacher's
                among them; None: they stay as they are.
        """
        super().__init__()
        self.graph = graph
        self.context = context
        expand_function_operators(graph.model, lambda *operator: find_lowering(*operator) is not None)
        initializers = graph.model.graph.initializers
        self._small = small = small_tensors(graph)
        self.frozen = find_frozen_weights(graph.model.graph, (*graph.weights, *graph.states))
        self._outputs = outputs
        self.program = self.program_for(outputs)
        exact = {*graph.exact_weights, *(() if graph.loss_names is None else graph.loss_names.constants)}
        large = {*graph.weights, *self.frozen.weights, *self.frozen.scales}
        for name in dict.fromkeys((*graph.weights, *graph.states, *self.program.tensors)):
            is_large = name in large
            make = materialize if read is None or not is_large else read
            if name in self.program.attribute_tensors:
                tensor = self.program.attribute_tensors[name]
            else:
                tensor = small[name] if name in small else make(initializers[name])
            if lower is not None and name in self.frozen.weights and name not in exact:
                tensor = lower(tensor)
            if name in graph.weights:
                self.place(name, nn.Parameter(tensor))
            else:
                self.place(name, tensor, persistent=name in graph.states)
        self.weights = WeightMapping(self, tuple(graph.weights))
        self.input_dtypes, self.input_shapes = input_types(graph)
        self._file_dtypes = _widened_inputs(graph)
        self.graph_dtypes: dict[str, torch.dtype] = {}
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the program, which is built again from the graph: its code cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "program"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over what `__getstate__` gave."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.program = self.program_for(self._outputs)

    def _replicate_for_data_parallel(self) -> OnnxModule:
        raise ModelError(
            "torch.nn.DataParallel does not work with this module, whose code holds tensors of one device. Use one "
            "process per GPU: torch.nn.parallel.DistributedDataParallel, or onward train with "
            "distributed.data_parallel_size."
        )

    def parameters_of(self, *patterns: str) -> dict[str, nn.Parameter]:
        """The weights whose name or module path a pattern matches, as for groups of a `torch.optim` optimizer.

        Args:
            patterns: exact names, or with * ? [...]; a module's path stands for all weights below it.

        Raises:
            ModelError: a pattern matches no weight.
        """
        known, found = self.graph.known_as, set[str]()
        for pattern in patterns:
            matched = {name for name in self.weights if known.matches(name, (pattern, f"{pattern}.*"))}
            if not matched:
                raise ModelError(
                    f"{pattern!r} matches no weight; the weights are {known.listed(self.weights, 8)}. Pass a name, a "
                    "module's path or a pattern with *."
                )
            found |= matched
        return {name: weight for name, weight in self.weights.items() if name in found}

    def summary(self) -> NetSummary:
        """Layers with their output shapes, trainable and frozen parameters and bytes, as a table."""
        return summarize_graph(self.graph, {name for name, weight in self.weights.items() if weight.requires_grad})

    def extra_repr(self) -> str:
        """What `repr` says of the module."""
        weights = self.weights.values()
        trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
        frozen = sum(weight.numel() for weight in weights) - trainable
        still = f", {frozen:,} frozen" if frozen else ""
        outputs = self._outputs or tuple(str(value.name) for value in self.graph.model.graph.outputs)
        inputs, results = ", ".join(self.program.inputs), ", ".join(outputs)
        return f"{inputs} -> {results}, {len(self.weights)} weights, {trainable:,} trainable parameters{still}"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def program_for(self, outputs: Sequence[str] | None) -> Program:
        """A program that computes the values of these names; by default the graph's outputs."""
        main, opsets = self.graph.model.graph, self.graph.model.opset_imports
        return build_program(main, opsets, self._small, outputs, self.context)

    @property
    def device(self) -> torch.device:
        """Where the weights are; the CPU for a model without any tensor."""
        first = self._first_tensor()
        return torch.device("cpu") if first is None else first.device

    def _first_tensor(self) -> torch.Tensor | None:
        first: torch.Tensor | None = next(iter(self.weights.values()), None)
        return next(self.buffers(), None) if first is None else first

    def tensors_by_name(self) -> dict[str, torch.Tensor]:
        """Weights, running statistics and constants under their ONNX names."""
        return {**self.weights, **dict(self.named_buffers())}

    def running_statistics(self) -> dict[str, torch.Tensor]:
        """The running statistics that the module holds, without a walk through all of its tensors."""
        found = {name: self.find_tensor(name) for name in self.graph.states}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Computes the graph's outputs: one tensor, or a tuple in graph order."""
        results = self.run(self._arrange(inputs, named), self.in_graph_types(self.tensors_by_name()))
        return results[0] if len(results) == 1 else results

    def keep_fp32_master_weights(self) -> tuple[str, ...]:
        """Keeps 16-bit weights in fp32 from now on, for updates that 16 bits would round away; returns their names.

        The graph continues computing in its own types: `forward` casts, and gradients arrive in fp32.
        """
        for name, weight in self.weights.items():
            if weight.dtype in (torch.float16, torch.bfloat16):
                self.graph_dtypes[name] = weight.dtype
                weight.data = weight.data.float()
        return tuple(self.graph_dtypes)

    def in_graph_types(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors with fp32 masters cast to the types that the graph has for them."""
        if not self.graph_dtypes:
            return tensors
        return {**tensors, **{name: tensors[name].to(dtype) for name, dtype in self.graph_dtypes.items()}}

    def run(self, inputs: tuple[Any, ...], tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Computes the program with other tensors instead of the module's own.

        A model without any tensor computes where its first input is.
        """
        given = (self._first_tensor(), *chain.from_iterable(i if isinstance(i, list) else (i,) for i in inputs))
        first = next((value for value in given if isinstance(value, torch.Tensor)), None)
        device = self.device if first is None else first.device
        return self.program(self.training, device, inputs, tensors)

    def _arrange(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        names = self.program.inputs
        if len(inputs) > len(names):
            raise ModelError(f"the model takes {len(names)} inputs ({', '.join(names)}); {len(inputs)} were given.")
        given = dict(zip(names, inputs, strict=False))
        for name, value in named.items():
            if name not in names:
                raise ModelError(f"the model has no input {name!r}; it has: {', '.join(names)}.")
            if name in given:
                raise ModelError(f"input {name!r} was given twice, by place and by name.")
            given[name] = value
        missing = [name for name in names if name not in given]
        if missing:
            raise ModelError(f"the model takes {len(names)} inputs; missing: {', '.join(missing)}.")
        return tuple(self._checked(name, given[name]) for name in names)

    def _checked(self, name: str, value: Any) -> Any:
        expected = self.input_dtypes.get(name)
        if expected is None or value is None:
            return value
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device=self.device)
        if tensor.dtype != expected and tensor.dtype == self._file_dtypes.get(name):
            return tensor.to(expected)
        if tensor.dtype != expected and not self._was_moved_to(tensor.dtype, expected):
            raise ModelError(
                f"input {name!r} is {str(tensor.dtype).removeprefix('torch.')}; the model expects "
                f"{str(expected).removeprefix('torch.')}. Convert it with .to({expected})."
            )
        return tensor

    def _was_moved_to(self, dtype: torch.dtype, expected: torch.dtype) -> bool:
        """Whether `net.to(dtype)` gave the weights another float type, which inputs then have, too."""
        if not (dtype.is_floating_point and expected.is_floating_point):
            return False
        first = next((tensor for tensor in self.weights.values() if tensor.is_floating_point()), None)
        return first is not None and first.dtype == dtype


def input_types(graph: TrainingGraph) -> tuple[dict[str, torch.dtype], dict[str, tuple[int | str, ...]]]:
    """Element types and shapes of a graph's inputs by name; open dimensions as their names or `?`."""
    inputs = [value for value in graph.model.graph.inputs if isinstance(value.type, ir.TensorType)]
    dtypes = {str(v.name): torch_dtype(v.dtype, f"input {v.name!r}") for v in inputs if v.dtype}
    shapes: dict[str, tuple[int | str, ...]] = {
        str(v.name): tuple(size if isinstance(size, int) else str(size.value or "?") for size in v.shape)
        for v in inputs
        if v.shape is not None
    }
    return dtypes, shapes


def _widened_inputs(graph: TrainingGraph) -> dict[str, torch.dtype]:
    """Inputs that are 16-bit floats in the user's file and fp32 in what is computed -> their type in the file."""
    wide = {value.name for value in graph.model.graph.inputs if value.dtype is ir.DataType.FLOAT}
    return {
        str(value.name): torch_dtype(value.dtype, f"input {value.name!r}")
        for value in graph.source.graph.inputs
        if value.dtype in NARROW and value.name in wide
    }
