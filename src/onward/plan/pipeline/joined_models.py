"""One network out of models that were cut into stages before: joined by the names of their inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.reading.model_file import ModelSource, read_model
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.plan.pipeline.cut_list import STAGE_NOTE


def join_stage_models(sources: Sequence[ModelSource], limits: Limits = DEFAULT_LIMITS) -> ir.Model:
    """The entire network, with the stage of every node noted in its metadata under `onward.stage`.

    An input of a later model is the output of that name of an earlier one; any other input is an input of the network,
    the same one where several models name it. Initializers of one name and one content are one weight, tied; what only
    happens to have the same name in two models (values inside, other tensors) is renamed `stage<i>/<name>`.

    Args:
        sources: the models of the stages, first to last: paths, `ModelProto`s or onnx-ir models.
        limits: what each of them may ask of the machine.

    Raises:
        ModelError: a model cannot be read, opsets differ, or an output and the input of its name differ in type.
    """
    models = [read_model(source, limits) for source in sources]
    if not models:
        raise ModelError("distributed.pipeline_stage_paths is empty; name one model for each stage.")
    joined = models[0]
    _note(joined.graph, 0)
    outputs = {str(value.name): value for value in joined.graph.outputs}
    consumed: set[str] = set()
    for stage, model in enumerate(models[1:], start=1):
        _check_opsets(joined, model, stage)
        _add_functions(joined, model, stage)
        _rename_clashes(joined.graph, model.graph, stage, outputs)
        consumed |= _connect_inputs(joined.graph, model.graph, stage, outputs)
        _share_initializers(joined.graph, model.graph)
        _note(model.graph, stage)
        given = [(str(value.name), value) for value in model.graph.outputs]
        model.graph.outputs.clear()
        nodes = list(model.graph)
        model.graph.remove(nodes)
        joined.graph.extend(nodes)
        for name, value in given:
            if name in outputs:
                raise ModelError(
                    f"the models of two stages, one of them {stage}, have the output {name!r}; rename one."
                )
            outputs[name] = value
    joined.graph.outputs.clear()
    joined.graph.outputs.extend(value for name, value in outputs.items() if name not in consumed)
    joined.graph.sort()
    return joined


def _note(graph: ir.Graph, stage: int) -> None:
    for node in ir.traversal.RecursiveGraphIterator(graph):
        node.metadata_props[STAGE_NOTE] = str(stage)


def _check_opsets(joined: ir.Model, model: ir.Model, stage: int) -> None:
    for domain, version in model.opset_imports.items():
        earlier = joined.opset_imports.setdefault(domain, version)
        if earlier != version:
            raise ModelError(
                f"the model of stage {stage} is written for opset {version} of {domain or 'ai.onnx'!r}, earlier ones "
                f"for {earlier}; export all stages at the same opset."
            )


def _add_functions(joined: ir.Model, model: ir.Model, stage: int) -> None:
    for identifier, function in model.functions.items():
        earlier = joined.functions.get(identifier)
        if earlier is None:
            joined.functions[identifier] = function
        elif ir.to_proto(earlier) != ir.to_proto(function):
            raise ModelError(
                f"the model of stage {stage} defines the function {function.domain}::{function.name} in another way "
                "than an earlier one; inline functions before cutting."
            )


def _rename_clashes(joined: ir.Graph, graph: ir.Graph, stage: int, outputs: dict[str, ir.Value]) -> None:
    """Values inside of this model, and its nodes, whose names are taken."""
    taken = {str(v.name) for node in joined for v in node.outputs} | set(joined.initializers) | set(outputs)
    taken |= {str(value.name) for value in joined.inputs}
    given = set(graph.outputs)
    for node in graph:
        for value in node.outputs:
            if value.name in taken and value not in given:
                value.name = f"stage{stage}/{value.name}"
    names = {node.name for node in joined}
    for node in graph:
        if node.name in names:
            node.name = f"stage{stage}/{node.name}"
    for name, value in list(graph.initializers.items()):
        earlier = joined.initializers.get(name)
        if name in taken and (earlier is None or not _equal(earlier, value)):
            value.name = f"stage{stage}/{name}"


def _equal(left: ir.Value, right: ir.Value) -> bool:
    a, b = left.const_value, right.const_value
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.array_equal(a.numpy(), b.numpy()))


def _connect_inputs(joined: ir.Graph, graph: ir.Graph, stage: int, outputs: dict[str, ir.Value]) -> set[str]:
    """Returns the names of the outputs that this model reads."""
    consumed: set[str] = set()
    own = {str(value.name): value for value in joined.inputs}
    for value in list(graph.inputs):
        name = str(value.name)
        if value.is_initializer():
            continue
        earlier = outputs.get(name) or own.get(name)
        if earlier is None:
            graph.inputs.remove(value)
            joined.inputs.append(value)
            continue
        if earlier.dtype is not None and value.dtype is not None and earlier.dtype != value.dtype:
            raise ModelError(
                f"the model of stage {stage} reads {name!r} as {value.dtype.name}; an earlier stage has it as "
                f"{earlier.dtype.name}."
            )
        if name in outputs:
            consumed.add(name)
        value.replace_all_uses_with(earlier, replace_graph_outputs=True)
    return consumed


def _share_initializers(joined: ir.Graph, graph: ir.Graph) -> None:
    for name, value in list(graph.initializers.items()):
        graph.initializers.pop(name)
        if value in graph.inputs:
            graph.inputs.remove(value)
        earlier = joined.initializers.get(name)
        if earlier is None:
            joined.register_initializer(value)
        else:
            value.replace_all_uses_with(earlier, replace_graph_outputs=True)
