"""What an exporter wrote down about where nodes and initializers come from: modules, parameters, folded constants.

torch's exporter (`dynamo=True`) keeps the text of each traced call and the stack of module names as node metadata;
its older exporter puts module paths into node names. Other exporters write nothing of the kind.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import onnx_ir as ir

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""PARAMETER or BUFFER, on initializers that torch's exporter took over as they were."""

FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
"""Names of the values that an initializer was computed from at export."""

REMOVED_BY_ONNXSIM = "onnxsim.removed_nodes"
"""Of a model: the nodes that onnxsim took out, each as `operator (name)`, the first of them."""

REWRITTEN_BY = "pkg.onnxscript.rewriter.rule_name"
"""Name of the rewriting that made a node at export."""

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_CALL = "pkg.torch.onnx.fx_node"
_SCOPES = "pkg.torch.onnx.name_scopes"
_AUTOMATIC_NAME = re.compile(r"^(onnx::|/|val_|_val|_inlfunc_|\d+$)")
_DIGITS = re.compile(r"(\d+)")


def is_automatic_name(name: str) -> bool:
    """Whether torch's exporters make such a name up, for a value that is no attribute of a module.

    `_inlfunc_`: a constant of an operator's body, which ONNX Runtime wrote out when it saved the model.
    """
    return _AUTOMATIC_NAME.search(name) is not None


def declared_kinds(graph: ir.Graph | None) -> Mapping[str, str]:
    """PARAMETER, BUFFER or CONSTANT_TENSOR by the name of each tensor of the torch module, folded ones included.

    Empty where the exporter did not write the module's signature down.
    """
    return {} if graph is None else _kinds(graph.metadata_props.get(_SIGNATURE, ""))


@lru_cache(maxsize=8)
def _kinds(signature: str) -> Mapping[str, str]:
    found = re.findall(r"^\S+: (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'", signature, re.MULTILINE)
    return {name: kind for kind, name in found}


def module_scope(node: ir.Node) -> str:
    """The dotted path of the torch module that a node belongs to, or "" where it is not known."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    except (SyntaxError, ValueError):
        return ""
    # A module that is called again appears as `name@1`.
    return re.sub(r"@\d+", "", str(scopes[-2])) if len(scopes) >= 2 else ""


def shown_node(node: ir.Node) -> str:
    """`model.layers.0.q_proj (node_MatMul_3)`: the module a node belongs to, where it is known, and its name."""
    name = str(node.name or (node.outputs[0].name if node.outputs else "") or "unnamed")
    scope = module_scope(node)
    return f"{scope} ({name})" if scope else name


def has_scope(node: ir.Node) -> bool:
    """Whether the exporter wrote down which module a node belongs to; that of the root is ""."""
    return _SCOPES in node.metadata_props


def placeholder(parameter: str) -> str:
    """What torch's exporter calls a parameter in the text of its calls."""
    return "p_" + re.sub(r"\W", "_", parameter).lower()


def call(node: ir.Node) -> str:
    """The text of the traced call behind a node, or ""."""
    return node.metadata_props.get(_CALL, "")


def call_target(node: ir.Node) -> str:
    """The function of the traced call behind a node, as `torch.ops.aten.linear.default`, or ""."""
    found = re.search(r"target=([\w.]+)", call(node))
    return "" if found is None else found[1]


def called_parameters(node: ir.Node) -> tuple[str, ...]:
    """The placeholders of the parameters that the traced call behind a node reads."""
    return tuple(re.findall(r"%(p_\w+)", call(node)))


def traced_inputs(node: ir.Node) -> tuple[str, ...]:
    """The names of the values that the traced call behind a node reads."""
    return tuple(re.findall(r"%(\w+)", call(node).partition("args = ")[2]))


