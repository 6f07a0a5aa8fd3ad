"""Conversations that share a sequence train a Llama as they do alone: the same loss, the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onward import to_torch
from onward.data.packing.options import ChatOptions
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.data.packing.chat.test_sequences import many, packed

transformers = pytest.importorskip("transformers")

INPUTS = ("input_ids", "attention_mask", "position_ids")


class _Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(
            vocab_size=259, intermediate_size=32, max_position_embeddings=256, attn_implementation="sdpa", **sizes
        )
        self.inner = transformers.LlamaForCausalLM(config)

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.inner(**dict(zip(INPUTS, inputs, strict=True)), use_cache=False).logits
        return found


def as_tensors(sample: dict[str, Any]) -> list[Tensor]:
    return [torch.from_numpy(np.asarray(sample[name]))[None] for name in (*INPUTS, "labels")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask_type", ["bool", "float"])
def test_a_filled_sequence_is_the_sum_of_its_conversations(mask_type: Any, tmp_path: Path) -> None:
    """The loss to 1e-6 and every gradient to 1e-5; without the mask, the loss would be another."""
    rows = many(6, seed=3)
    (tmp_path / "short.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }};{% endgeneration %}"
        "{% else %}{{ m.content }}?{% endif %}{% endfor %}"
    )
    template = {"chat_template": str(tmp_path / "short.jinja")}
    full = ChatOptions(sequence_length=130, several_per_sequence=True, mask_type=mask_type, **template)
    (together,) = packed(tmp_path, rows, full)
    alone = []
    for row in rows:
        one = ChatOptions(sequence_length=48, several_per_sequence=True, mask_type=mask_type, **template)
        alone += packed(tmp_path, [row], one)
    torch.onnx.export(
        _Logits().eval(), tuple(as_tensors(together)[:3]), str(tmp_path / "llama.onnx"), dynamo=False,
        input_names=list(INPUTS), output_names=["logits"], opset_version=18,
        dynamic_axes={name: [0, 2, 3] if name == "attention_mask" else [0, 1] for name in (*INPUTS, "logits")},
    )  # fmt: skip
    spec = LossSpec(
        type="softmax_cross_entropy", prediction="logits", label="labels", ignore_index=-100, reduction="sum"
    )
    names = write_model_with_loss(tmp_path / "llama.onnx", spec, tmp_path / "loss.onnx")
    net = to_torch(tmp_path / "loss.onnx")
    assert names.loss == "loss"
    weights = dict(net.weights)

    def loss_of(sample: dict[str, Any]) -> Tensor:
        found: Tensor = net(*as_tensors(sample))[1]
        return found

    apart = torch.stack([loss_of(sample) for sample in alone]).sum()
    shared = loss_of(together)
    assert shared.item() == pytest.approx(apart.item(), rel=1e-6)
    expected = torch.autograd.grad(apart, list(weights.values()))
    found = torch.autograd.grad(shared, list(weights.values()))
    for name, one, other in zip(weights, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)
    numbered = ChatOptions(sequence_length=130, several_per_sequence=True, **template)
    (sample,) = packed(tmp_path, rows, numbered)
    masks = {"attention_mask": "segment_ids"}
    module = OnnxModule(make_training_graph(tmp_path / "llama.onnx", loss=spec, segment_masks=masks), ("loss",))
    inputs = {name: torch.from_numpy(one)[None] for name, one in sample.items()}
    assert module(**inputs).item() == pytest.approx(shared.item(), rel=1e-6)
    causal = np.tri(130, dtype=bool)[None]
    mask = causal if mask_type == "bool" else np.where(causal, 0, np.finfo(np.float32).min).astype(np.float32)
    unmasked = loss_of({**together, "attention_mask": mask}).item()
    assert abs(unmasked / shared.item() - 1) > 1e-4
