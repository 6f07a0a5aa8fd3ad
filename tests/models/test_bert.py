"""BERT as ONNX against `transformers`' BertForPreTraining with the same weights."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import BertConfig, BertForPreTraining

import onward
from onward.models import create_model
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


def is_transposed(name: str, weight: torch.Tensor) -> bool:
    """Linear layers keep [inputs, outputs] here and [outputs, inputs] there; embeddings are the same."""
    return weight.ndim == 2 and "embeddings" not in name


def peer(weights: dict[str, torch.Tensor]) -> BertForPreTraining:
    """The same network by `transformers`; every weight must find its place."""
    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=128, vocab_size=61,
        max_position_embeddings=24, pad_token_id=None, hidden_act="gelu", attn_implementation="eager",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    network = BertForPreTraining(config).eval()
    state = {name: weight.T if is_transposed(name, weight) else weight for name, weight in weights.items()}
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert unexpected == []
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    return network


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, segment ids, and masks of full, padded and very short sentences."""
    ids = torch.randint(0, 61, (3, 19), generator=torch.Generator().manual_seed(0))
    places = torch.arange(19)
    segments = (places[None] >= torch.tensor([7, 5, 1])[:, None]).long()
    mask = (places[None] < torch.tensor([19, 11, 2])[:, None]).long()
    return ids, segments, mask


def run_peer(network: BertForPreTraining) -> list[torch.Tensor]:
    ids, segments, mask = inputs()
    result = network(ids, attention_mask=mask, token_type_ids=segments)
    return [result.prediction_logits, result.seq_relationship_logits]


@pytest.mark.parametrize("opset", OPSETS)
def test_both_outputs_equal_those_of_transformers(opset: int) -> None:
    model = create_model("bert", opset=opset, **SMALL)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    expected = [tensor.detach() for tensor in run_peer(peer(weights))]
    assert [value.name for value in model.graph.outputs] == ["output1", "output2"]
    assert largest_difference(run_onnxruntime(model, *inputs()), expected) < 1e-5


@pytest.mark.parametrize("opset", [13, 18, 23])
def test_gradients_equal_those_of_transformers(opset: int) -> None:
    """Cross entropy of both heads; the word embedding collects the gradients of both its uses."""
    model = create_model("bert", opset=opset, dropout=0.0, **SMALL)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    network, net = peer(weights), onward.to_torch(model)
    assert set(net.weights) == set(weights)
    labels, next_sentence = inputs()[0].roll(3, 1).reshape(-1), torch.tensor([0, 1, 1])
    for words, sentences in (run_peer(network), net(*inputs())):
        loss = torch.nn.functional.cross_entropy(words.reshape(-1, 61), labels)
        (loss + torch.nn.functional.cross_entropy(sentences, next_sentence)).backward()
    expected = dict(network.named_parameters())
    for name, weight in net.weights.items():
        there = expected[name].grad
        assert weight.grad is not None
        assert there is not None
        there = there.T if is_transposed(name, weight) else there
        if name.endswith("key.bias"):
            # Adding one vector to all keys changes no softmax: this gradient is 0 but for rounding.
            assert weight.grad.abs().max() < 1e-6
            continue
        assert largest_difference([weight.grad], [there]) < 1e-4, name


def test_padding_changes_nothing_before_it() -> None:
    model = create_model("bert", **SMALL)
    ids, segments, mask = inputs()
    other = torch.where(mask.bool(), ids, (ids + 1) % 61)
    before, after = (run_onnxruntime(model, given, segments, mask) for given in (ids, other))
    assert torch.equal(before[0][mask.bool()], after[0][mask.bool()])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("opset", OPSETS)
def test_the_checker_accepts_it(opset: int) -> None:
    model = create_model("bert", opset=opset, **SMALL)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [value.name for value in model.graph.inputs] == ["input1", "input2", "input3"]
    assert symbols(model) == {"batch", "sequence"}
    assert len([node for node in model.graph if node.op_type == "Dropout"]) == 1 + 3 * 2


def test_base_has_the_numbers_of_the_release() -> None:
    """BERT base, uncased, with both heads: 110,106,428 numbers."""
    graph = create_model("bert", size="base").graph
    sizes = [v.const_value.size for v in graph.initializers.values() if "." in str(v.name) and v.const_value]
    assert sum(sizes) == 110_106_428
