"""Modules whose parameters are equal when they are exported, and training them two ways.

Exporters store equal tensors once. A case is a kind of module, the numbers that its parameters start from, a width, an
exporter with its options, and what became of the file afterwards: every parameter trains as it does in the module.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import nn

import onward
from onward.lowering.module import OnnxModule
from tests.graph.exported import export
from tests.graph.shared_layers import descend_together
from tests.initializers import stored_arrays
from tests.one_node import run_onnxruntime

HEADS = 2
BOUND = 1e-5
"""Of outputs after three updates, relative, and of parameters; where one is tied or split wrongly, both are larger."""


class Way(nn.Module):
    """Layers under their names, and a way through them."""

    def __init__(self, way: Callable[[Any, torch.Tensor], torch.Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


def channels_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def linears(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
    )


def flat_linears(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.second(torch.tanh(m.first(x.mean(1)))),
        first=nn.Linear(width, width),
        second=nn.Linear(width, width),
    )


def shared_linear(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.shared(m.other(torch.tanh(m.shared(x)))),
        shared=nn.Linear(width, width),
        other=nn.Linear(width, width),
    )


def named_copies(width: int) -> nn.Module:
    online = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))
    return Way(lambda m, x: m.target(m.online(x)), online=online, target=copy.deepcopy(online))


def copies_called_twice(width: int) -> nn.Module:
    online = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))
    return Way(lambda m, x: m.target(m.online(m.target(m.online(x)))), online=online, target=copy.deepcopy(online))


def two_names(width: int) -> nn.Module:
    layer = nn.Linear(width, width)
    return Way(
        lambda m, x: m.alias(m.other(torch.tanh(m.layer(x)))), layer=layer, alias=layer, other=nn.Linear(width, width)
    )


def towers(width: int) -> nn.Module:
    parts = nn.ModuleDict(
        {name: nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for name in ("image", "text")}
    )
    return Way(lambda m, x: m.towers["image"](x) * torch.tanh(m.towers["text"](x[:, :1])), towers=parts)


def norms(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.last(channels_first(m.group(channels_first(torch.tanh(m.first(m.linear(x))) + x)))),
        first=nn.LayerNorm(width),
        group=nn.GroupNorm(1, width),
        last=nn.LayerNorm(width),
        linear=nn.Linear(width, width),
    )


def shared_norm(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.shared(m.linear(m.other(torch.tanh(m.linear(m.shared(x)))))),
        shared=nn.LayerNorm(width),
        other=nn.LayerNorm(width),
        linear=nn.Linear(width, width),
    )


def rms_norms(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.second(torch.tanh(m.linear(m.first(x)))),
        first=nn.RMSNorm(width, eps=1e-5),
        second=nn.RMSNorm(width, eps=1e-5),
        linear=nn.Linear(width, width),
    )


def convolutions(width: int) -> nn.Module:
    return Way(
        lambda m, x: channels_first(m.second(m.shared(torch.tanh(m.shared(m.first(channels_first(x))))))),
        first=nn.Conv1d(width, width, 1),
        shared=nn.Conv1d(width, width, 1),
        second=nn.Conv1d(width, width, 1),
    )


def batch_norms(width: int) -> nn.Module:
    """Before the convolutions, into which exporters would fold them."""
    return Way(
        lambda m, x: channels_first(m.second(torch.tanh(m.conv(m.first(channels_first(x)))).relu())),
        first=nn.BatchNorm1d(width),
        second=nn.BatchNorm1d(width),
        conv=nn.Conv1d(width, width, 1),
    )


def attention(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.first(x, x, x, need_weights=False)[0],
        first=nn.MultiheadAttention(width, HEADS, batch_first=True),
    )


def two_attentions(width: int) -> nn.Module:
    def way(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(m.own(x, x, x, need_weights=False)[0])
        return m.cross(y, x, x + 1, need_weights=False)[0]

    return Way(
        way,
        own=nn.MultiheadAttention(width, HEADS, batch_first=True),
        cross=nn.MultiheadAttention(width, HEADS, batch_first=True),
    )


def shared_attention(width: int) -> nn.Module:
    def way(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(m.shared(x, x, x, need_weights=False)[0])
        y = m.other(y, x, x, need_weights=False)[0]
        return m.shared(y, y, x, need_weights=False)[0]

    return Way(
        way,
        shared=nn.MultiheadAttention(width, HEADS, batch_first=True),
        other=nn.MultiheadAttention(width, HEADS, batch_first=True),
    )


class OwnAttention(nn.Module):
    """Attention as libraries write it: one layer gives queries, keys and values, or three do."""

    def __init__(self, width: int, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        if joined:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.joined else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def own_attentions(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.second(torch.tanh(m.first(x))),
        first=OwnAttention(width, True),
        second=OwnAttention(width, False),
    )


def encoder(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, HEADS, width, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder(width: int) -> nn.Module:
    layer = nn.TransformerDecoderLayer(width, HEADS, width, 0.0, batch_first=True)
    return Way(lambda m, x: m.layers(x, torch.tanh(x)), layers=nn.TransformerDecoder(layer, 2))


def looped_encoder(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.shared(m.other(m.shared(x))),
        shared=nn.TransformerEncoderLayer(width, HEADS, width, 0.0, batch_first=True),
        other=nn.TransformerEncoderLayer(width, HEADS, width, 0.0, batch_first=True),
    )


def recurrent(width: int) -> nn.Module:
    return Way(
        lambda m, x: m.second(torch.tanh(m.first(x)[0]))[0],
        first=nn.GRU(width, width, batch_first=True),
        second=nn.GRU(width, width, batch_first=True),
    )


def vectors(width: int) -> nn.Module:
    """Parameters of no layer, as scales of residual branches are."""
    return Way(
        lambda m, x: x * m.alpha + torch.tanh(x + m.shift) * m.beta + m.linear(x) * m.alpha + m.offset,
        alpha=nn.Parameter(torch.ones(width)),
        beta=nn.Parameter(torch.ones(width)),
        shift=nn.Parameter(torch.zeros(width)),
        offset=nn.Parameter(torch.zeros(width)),
        linear=nn.Linear(width, width),
    )


def reshaped_vectors(width: int) -> nn.Module:
    """The same in shapes that calls make of them."""
    return Way(
        lambda m, x: channels_first(
            channels_first(x) * m.alpha.view(1, -1, 1)
            + torch.tanh(channels_first(x) + m.shift[None, :, None]) * m.beta.view(1, -1, 1)
            + m.offset[:, None]
        ),
        alpha=nn.Parameter(torch.ones(width)),
        beta=nn.Parameter(torch.ones(width)),
        shift=nn.Parameter(torch.zeros(width)),
        offset=nn.Parameter(torch.zeros(width)),
    )


def slopes(width: int) -> nn.Module:
    return Way(
        lambda m, x: channels_first(m.second(m.conv(m.first(channels_first(x))))),
        first=nn.PReLU(width),
        second=nn.PReLU(width),
        conv=nn.Conv1d(width, width, 1),
    )


def tied_head(width: int) -> nn.Module:
    """Two layers of one matrix under two names, with biases of their own."""
    first, second = nn.Linear(width, width), nn.Linear(width, width)
    second.weight = first.weight
    return Way(
        lambda m, x: m.second(torch.tanh(m.third(torch.tanh(m.first(x))))),
        first=first,
        second=second,
        third=nn.Linear(width, width),
    )


def scalars(width: int) -> nn.Module:
    """Parameters of one number: slopes that all modules start with, biases of two heads, two temperatures."""

    def way(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.second(m.linear(m.first(x)))
        return torch.cat((m.left(x) * m.warm, m.right(torch.tanh(x)) * m.cold), -1)

    return Way(
        way,
        first=nn.PReLU(),
        second=nn.PReLU(),
        linear=nn.Linear(width, width),
        left=nn.Linear(width, 1),
        right=nn.Linear(width, 1),
        warm=nn.Parameter(torch.ones(1)),
        cold=nn.Parameter(torch.ones(1)),
    )


def embeddings(width: int) -> nn.Module:
    """Two tables that may start equal, and an output layer that is tied to one of them."""
    first, second, head = nn.Embedding(5, width), nn.Embedding(5, width), nn.Linear(width, 5, bias=False)
    head.weight = first.weight

    def way(m: Any, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()
        return m.head(torch.tanh(m.first(tokens) + m.second(tokens) * x))

    return Way(way, first=first, second=second, head=head)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    build.__name__: build
    for build in (
        linears, flat_linears, shared_linear, named_copies, copies_called_twice, two_names, towers, norms, shared_norm,
        rms_norms, convolutions, batch_norms, attention, two_attentions, shared_attention, own_attentions, encoder,
        decoder, looped_encoder, recurrent, vectors, reshaped_vectors, slopes, tied_head, scalars, embeddings,
    )
}  # fmt: skip

VALUES = ("fresh", "zero", "one", "random", "equal", "equal zero", "zero matrices")
"""What parameters start from: torch's own; biases of zeros or ones; all random; equal wherever shapes are, the biases
as well or of zeros; every second matrix of zeros."""


def fill(module: nn.Module, values: str) -> None:
    """Gives a module's parameters the numbers that a case asks for, in place."""
    first: dict[tuple[torch.Size, bool], torch.Tensor] = {}
    matrices = 0
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            vector = parameter.dim() == 1
            is_bias = vector and re.search("bias|shift|offset", name) is not None
            if values == "random":
                # No wider, however many are summed: a network that magnifies rounding shows nothing else.
                deviation = 0.3 if vector else 0.3 * (8 / parameter.shape[-1]) ** 0.5
                parameter.copy_(torch.randn_like(parameter) * deviation + (0.0 if is_bias else vector * 1.0))
            if values in ("zero", "equal zero") and is_bias:
                parameter.zero_()
            if values == "one" and vector:
                parameter.fill_(1)
            if values.startswith("equal") and not (is_bias and values == "equal zero"):
                if vector and values == "equal":
                    parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.5)
                parameter.copy_(first.setdefault((parameter.shape, is_bias), parameter.clone()))
            if values == "zero matrices" and not vector:
                matrices += 1
                if matrices % 2 == 0:
                    parameter.zero_()


