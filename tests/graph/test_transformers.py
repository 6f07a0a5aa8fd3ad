"""On exports of transformers' own models, exactly the module's parameters are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onward.graph.training_graph import make_training_graph
from tests.graph.exported import export
from tests.graph.repair.exported_weights import match

transformers = pytest.importorskip("transformers")


class Wrapper(nn.Module):
    """A transformers model from tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(tokens)
        return tuple(value for value in output.to_tuple() if isinstance(value, torch.Tensor))


def _gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def _bert() -> Any:
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=50,
        max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForPreTraining(config)


def _llama() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16, intermediate_size=32,
        vocab_size=50, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_gpt2, _bert, _llama])
@pytest.mark.parametrize("fresh", [True, False])
def test_exactly_the_parameters_train(make: Any, fresh: bool, tmp_path: Path):
    """Dynamic shapes, biases zero as a fresh model has them or not: all but the dropped zero biases are found."""
    torch.manual_seed(0)
    module = Wrapper(make()).eval()
    if not fresh:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    batch, sequence = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("sequence", min=2, max=16)
    path = export(
        module, (torch.randint(0, 50, (2, 8)),), tmp_path / "m.onnx", 18, True,
        dynamic_shapes={"tokens": {0: batch, 1: sequence}},
    )  # fmt: skip
    graph = make_training_graph(path)
    missing, extra = match(graph, module)
    assert extra == []
    dropped = {name for name, p in module.named_parameters() if not p.any() and name.endswith("bias")}
    assert set(missing) <= (dropped if fresh else set())
    if missing:
        assert any(f"{len(missing)} node" in note or "its bias" in note for note in graph.notes)
    tables = [name for name, reason in graph.frozen.items() if "buffer" in reason or "table" in reason]
    if make is _llama:
        assert tables, "inv_freq, or a table made of it, must be named as frozen"
    assert all(graph.frozen.values())
