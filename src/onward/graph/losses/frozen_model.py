"""A model that another learns from or is compared with, in the graph of that one: prefixed, its constants frozen, in
inference mode, inputs shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.classical.passes import rewrite_classical
from onward.graph.classical.side_outputs import WhyNotLowered, leave_out_side_outputs
from onward.graph.losses.values import FLOAT_TYPES, add_label
from onward.graph.merging.merged_graph import at_opset, check_other_domains, move, rename
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.reading.model_file import prepare_for_lowering, read_model
from onward.graph.reading.sequences import unpack_sequences
from onward.graph.rebatching.passes import NotRebatched, fixed_batch_size, rebatch_graph
from onward.graph.repair.frozen_statistics import freeze_running_statistics
from onward.graph.repair.inference_mode import switch_to_inference
from onward.graph.weights.choice import find_running_statistics
from onward.losses.classes import describe_shape
from onward.parameters.limits import Limits
from onward.spelling import did_you_mean, listed


class FrozenModel:
    """A model that does not train, merged into the graph of a writer.

    Args:
        writer: of nodes in the trained model; its prefix becomes that of all names.
        path: of the model.
        field: of RUN.yaml that names it.
        named: outputs and further values of it that are compared.
        why_not_lowered: asked for every operator.
        limits: what the model may ask of the machine.

    Attributes:
        outputs: names of its outputs.
        labels: inputs of the graph that only this model reads.

    Raises:
        ModelError: it cannot be read or merged, or has no value of a name.
    """

    def __init__(
        self,
        writer: NodeWriter,
        path: Path,
        field: str,
        named: Sequence[str],
        why_not_lowered: WhyNotLowered | None,
        limits: Limits,
    ) -> None:
        self._where = f"{field} {str(path)!r}"
        model = _prepared(path, named, why_not_lowered, limits, self._where)
        model = at_opset(model, writer, self._where, limits)
        check_other_domains(writer, model, self._where)
        graph = model.graph
        self.outputs = tuple(str(value.name) for value in graph.outputs)
        self._values = {str(one.name): one for node in graph for one in node.outputs}
        self._values |= {str(value.name): value for value in graph.outputs}
        self.labels: list[str] = []
        for value in list(graph.inputs):
            if not value.is_initializer():
                value.replace_all_uses_with(self._shared(writer, value))
        graph.inputs.clear()
        graph.outputs.clear()
        rename(writer, graph)
        move(writer, graph)

    def output_like(self, prediction: str, what_to_do: str) -> str:
        """The name of its output that corresponds to an output of the trained model: of that name, or its only one."""
        if prediction in self.outputs:
            return prediction
        if len(self.outputs) == 1:
            return self.outputs[0]
        raise ModelError(
            f"{self._where} has {len(self.outputs)} outputs ({', '.join(self.outputs)}), none of them named like "
            f"loss.prediction, {prediction!r}. {what_to_do}"
        )

    def value(self, name: str, field: str) -> ir.Value:
        """A value by the name that it has in the file."""
        if name not in self._values:
            raise ModelError(
                f"{field} is {name!r}, which is no value of {self._where}; its outputs are "
                f"{listed([repr(one) for one in self.outputs])}{did_you_mean(name, self._values)}."
            )
        return self._values[name]

    def _shared(self, writer: NodeWriter, value: ir.Value) -> ir.Value:
        """The trained model's input of that name in this one's type, else a further feature."""
        name, graph = str(value.name), writer.graph
        known = next((one for one in graph.inputs if one.name == name and not one.is_initializer()), None)
        if known is None:
            if value.dtype is None:
                raise ModelError(f"{self._where}: its input {name!r} has no element type.")
            self.labels.append(name)
            return add_label(writer, name, value.dtype, value.shape, allowed={value.dtype})
        sizes = [] if value.shape is None or known.shape is None else list(zip(value.shape, known.shape, strict=False))
        clash = any(isinstance(own, int) and isinstance(other, int) and own != other for own, other in sizes)
        if sizes and (clash or len(value.shape or ()) != len(known.shape or ())):
            raise ModelError(
                f"{self._where}: its input {name!r} is {describe_shape(value)}, but the trained model's is "
                f"{describe_shape(known)}. Give a model of the same inputs, or rename one of the two."
            )
        kinds = [dtype in FLOAT_TYPES for dtype in (value.dtype, known.dtype)]
        if value.dtype is None or known.dtype is None or kinds[0] != kinds[1]:
            raise ModelError(
                f"{self._where}: its input {name!r} is {_type_of(value)}, but the trained model's is {_type_of(known)}."
            )
        if value.dtype is known.dtype and not kinds[0]:
            return known
        # Floats always: mixed precision computes the trained model in 16 bits.
        cast = writer.cast(known, value.dtype)
        cast.dtype, cast.shape = value.dtype, known.shape
        return cast


def _type_of(value: ir.Value) -> str:
    return "of unknown type" if value.dtype is None else value.dtype.name.lower()


def _prepared(
    path: Path, named: Sequence[str], why_not_lowered: WhyNotLowered | None, limits: Limits, where: str
) -> ir.Model:
    """The model as it is computed: in inference mode, for any batch size, statistics and constants never changed."""
    model = prepare_for_lowering(read_model(path, limits), limits)
    switch_to_inference(model)
    leave_out_side_outputs(model, why_not_lowered)
    unpack_sequences(model, frozenset(named))
    rewrite_classical(model)
    if fixed_batch_size(model.graph) is not None:
        try:
            rebatch_graph(model)
        except NotRebatched as error:
            raise ModelError(
                f"{where}: its batch size is fixed, and the graph cannot be rewritten for another, because {error}. "
                "Export it with a dynamic batch axis."
            ) from error
    if find_running_statistics(model.graph):
        freeze_running_statistics(model)
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type == "Dropout" and node.domain == "" and node.graph is not None and node.inputs[0] is not None:
            if len(node.outputs) > 1 and node.outputs[1].uses():
                raise ModelError(f"{where}: the mask of Dropout {node.name!r} is read; export it in evaluation mode.")
            copy = ir.node("Identity", [node.inputs[0]], name=f"{node.name}_kept")
            copy.outputs[0].shape, copy.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
            node.graph.insert_before(node, copy)
            name = node.outputs[0].name
            node.outputs[0].replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)
            node.outputs[0].name = f"{name}_dropped"
            copy.outputs[0].name = name
            node.graph.remove(node, safe=True)
    return model