EXPORTERS: dict[str, dict[str, Any]] = {
    "new": {"dynamo": True, "opset": 18},
    "new, not optimized": {"dynamo": True, "opset": 18, "optimize": False},
    "new, dynamic batch": {"dynamo": True, "opset": 20, "dynamic_shapes": ({0: torch.export.Dim("batch")},)},
    "new, opset 23": {"dynamo": True, "opset": 23},
    "old": {"dynamo": False, "opset": 17},
    "old, not folded": {"dynamo": False, "opset": 17, "do_constant_folding": False},
    "old, inputs": {"dynamo": False, "opset": 13, "keep_initializers_as_inputs": True},
    "old, not folded, inputs": {
        "dynamo": False, "opset": 12, "do_constant_folding": False, "keep_initializers_as_inputs": True,
    },
    "old, training": {"dynamo": False, "opset": 16, "training": torch.onnx.TrainingMode.TRAINING,
                      "do_constant_folding": False},
    "old, opset 11": {"dynamo": False, "opset": 11},
    "old, dynamic batch": {"dynamo": False, "opset": 20, "input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}},
}  # fmt: skip


def without_metadata(model: onnx.ModelProto) -> onnx.ModelProto:
    """What a tool leaves that drops all metadata."""
    for holder in (model, model.graph, *model.graph.node, *model.graph.initializer):
        del holder.metadata_props[:]
    del model.graph.value_info[:]
    return model


def without_identities(model: onnx.ModelProto) -> onnx.ModelProto:
    """What a simplifier leaves, which removes nodes that compute nothing."""
    origin = {tensor.name: tensor.name for tensor in model.graph.initializer}
    replaced: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in origin:
            replaced[node.output[0]] = origin[node.output[0]] = origin[node.input[0]]
    kept = [node for node in model.graph.node if not (node.op_type == "Identity" and node.output[0] in replaced)]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = replaced.get(name, name)
    return model


def without_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without metadata and names of nodes: all that is left are the initializers' names."""
    for node in without_metadata(model).graph.node:
        node.name = ""
    return model


AFTERWARDS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "kept": lambda model: model,
    "stripped": without_metadata,
    "no identities": without_identities,
    "no names": without_names,
}