def of_module(node: ir.Node, module: str, other: str) -> dict[str, str]:
    """A node's metadata, as that of a copy of it in another module."""
    props = dict(node.metadata_props)
    if _SCOPES in props:
        props[_SCOPES] = props[_SCOPES].replace(f"'{module}'", f"'{other}'")
    if _CALL in props:
        props[_CALL] = props[_CALL].replace(f"%{placeholder(module)}_", f"%{placeholder(other)}_")
    return props


def lost_bias(node: ir.Node) -> bool:
    """Whether the exporter dropped a node's bias, since it was zero."""
    if not node.metadata_props.get(REWRITTEN_BY, "").startswith("RemoveOptionalBias"):
        return False
    return any(name.endswith("bias") for name in called_parameters(node))


def folded_sources(value: ir.Value) -> tuple[str, ...]:
    """The names an initializer was folded from, or none."""
    return tuple(re.findall(r"'([^']*)'", value.metadata_props.get(FOLDED_FROM, "")))


@dataclass(frozen=True)
class ModulePaths:
    """What tells which module a node of torch's older exporter belongs to.

    Attributes:
        of_nodes: every prefix of the nodes' names.
        of_parameters: the modules that initializers are named after, and the modules that these are in.
    """

    of_nodes: frozenset[str]
    of_parameters: frozenset[str]

    @classmethod
    def of(cls, graph: ir.Graph) -> ModulePaths:
        """Reads the names of a graph's nodes and initializers."""
        nodes = {path for node in graph for path in _prefixes(str(node.name or "").split("/")[1:-1], "/")}
        named = (str(name).split(".")[:-1] for name in graph.initializers if not is_automatic_name(str(name)))
        return cls(frozenset(nodes), frozenset(path for parts in named for path in _prefixes(parts, ".")))


def _prefixes(parts: Sequence[str], separator: str) -> Iterator[str]:
    return itertools.accumulate(parts, lambda path, part: f"{path}{separator}{part}")


def path_scope(node: ir.Node, paths: ModulePaths) -> str:
    """The module of a node of torch's older exporter: `/model/layers.0/linear1/MatMul` -> `model.layers.0.linear1`.

    A module that is called again has `_1` after its name, if the same path without it is among those of the nodes. An
    element of a container has the container's name before its number, and comes after it where the container is a
    module that is called (`/features/features.0/Conv` -> `features.0`); whether `layers.0` is of `layers`, or of a list
    in a module of the same name, its parameters tell.
    """
    if not (node.name or "").startswith("/"):
        return ""
    parts: list[str] = []
    modules: list[str] = []
    for part in str(node.name).split("/")[1:-1]:
        first = re.sub(r"_\d+$", "", part)
        parts.append(first if "/".join([*parts, first]) in paths.of_nodes else part)
        is_element = bool(modules) and re.fullmatch(rf"{re.escape(modules[-1])}\.\d+", parts[-1]) is not None
        if is_element and ".".join([*modules, modules[-1].split(".")[0]]) not in paths.of_parameters:
            modules.pop()
        modules.append(parts[-1])
    return ".".join(modules)


def call_site(node: ir.Node, paths: ModulePaths) -> tuple[str, str] | None:
    """The module of a node and the call of it that the node is of, both "" for the root; None: not known."""
    if has_scope(node):
        scopes = ast.literal_eval(node.metadata_props[_SCOPES])
        return module_scope(node), str(scopes[-2]) if len(scopes) >= 2 else ""
    name = str(node.name or "")
    return (path_scope(node, paths), name.rpartition("/")[0]) if name.startswith("/") else None


def differ_in_digits_only(left: str, right: str) -> bool:
    """Whether two names are the same but for numbers, as those of repeated layers are."""
    return left != right and _DIGITS.split(left)[::2] == _DIGITS.split(right)[::2]


def like(original: str, renamed: str) -> str:
    """`original` with the numbers of `renamed`; both have the same number of numbers."""
    parts, numbers = _DIGITS.split(original), _DIGITS.findall(renamed)
    parts[1::2] = numbers
    return "".join(parts)
