"""Mixtures of experts as one node: tokens sorted by expert, a product for each expert, and their shares of the result.

No token is dropped, and nothing is computed for experts that a token did not choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.lowering.passes import is_plain
from onward.lowering.process_groups import exchange_counts, exchange_rows
from onward.lowering.registry import lowers

_ACTIVATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "relu": lambda x, alpha: torch.relu(x),
    "gelu": lambda x, alpha: F.gelu(x),
    "gelu_tanh": lambda x, alpha: F.gelu(x, approximate="tanh"),
    "swish": lambda x, alpha: F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x),
    "sigmoid": lambda x, alpha: torch.sigmoid(x),
    "tanh": lambda x, alpha: torch.tanh(x),
    "identity": lambda x, alpha: x,
    "relu_squared": lambda x, alpha: torch.relu(x).square(),
}


@lowers("Experts", domain=DOMAIN)
def experts(
    X: Tensor,
    indices: Tensor | None,
    shares: Tensor | None,
    *weights: Tensor,
    experts: int,
    activation: str,
    alpha: float = 1.0,
    gated: int = 0,
    rows_are_outputs: int = 0,
    is_biased: int = 0,
    hidden: int = 0,
    gate_low: float = -math.inf,
    gate_high: float = math.inf,
    value_low: float = -math.inf,
    value_high: float = math.inf,
    value_shift: float = 0.0,
    scales_input: int = 0,
    capacity_factor: float | None = None,
    expert_size: int = 1,
    expert_group: str = "",
    training: bool,
) -> Tensor:
    """The sum over the choices of each token of `share * expert(token)`.

    Args:
        X: tokens [.., d]; without choices, what is in the slots of each expert, [experts, .., d].
        indices, shares: of the chosen experts, [.., k]; None: the result is what the experts make of their slots.
        weights: of the gate (where `gated` is 1), of the layer up and of the layer down, then their biases; each a
            stack [experts, ..], or a tensor for each expert.
        experts: how many there are.
        activation: after the first layer.
        alpha: of Swish.
        gated: 0: no gate; 1: a matrix of its own; 2: the first half of the layer up; 3: its features 0, 2, ..
        rows_are_outputs: matrices are [outputs, inputs].
        is_biased: layers have biases.
        hidden: features that the layer down reads, of all ranks whose results are added up; 0: those of its matrix.
        gate_low, gate_high, value_low, value_high: bounds of the gate and of what it is multiplied with.
        value_shift: added to the latter.
        scales_input: the sum over the choices is of `expert(share * token)`.
        capacity_factor: in training, tokens of an expert relative to an equal share; it drops what comes after them.
        expert_size: ranks that share the experts; weights are of this rank's.
        expert_group: these ranks.
        training: the network is in training mode.
    """
    gate = Gate(gated, (gate_low, gate_high), (value_low, value_high), value_shift)
    body = Body(weights, activation, alpha, gate, bool(rows_are_outputs), bool(is_biased), hidden, bool(scales_input))
    shared = (expert_size, expert_group) if expert_size > 1 else None
    if indices is None or shares is None:
        if shared is None:
            found = body.of_slots(X.flatten(1, -2))
            return found.view(*X.shape[:-1], found.shape[-1])
        slots = _disable_dynamo(_of_slots) if torch.compiler.is_compiling() else _of_slots
        return slots(body, X, *shared)
    tokens, chosen, of_chosen = (tensor.flatten(0, -2) for tensor in (X, indices, shares))
    if expert_size == 1 and not torch.compiler.is_compiling() and not is_plain(X):
        return _of_all(body, tokens, chosen, of_chosen, experts).reshape(X.shape)
    limit = capacity_factor if training else None
    # Code would be compiled again for every number of rows; what is around the experts has one size without a limit.
    is_one_size = limit is None and shared is None
    compute = _of_rows if is_one_size or not torch.compiler.is_compiling() else _disable_dynamo(_of_rows)
    return compute(body, tokens, chosen, of_chosen, experts, limit, shared).reshape(X.shape)


def _of_rows(
    body: Body,
    tokens: Tensor,
    chosen: Tensor,
    shares: Tensor,
    experts: int,
    capacity_factor: float | None,
    shared: tuple[int, str] | None,
) -> Tensor:
    order = torch.argsort(chosen.flatten(), stable=True)
    counts = None
    if capacity_factor is not None:
        most, counts = math.ceil(capacity_factor * len(order) / experts), counts_of(chosen, experts)
        order = torch.cat([own[:most] for own in torch.split(order, counts)])
        counts = [min(count, most) for count in counts]
    places = places_in(order, chosen.numel())
    rows = sorted_rows(tokens, order, places, chosen.shape[1])
    if body.scales_input:
        rows = rows * shares.reshape(-1, 1)[order].to(rows.dtype)
        shares = torch.ones_like(shares)
    compute = _disable_dynamo(_outputs) if torch.compiler.is_compiling() else _outputs
    outputs = compute(body, rows, counts, chosen, experts, shared)
    return weighed_sum(outputs, shares, order, places).to(tokens.dtype)


def _outputs(
    body: Body,
    rows: Tensor,
    counts: list[int] | None,
    chosen: Tensor,
    experts: int,
    shared: tuple[int, str] | None,
) -> Tensor:
    """What the experts make of rows that are sorted by them; without counts each has all that chose it."""
    counts = counts_of(chosen, experts) if counts is None else counts
    return body(rows, counts) if shared is None else _on_their_ranks(body, rows, counts, *shared)


def _of_slots(body: Body, X: Tensor, size: int, group: str) -> Tensor:
    rows = X.flatten(0, -2)
    found = _on_their_ranks(body, rows, [len(rows) // len(X)] * len(X), size, group)
    return found.view(*X.shape[:-1], found.shape[-1])


def _on_their_ranks(body: Body, rows: Tensor, counts: Sequence[int], size: int, group: str) -> Tensor:
    """The results of rows whose experts are on several ranks, which each have as many."""
    own = len(counts) // size
    if isinstance(rows, FakeTensor):  # as if every rank had as many tokens for the others
        of_experts = [sum(counts[e::own]) for e in range(own)]
        of_ranks = [sum(counts[rank * own : (rank + 1) * own]) for rank in range(size)]
        arrived = exchange_rows(rows, of_ranks, of_ranks, group)
        return exchange_rows(body(arrived, of_experts), of_ranks, of_ranks, group)
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows.requires_grad_()  # all ranks take part in the backward pass, whatever trains there
    there = torch.tensor(counts, device=rows.device).view(size, own)
    here = exchange_counts(there, group)
    sent, received = there.sum(1).tolist(), here.sum(1).tolist()
    arrived = exchange_rows(rows, sent, received, group)
    numbers = torch.arange(own, device=rows.device).repeat(size).repeat_interleave(here.flatten())
    order = torch.argsort(numbers, stable=True)
    places = places_in(order, len(order))
    results = body(sorted_rows(arrived, order, places, 1), here.sum(0).tolist())
    return exchange_rows(sorted_rows(results, places, order, 1), received, sent, group)


def _of_all(body: Body, tokens: Tensor, chosen: Tensor, shares: Tensor, experts: int) -> Tensor:
    """The same for tracing, where no number may depend on data: every expert computes every token."""
    gates = [torch.where(chosen == e, shares, 0).sum(-1, keepdim=True) for e in range(experts)]
    if body.scales_input:
        results = (body.expert(e, tokens * gate.to(tokens.dtype)) for e, gate in enumerate(gates))
        chose = ((chosen == e).any(-1, keepdim=True) for e in range(experts))
        return sum((torch.where(m, y, 0) for m, y in zip(chose, results, strict=True)), torch.zeros_like(tokens))
    return sum((gate * body.expert(e, tokens) for e, gate in enumerate(gates)), torch.zeros_like(tokens))


def counts_of(chosen: Tensor, experts: int) -> list[int]:
    """How many rows each expert has; where nothing is computed, as many as any other."""
    if isinstance(chosen, FakeTensor) or chosen.is_meta:
        rows = chosen.numel()
        return [rows * (e + 1) // experts - rows * e // experts for e in range(experts)]
    counts: list[int] = torch.bincount(chosen.flatten(), minlength=experts).tolist()
    return counts


class Gate(NamedTuple):
    """How the two parts of a gated layer are multiplied: `activation(clip(gate)) * (clip(value) + shift)`.

    Attributes:
        gated: 0: there is no gate; 1 to 3: where it comes from, as of the node.
        gate_bounds, value_bounds: the least and the largest.
        shift: of the value.
    """

    gated: int
    gate_bounds: tuple[float, float] = (-math.inf, math.inf)
    value_bounds: tuple[float, float] = (-math.inf, math.inf)
    shift: float = 0.0

    def parts(self, hidden: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gate and the value of what the first layers give; alone what is activated, where there is no gate."""
        if self.gated == 0:
            return hidden
        if self.gated == 2:
            hidden = hidden[0].chunk(2, -1)
        elif self.gated == 3:
            hidden = hidden[0][..., ::2], hidden[0][..., 1::2]
        gate, value = (_clipped(x, b) for x, b in zip(hidden, (self.gate_bounds, self.value_bounds), strict=True))
        return gate, value + self.shift if self.shift else value