@dataclass(frozen=True)
class Case:
    """One file."""

    kind: str
    values: str
    width: int
    exporter: str
    afterwards: str = "kept"

    def __str__(self) -> str:
        return f"{self.kind}, {self.values}, {self.width}, {self.exporter}, {self.afterwards}"


@dataclass
class Outcome:
    """How a file trained compared with its module.

    Attributes:
        distance: of outputs after training, relative to the largest.
        by_name: largest distance of a parameter that the file stores under its own name, and that parameter.
        numbers: distance of all trained numbers, sorted; None where the file has more or fewer.
        notes: what was said.
    """

    distance: float
    by_name: tuple[float, str]
    numbers: float | None
    notes: tuple[str, ...]
    weights: list[str] = field(default_factory=list)

    @property
    def is_reported(self) -> bool:
        """Whether the user was told that the file leaves something open, and what to set."""
        marks = ("in training.tied_weights", "in training.untied_weights", "or once they differ")
        return any(mark in note for note in self.notes for mark in marks)

    def is_right(self, bound: float = BOUND) -> bool:
        """Whether outputs and every parameter are the module's."""
        return self.distance < bound and self.by_name[0] < bound and (self.numbers is None or self.numbers < bound)


def dropped_parameters(model: onnx.ModelProto) -> set[str]:
    """Biases of zeros that the newer exporter dropped; it calls them `p_first_bias`."""
    found: set[str] = set()
    for node in model.graph.node:
        metadata = {one.key: one.value for one in node.metadata_props}
        if metadata.get("pkg.onnxscript.rewriter.rule_name", "").startswith("RemoveOptionalBias"):
            found.update(re.findall(r"%(p_\w+bias)", metadata.get("pkg.torch.onnx.fx_node", "")))
    return found


