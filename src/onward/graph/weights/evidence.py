"""What speaks against an initializer being a weight: what its exporter noted, its name, its place, its numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.operators import operator
from onward.graph.weights.lifted_tensors import is_lifted, lifted_parameters
from onward.graph.weights.quantized_weights import is_scale
from onward.graph.weights.signal_tables import why_signal_table

_PARAMETER_NAME = re.compile(r"(^|[._])(weight|bias|gamma|beta|scale|token|embed|embedding|embeddings)[^.]*$")
"""How torch's modules name parameters; the last part of a dotted name."""

_BUFFER_NAME = re.compile(
    r"(^|[._])(mask|masked_bias|\w*_mask|inv_freq|position_ids|token_type_ids|running_mean|running_var|"
    r"num_batches_tracked|relative_position_index|embed_positions|freqs(_cis)?|(cos|sin)(_cached|_cache)?|pe|anchors)$"
)
"""How torch's modules name buffers."""

_FOLDED_BY_TF2ONNX = re.compile(r"(^|/)const_fold_opt__\d+(:0)?$")
"""How tf2onnx names what it computed from constants."""

_MADE_BY_TORCH_CALL = re.compile(r"(scalar_tensor|full|full_like|zeros|ones|arange|lift_fresh_copy)_default(_\d+)?$")
"""How torch's exporter names what calls without parameters made: the 1 of `x + 1`."""

_SELECTOR_NAME = re.compile(r"(^|[._])\w*(ids|index|indices|idx)$")
"""How torch's modules name buffers of whole numbers that select from a parameter."""

_ARITHMETIC = frozenset({"Mul", "Div", "Sub", "Add", "Pow", "Max", "Min", "Where", "Mod", "Sqrt", "Clip", "Equal"})


@dataclass(frozen=True)
class Exporter:
    """Which exporter wrote a model, as far as it matters for telling weights from constants.

    Attributes:
        torch: torch's, of either kind.
        notes_kinds: it noted which initializers were parameters.
        notes_folding: it noted what initializers were folded from.
        lifted: parameters that it took for constants.
    """

    torch: bool
    notes_kinds: bool
    notes_folding: bool
    lifted: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: ir.Model) -> Exporter:
        """Reads the producer's name and the metadata of the initializers."""
        values = model.graph.initializers.values()
        return cls(
            torch=model.producer_name == "pytorch",
            notes_kinds=any(provenance.KIND in value.metadata_props for value in values),
            notes_folding=any(provenance.FOLDED_FROM in value.metadata_props for value in values),
            lifted=lifted_parameters(model.graph),
        )


def is_noted_constant(value: ir.Value) -> bool:
    """Whether the exporter noted that an initializer is a buffer, or was computed from no parameter."""
    if provenance.FOLDED_FROM in value.metadata_props:
        return not _is_folded_weight(value)
    return value.metadata_props.get(provenance.KIND, "PARAMETER") != "PARAMETER"


def is_buffer_name(name: str) -> bool:
    """Whether torch's modules name buffers so: `attn.mask`, `rotary.inv_freq`."""
    return _BUFFER_NAME.search(name) is not None


def folded_parameters(value: ir.Value) -> list[str]:
    """The parameters that an initializer was computed from, told by their names where the exporter declared none."""
    if provenance.declared_kinds(value.graph):
        return _declared_parameters(value)
    return [source for source in provenance.folded_sources(value) if "." in source and not is_buffer_name(source)]


