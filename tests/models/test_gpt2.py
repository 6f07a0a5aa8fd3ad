"""GPT-2 as ONNX against `transformers`' GPT2LMHeadModel with the same weights."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import onward
from onward.errors import ParametersError
from onward.models import create_model
from onward.models.gpt2 import SIZES
from tests.models.running import (
    OPSETS,
    initial_weights,
    largest_difference,
    replace_weights,
    run_onnxruntime,
    shake,
    symbols,
)

SMALL = {"size": "tiny", "layers": 2, "heads": 4, "width": 32, "vocab_size": 61, "context_length": 24}


def peer(weights: dict[str, torch.Tensor], tied: bool = True) -> GPT2LMHeadModel:
    """The same network by `transformers`; every weight must find its place."""
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=61, n_positions=24, tie_word_embeddings=tied,
        activation_function="gelu_new", attn_implementation="eager",
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    network = GPT2LMHeadModel(config).eval()
    state = {("" if name.startswith("lm_head") else "transformer.") + name: w for name, w in weights.items()}
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    return network


def token_ids(batch: int = 3, sequence: int = 17) -> torch.Tensor:
    return torch.randint(0, 61, (batch, sequence), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("opset", OPSETS)
def test_logits_equal_those_of_transformers(opset: int) -> None:
    model = create_model("gpt2", opset=opset, **SMALL)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    expected = peer(weights)(token_ids()).logits.detach()
    assert largest_difference(run_onnxruntime(model, token_ids()), [expected]) < 1e-5


def test_untied_output_layer_and_given_positions() -> None:
    model = create_model("gpt2", tied_embedding=False, position_ids=True, **SMALL)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    positions = torch.stack([torch.arange(17).roll(shift) for shift in range(3)])
    expected = peer(weights, tied=False)(token_ids(), position_ids=positions).logits.detach()
    assert largest_difference(run_onnxruntime(model, token_ids(), positions), [expected]) < 1e-5


@pytest.mark.parametrize("opset", [13, 18, 23])
def test_gradients_equal_those_of_transformers(opset: int) -> None:
    """Next-token loss; the tied embedding collects the gradients of both its uses."""
    model = create_model("gpt2", opset=opset, dropout=0.0, **SMALL)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    network, net = peer(weights), onward.to_torch(model)
    assert set(net.weights) == set(weights)
    labels = token_ids().roll(-1, 1).reshape(-1)
    for logits in (network(token_ids()).logits, net(token_ids())):
        torch.nn.functional.cross_entropy(logits.reshape(-1, 61), labels).backward()
    expected = {name.removeprefix("transformer."): weight.grad for name, weight in network.named_parameters()}
    for name, weight in net.weights.items():
        assert weight.grad is not None
        assert largest_difference([weight.grad], [expected[name]]) < 1e-4, name


def test_a_later_token_changes_no_earlier_logits() -> None:
    model = create_model("gpt2", **SMALL)
    other = token_ids()
    other[:, 9] = (other[:, 9] + 1) % 61
    before, after = run_onnxruntime(model, token_ids())[0], run_onnxruntime(model, other)[0]
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize(("size", "numbers"), [("small", 124_439_808), ("medium", 354_823_168)])
def test_sizes_have_the_numbers_of_the_release(size: str, numbers: int) -> None:
    """The published checkpoints hold 124,439,808 and 354,823,168 trained numbers."""
    graph = create_model("gpt2", size=size).graph
    shapes = [v.const_value.shape for v in graph.initializers.values() if "." in str(v.name) and v.const_value]
    assert sum(math.prod(int(axis) for axis in shape) for shape in shapes) == numbers


def test_initial_weights_follow_the_paper() -> None:
    """N(0, 0.02), divided by √(2·layers) where a residual branch ends; biases 0, scales 1; by seed."""
    weights = initial_weights(create_model("gpt2", size="tiny", width=256, layers=8, heads=4))
    assert weights["wte.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["h.3.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    for name in ("h.3.attn.c_proj.weight", "h.7.mlp.c_proj.weight"):
        assert weights[name].std().item() == pytest.approx(0.02 / 4, rel=0.02)
        assert abs(weights[name].mean().item()) < 1e-4
    assert weights["h.0.mlp.c_fc.bias"].eq(0).all()
    assert weights["ln_f.weight"].eq(1).all()
    again = initial_weights(create_model("gpt2", size="tiny", width=256, layers=8, heads=4))
    other = initial_weights(create_model("gpt2", size="tiny", width=256, layers=8, heads=4, seed=1))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["wte.weight"], other["wte.weight"])


def test_dropout_nodes_are_off_and_symbols_reach_every_value() -> None:
    model = create_model("gpt2", **SMALL)
    dropouts = [node for node in model.graph if node.op_type == "Dropout"]
    assert len(dropouts) == 1 + 3 * 2
    assert all(len(node.inputs) == 2 for node in dropouts)
    assert symbols(model) == {"batch", "sequence"}
    assert not [node for node in create_model("gpt2", dropout=0.0, **SMALL).graph if node.op_type == "Dropout"]


def test_training_mode_draws_dropout() -> None:
    net = onward.to_torch(create_model("gpt2", **SMALL))
    calm = net(token_ids())
    assert torch.equal(calm, net(token_ids()))
    net.train()
    assert not torch.equal(net(token_ids()), net(token_ids()))


@pytest.mark.parametrize("opset", OPSETS)
def test_the_checker_accepts_it(opset: int) -> None:
    proto = ir.to_proto(create_model("gpt2", opset=opset, position_ids=True, **SMALL))
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 10


def test_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(
        ParametersError, match=r"width 128 cannot be split into 3 heads; .*\(1, 2, 4, 8, .*another width"
    ):
        create_model("gpt2", size="tiny", width=128, heads=3)


def test_sizes_of_the_paper() -> None:
    assert (SIZES["xl"].layers, SIZES["xl"].width, SIZES["xl"].heads) == (48, 1600, 25)
    assert (SIZES["large"].layers, SIZES["large"].width) == (36, 1280)