def make_module(case: Case) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = KINDS[case.kind](case.width)
    fill(module, case.values)
    return module.eval(), torch.randn(2, 3, case.width)


def export_case(case: Case, module: nn.Module, x: torch.Tensor, folder: Path) -> onnx.ModelProto:
    options = dict(EXPORTERS[case.exporter])
    opset, dynamo = options.pop("opset"), options.pop("dynamo")
    return onnx.load(export(module, (x,), folder / "m.onnx", opset, dynamo, **options))


def train_case(
    case: Case, folder: Path, exported: onnx.ModelProto | None = None, updates: int = 3, **options: Any
) -> Outcome:
    """Trains a module and its file alike, and compares every number; what the file does not hold stays as it is."""
    module, x = make_module(case)
    file = onnx.ModelProto()
    file.CopyFrom(export_case(case, module, x, folder) if exported is None else exported)
    dropped = dropped_parameters(file)
    net: OnnxModule = onward.to_torch(AFTERWARDS[case.afterwards](file), **options)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("p_" + re.sub(r"\W", "_", name).lower() not in dropped)
    descend_together(net, module, x, updates)
    onward.export(net, folder / "t.onnx")
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    result = onnx.load(folder / "t.onnx")
    found, expected = run_onnxruntime(result, other)[0], module(other).detach().numpy()
    distance = float(np.abs(found - expected).max() / np.abs(expected).max())
    stored = stored_arrays(result)
    named = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    near = [
        (_distance_of_matrix(stored[name], array), name)
        for name, array in named.items()
        if name in stored and stored[name].shape == array.shape
    ]
    return Outcome(
        distance,
        max(near, default=(0.0, "")),
        _distance_of_numbers(net, [p for p in module.parameters() if p.requires_grad]),
        net.graph.notes,
        list(net.weights),
    )


def _distance_of_matrix(left: np.ndarray, right: np.ndarray) -> float:
    """Or of one's transpose: the exporter merges a transposed matrix of zeros with one that is not, and under which
    name each is stored shows in the outputs alone."""
    ways = [right, right.T] if right.ndim == 2 and right.shape[0] == right.shape[1] else [right]
    return min(float(np.abs(left - way).max()) for way in ways)


def _distance_of_numbers(net: OnnxModule, parameters: list[nn.Parameter]) -> float | None:
    """Of all trained numbers in ascending order: wherever an exporter put a number, it must be there."""
    left = np.sort(np.concatenate([weight.detach().numpy().reshape(-1) for weight in net.weights.values()]))
    right = np.sort(np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in parameters]))
    return float(np.abs(left - right).max()) if left.size == right.size else None


OF_ATTENTION = {
    "attention", "two_attentions", "shared_attention", "own_attentions", "encoder", "decoder", "looped_encoder"
}  # fmt: skip


def can_be_exported(case: Case) -> bool:
    """Whether the exporter has the operators, and the file computes what the module does in `eval()`."""
    options = EXPORTERS[case.exporter]
    if case.kind == "batch_norms" and "training" in options:
        return False  # by the statistics of the batch
    if case.kind in OF_ATTENTION and options["opset"] < 14:
        return False
    return case.kind != "rms_norms" or bool(options["dynamo"])


def every_case() -> Iterator[Case]:
    """All cases of both exporters, at widths on both sides of the newer one's threshold of 1,024 elements."""
    for exporter, options in EXPORTERS.items():
        ways = ("kept", "stripped") if options["dynamo"] else ("kept", "no identities", "no names")
        for kind in KINDS:
            for values in VALUES:
                for width in (8, 40):
                    cases = [Case(kind, values, width, exporter, afterwards) for afterwards in ways]
                    yield from filter(can_be_exported, cases)


UNDECIDED = {
    # The second call reads slices of a bias of zeros, which were merged with other zeros.
    ("shared_attention", "fresh", "old"),
    ("shared_attention", "zero", "old"),
    # A matrix that is folded for two layers, whose biases are equal: shared, or a copy?
    ("tied_head", "zero", "old"),
    ("tied_head", "fresh", "old, inputs"),
    ("tied_head", "zero", "old, inputs"),
}
"""Kind, values and exporter of cases in which the file does not tell: the user is."""


def check(case: Case, folder: Path) -> None:
    outcome = train_case(case, folder)
    if (case.kind, case.values, case.exporter) in UNDECIDED:
        assert outcome.is_reported
    else:
        assert outcome.is_right(), (str(case), outcome)