def why_constant(value: ir.Value, exporter: Exporter) -> str:
    """Why an initializer is a constant and not a weight, or "" for a weight."""
    table = "a quantization scale" if is_scale(value) else why_signal_table(value)
    kind = value.metadata_props.get(provenance.KIND)
    if table or kind == "PARAMETER":
        return table
    tensor, name = value.const_value, str(value.name)
    assert tensor is not None
    if kind is not None:
        if name not in exporter.lifted:
            return "a constant of the torch module" if is_lifted(name) else "a buffer of the torch module"
        return "a mask" if _is_mask(tensor, True) or _is_selection(tensor) else ""
    made = _why_made_by_exporter(value, exporter)
    if made:
        return made
    uses = [(use.node.op_type, use.idx) for use in value.uses()]
    # torch's older exporter keeps the names of parameters and buffers and makes up those of constants.
    named = exporter.torch and not exporter.notes_kinds and not provenance.is_automatic_name(name)
    if named and _BUFFER_NAME.search(name):
        return "a buffer by its name"
    if tensor.size == 1 and _is_only_trace(value):
        return ""
    if len(tensor.shape) == 0 and not named:
        return "a rank-0 constant"
    held = {operator(op_type).input(index) for op_type, index in uses}
    if held == {"table"}:
        return "a table of angles"
    if held == {"state"} and _is_zero(tensor):
        return "an initial state of zeros"
    op_types = {op_type for op_type, _ in uses}
    arithmetic = op_types <= _ARITHMETIC
    if tensor.size == 1 and not named and arithmetic and "Add" not in op_types:
        return "a one-element constant of the arithmetic"
    if provenance.FOLDED_FROM in value.metadata_props:
        if exporter.lifted.intersection(provenance.folded_sources(value)) and tensor.size > 1:
            return "computed at export for a batch of fixed size" if _has_equal_rows(tensor) else ""
        if not _is_folded_weight(value):
            return _why_folded(value)
    elif exporter.notes_folding and provenance.is_automatic_name(name):
        return "a constant that the exporter made"
    return "a mask" if _is_mask(tensor, arithmetic) else ""


def _why_made_by_exporter(value: ir.Value, exporter: Exporter) -> str:
    """Of an initializer without notes: what its name and its place say of a constant; "" for what may be a weight."""
    tensor, name = value.const_value, str(value.name)
    assert tensor is not None
    if _FOLDED_BY_TF2ONNX.search(name) and (tensor.size == 1 or _is_filled(tensor)):
        return "a constant folded by tf2onnx"
    if exporter.torch and not exporter.notes_kinds and (_MADE_BY_TORCH_CALL.match(name) or _is_identity_norm(value)):
        return "a constant that the exporter made"
    return ""


def _is_identity_norm(value: ir.Value) -> bool:
    """Whether a tensor without a name of its own is the scale 1 or the bias 0 of instance norms alone.

    torch's exporters put them there, for a norm without parameters and for a group norm, which has its own after it.
    """
    tensor, places = value.const_value, {(use.node.op_type, use.idx) for use in value.uses()}
    assert tensor is not None
    if not provenance.is_automatic_name(str(value.name)) or len(places) != 1:
        return False
    number = {("InstanceNormalization", 1): 1, ("InstanceNormalization", 2): 0}.get(places.pop())
    return number is not None and bool((np.asarray(tensor.numpy()) == number).all())


def _is_folded_weight(value: ir.Value) -> bool:
    """Whether a folded initializer was computed from parameters, and from no mask or table of angles.

    Where the exporter did not declare the parameters, that is a matrix from one dotted name; what one parameter was
    reshaped to; or what an operator reads instead of its parameters (the stacked gates of an LSTM).
    """
    tensor = value.const_value
    assert tensor is not None
    sources = provenance.folded_sources(value)
    kinds = provenance.declared_kinds(value.graph)
    if any(_BUFFER_NAME.search(source) and not _SELECTOR_NAME.search(source) for source in sources):
        return False
    if kinds:
        return bool(_declared_parameters(value)) and not _is_of_shape_only(value)
    if len(tensor.shape) == 2 and len(sources) == 1 and not provenance.is_automatic_name(sources[0]):
        return True
    named = [source for source in sources if _PARAMETER_NAME.search(source) and not _BUFFER_NAME.search(source)]
    if not named:
        return False
    as_parameter = all(operator(use.node.op_type).is_parameter(use.idx) for use in value.uses())
    return as_parameter or len(named) == 1


