"""Recurrent layers read the weights that a file's are put together from; values and gradients are torch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.graph.fusion.pairs import parse
from tests.lowering.rewriting.test_direct_calls import called, direct_twin, same_bits

T, N, WIDTH, H = 3, 2, 4, 5
SHAPE = (T, N, WIDTH)
# ONNX's gates in torch's order, and attributes.
KINDS: dict[str, tuple[list[int], str]] = {
    "LSTM": ([0, 3, 1, 2], ""),
    "GRU": ([1, 0, 2], ", linear_before_reset=1"),
    "RNN": ([0], ', activations=["Tanh", "Tanh"]'),
}


def layer(kind: str, directions: int) -> nn.RNNBase:
    torch.manual_seed(0)
    made: nn.RNNBase = getattr(nn, kind)(WIDTH, H, bidirectional=directions == 2)
    return made


def as_exported(kind: str, directions: int, attributes: str = "", start: str = "") -> tuple[str, dict[str, Any]]:
    """The layer as torch's exporter writes it, and its weights."""
    gates, more = KINDS[kind]
    lines, joined = ["axis = Constant<value_ints=[0]>()"], dict[str, list[str]]()
    for place in range(len(gates)):
        lines += [
            f"from{place} = Constant<value_ints=[{place * H}]>()",
            f"to{place} = Constant<value_ints=[{(place + 1) * H}]>()",
        ]
    for name, _ in layer(kind, directions).named_parameters():
        lines += [f"{name}_{place} = Slice({name}, from{place}, to{place}, axis)" for place in range(len(gates))]
        parts = ", ".join(f"{name}_{place}" for place in gates)
        lines += [f"{name}_all = Concat<axis=0>({parts})", f"{name}_d = Unsqueeze({name}_all, axis)"]
        joined.setdefault(name.replace("_reverse", ""), []).append(f"{name}_d")
    for name, stacks in joined.items():
        lines.append(f"{name}_of_all = Concat<axis=0>({', '.join(stacks)})")
    lines.append("biases = Concat<axis=1>(bias_ih_l0_of_all, bias_hh_l0_of_all)")
    direction = "bidirectional" if directions == 2 else "forward"
    lines.append(f'z, h = {kind}<hidden_size={H}, direction="{direction}"{more}{attributes}>'
                 f"(x, weight_ih_l0_of_all, weight_hh_l0_of_all, biases{start})")  # fmt: skip
    stored = {name: weight.detach().numpy() for name, weight in layer(kind, directions).named_parameters()}
    return "\n".join(lines), stored


def network(body: str, stored: dict[str, Any]) -> OnnxModule:
    model = parse(f"float[{T},{N},{WIDTH}] x", f"float[{T},d,{N},{H}] z", body, stored)
    return OnnxModule(make_training_graph(model))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_torchs_exports_are_read_as_they_are(kind: str, directions: int) -> None:
    net, original = network(*as_exported(kind, directions)), layer(kind, directions)
    before, program = direct_twin(net, SHAPE)
    names = called(program)
    assert f"_{kind.lower()}" in names
    assert not {"narrow", "cat"} & {*names}
    same_bits(net, before, program, SHAPE)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    (found,) = program(True, torch.device("cpu"), (x,), net.tensors_by_name())
    expected, _ = original(x)
    torch.testing.assert_close(found.transpose(1, 2).flatten(2), expected)
    (found.square().sum() + 0 * expected.sum()).backward()
    original.zero_grad()
    original(x)[0].square().sum().backward()
    for name, weight in original.named_parameters():
        torch.testing.assert_close(net.weights[name].grad, weight.grad)


def test_a_first_state_is_read() -> None:
    body, stored = as_exported("GRU", 1, start=", , first")
    net = network(body, {**stored, "first": np.ones((1, N, H), np.float32)})
    before, program = direct_twin(net, SHAPE)
    assert "_gru" in called(program)
    same_bits(net, before, program, SHAPE)


STAYS = {
    "gates in ONNX's order": ("LSTM", "_0, {0}_3, {0}_1, {0}_2", "_0, {0}_1, {0}_2, {0}_3", "", ""),
    "weights that are computed": ("GRU", "weight_ih_l0_d =", "w = Neg(weight_ih_l0_all)\nweight_ih_l0_d =", "", ""),
    "clipped gates": ("LSTM", "", "", ", clip=3.0", ""),
    "other functions": ("GRU", "", "", ', activations=["Sigmoid", "Relu"]', ""),
    "sequences of different lengths": ("GRU", "", "", "", ", lengths"),
}  # fmt: skip


@pytest.mark.parametrize("case", STAYS)
def test_what_torch_does_not_compute_so_stays(case: str) -> None:
    kind, old, new, attributes, start = STAYS[case]
    body, stored = as_exported(kind, 1, attributes, start)
    if "{0}" in old:
        for name in stored:
            body = body.replace(name + old.format(name), name + new.format(name))
    elif old:
        body = body.replace(old, new).replace("Unsqueeze(weight_ih_l0_all", "Unsqueeze(w")
    if start:
        stored["lengths"] = np.array([2, 3], np.int32)
    net = network(body, stored)
    before, program = direct_twin(net, SHAPE)
    assert kind.lower() in called(program)
    same_bits(net, before, program, SHAPE)