def _clipped(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = (None if math.isinf(bound) else bound for bound in bounds)
    return x if low is None and high is None else x.clamp(low, high)


class Body:
    """What experts compute of rows that are sorted by expert.

    Args:
        weights, activation, alpha, rows_are_outputs, is_biased, hidden, scales_input: as of the node, for the
            experts that rows are given of.
        gate: how a gated layer is multiplied.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        activation: str,
        alpha: float,
        gate: Gate,
        rows_are_outputs: bool,
        is_biased: bool,
        hidden: int = 0,
        scales_input: bool = False,
    ) -> None:
        layers = 3 if gate.gated == 1 else 2
        each = len(weights) // (layers * (1 + is_biased))
        columns = [list(weights[i : i + each]) for i in range(0, len(weights), each)]
        self._is_stacked = weights[0].dim() > 2
        for i, column in enumerate(columns):  # stacks may have axes of size 1 that an exporter put in
            start, end = int(self._is_stacked), -1 if i >= layers else -2
            columns[i] = [one.reshape(*one.shape[:start], *one.shape[end:]) for one in column]
        own = columns[layers - 1][0].shape[-1 if rows_are_outputs else -2]
        if is_biased and hidden not in (0, own):  # every rank adds its share of the last bias
            columns[-1] = [bias * (own / hidden) for bias in columns[-1]]
        self._stacks = columns
        unbound = [column[0].unbind(0) if self._is_stacked else column for column in columns]
        self._matrices, self._biases = unbound[:layers], unbound[layers:]
        self._activation = _ACTIVATIONS[activation]
        self._alpha, self._gate, self._rows_are_outputs = alpha, gate, rows_are_outputs
        self.scales_input = scales_input

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The results of rows; of experts without rows the gradients are zeros."""
        return torch.cat([self.expert(e, own) for e, own in enumerate(torch.split(rows, list(counts)))])

    def of_slots(self, slots: Tensor) -> Tensor:
        """The results of as many rows for each expert, [experts, rows, d]."""
        if self._is_stacked:
            return self.expert(None, slots)
        return torch.stack([self.expert(e, own) for e, own in enumerate(slots.unbind(0))])

    def expert(self, e: int | None, x: Tensor) -> Tensor:
        """What one expert computes of rows; None: all of them, of the rows of each."""
        *first, down = range(len(self._matrices))
        first_part, *value = self._gate.parts([self._linear(layer, e, x) for layer in first])
        found = self._activation(first_part, self._alpha)
        return self._linear(down, e, found * value[0] if value else found)

    def _linear(self, layer: int, e: int | None, x: Tensor) -> Tensor:
        if e is None:
            stack = self._stacks[layer][0]
            product = x @ (stack.mT if self._rows_are_outputs else stack)
            return product + self._stacks[len(self._matrices) + layer][0].unsqueeze(1) if self._biases else product
        matrix = self._matrices[layer][e]
        bias = self._biases[layer][e] if self._biases else None
        return F.linear(x, matrix if self._rows_are_outputs else matrix.T, bias)


def places_in(order: Tensor, count: int) -> Tensor:
    """Where each of `count` choices is in the order of some of them; -1: nowhere."""
    places = order.new_full((count,), -1)
    return places.scatter(0, order, torch.arange(len(order), device=order.device))


def sorted_rows(tokens: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
    """Choice `order[i]` of all tokens' is row i; the gradient comes back without adding at random places."""
    rows: Tensor = _SortedRows.apply(tokens, order, places, choices)  # type: ignore[no-untyped-call]
    return rows


class _SortedRows(torch.autograd.Function):
    @staticmethod
    def forward(tokens: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
        """Row i is the token of choice `order[i]`."""
        return tokens.index_select(0, order // choices)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps where the choices are."""
        _, _, places, ctx.choices = inputs
        ctx.save_for_backward(places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The sum over the choices of each token; nothing comes from those that were dropped."""
        (places,), (rows,) = ctx.saved_tensors, gradients
        # No -1: a rank may have no rows.
        count = len(places) // ctx.choices
        return _of_choices(rows, places).view(count, ctx.choices, rows.shape[1]).sum(1), None, None, None


def weighed_sum(outputs: Tensor, shares: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """For each token the sum of its experts' results times their shares [N, k], in the wider type of both."""
    result: Tensor = _WeighedSum.apply(outputs, shares, order, places)  # type: ignore[no-untyped-call]
    return result


class _WeighedSum(torch.autograd.Function):
    @staticmethod
    def forward(outputs: Tensor, shares: Tensor, order: Tensor, places: Tensor) -> Tensor:
        """Of the rows that a token has; of a dropped one comes zero."""
        dtype = torch.promote_types(shares.dtype, outputs.dtype)
        rows = _of_choices(outputs, places).view(*shares.shape, outputs.shape[1])
        return (rows.to(dtype) * shares.to(dtype).unsqueeze(-1)).sum(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the rows as they are sorted."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Of rows the share of their token's gradient; of shares its product with the rows."""
        outputs, shares, order, places = ctx.saved_tensors
        of_rows = gradients[0].index_select(0, order // shares.shape[1])
        own = shares.reshape(-1, 1).index_select(0, order).to(of_rows.dtype)
        products = (of_rows * outputs).sum(-1, keepdim=True)
        of_shares = _of_choices(products, places).view(shares.shape)
        return (of_rows * own).to(outputs.dtype), of_shares.to(shares.dtype), None, None


def _of_choices(rows: Tensor, places: Tensor) -> Tensor:
    """The row of each choice, zero for those that have none."""
    if len(rows) == len(places):
        return rows.index_select(0, places)
    return rows.index_select(0, places.clamp(min=0)).masked_fill((places < 0).unsqueeze(-1), 0)