def _declared_parameters(value: ir.Value) -> list[str]:
    """The declared parameters that an initializer was computed from."""
    kinds = provenance.declared_kinds(value.graph)
    return [source for source in provenance.folded_sources(value) if kinds.get(source) == "PARAMETER"]


def _is_only_trace(value: ir.Value) -> bool:
    """Whether a number was computed from one declared parameter that the file holds nothing else of.

    `logit_scale.exp()` is such a one; `1 / sqrt(queries.shape[-1])` is not, the queries being there in another form.
    """
    parameters = _declared_parameters(value)
    if len(parameters) != 1 or value.graph is None or parameters[0] in value.graph.initializers:
        return False
    others = (other for other in value.graph.initializers.values() if other is not value)
    return not any(parameters[0] in provenance.folded_sources(other) for other in others)


def _is_of_shape_only(value: ir.Value) -> bool:
    """Zeros that were computed from a parameter of other numbers took only its shape."""
    assert value.const_value is not None
    if not _is_zero(value.const_value) or value.graph is None:
        return False
    stored = [value.graph.initializers.get(name) for name in _declared_parameters(value)]
    return any(v is not None and v.const_value is not None and not _is_zero(v.const_value) for v in stored)


def _why_folded(value: ir.Value) -> str:
    """What is lost with a folded initializer that does not train."""
    parameters = _declared_parameters(value)
    if not parameters or _is_of_shape_only(value):
        return "a table folded from constants by the exporter"
    masks = [name for name in provenance.folded_sources(value) if _BUFFER_NAME.search(name)]
    return f"computed at export from {', '.join(parameters)} and {', '.join(masks)}"


def _is_zero(tensor: ir.TensorProtocol) -> bool:
    flat = np.asarray(tensor.numpy()).reshape(-1)
    # The first element decides nearly always, without reading the rest.
    return not flat[:1].any() and not flat.any()


def _is_filled(tensor: ir.TensorProtocol) -> bool:
    flat = np.asarray(tensor.numpy()).reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _has_equal_rows(tensor: ir.TensorProtocol) -> bool:
    array = np.asarray(tensor.numpy())
    return array.ndim > 1 and len(array) > 1 and bool((array[0] == array[1]).all()) and bool((array == array[:1]).all())


def _is_selection(tensor: ir.TensorProtocol) -> bool:
    """A matrix of zeros and ones, both of them."""
    array = np.asarray(tensor.numpy())
    return array.ndim > 1 and bool(((array == 0) | (array == 1)).all()) and bool((array != array.flat[0]).any())


def _is_mask(tensor: ir.TensorProtocol, arithmetic: bool) -> bool:
    """Only zeros (or ones) and very negative or infinite numbers, in arithmetic; or a triangle of ones."""
    array = np.asarray(tensor.numpy())
    if array.size < 2:
        return False
    # The corners decide nearly always, without reading the rest.
    corners = np.asarray([array.flat[0], array.flat[array.shape[-1] - 1], array.flat[-1]], dtype=np.float64)
    if not ((np.abs(corners) >= 1e4) | (corners == 0) | (corners == 1)).all():
        return False
    if arithmetic:
        flat = array.reshape(-1).astype(np.float64)
        low = flat.min()
        if low <= -1e4 or np.isinf(flat).any():
            return bool(((flat == low) | (flat == 0) | (flat == 1) | np.isinf(flat)).all())
    if array.ndim < 2 or min(array.shape[-2:]) < 2:  # one column of ones is a scale
        return False
    # Again the corners: they differ in a triangle, but not in what is filled with zeros or ones.
    first = array.reshape(-1, *array.shape[-2:])[0]
    if first[0, 0] != 1 or first[0, -1] == first[-1, 0]:
        return False
    ones = np.ones(array.shape[-2:])
    return any(bool((array == triangle).all()) for triangle in (np.tril(ones), np.triu(ones)))
