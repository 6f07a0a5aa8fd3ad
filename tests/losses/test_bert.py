"""The loss of BERT's pretraining is the sum of two cross entropies of torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import OPSETS, assert_close, drawn_logits, pass_through, run_loss


@pytest.mark.parametrize("opset", OPSETS)
def test_bert_loss(opset: int, tmp_path: Path):
    """Masked language model (padding id 0 ignored) plus next sentence, by torch's cross entropy on gathered rows."""
    logits, pair = drawn_logits(2, 6, 11), drawn_logits(2, 2)
    positions = np.array([[1, 4, 0], [5, 2, 2]])
    ids = np.array([[3, 10, 0], [1, 7, 0]])
    next_sentence = np.array([1, 0])
    sequence = 6 if opset < 11 else "sequence"
    model = pass_through(opset, {"output1": ["batch", sequence, 11], "output2": ["batch", 2]})
    feeds = {
        "output1_in": logits, "output2_in": pair,
        "masked_lm_positions": positions, "masked_lm_ids": ids, "next_sentence_labels": next_sentence,
    }  # fmt: skip
    outputs, names = run_loss(model, LossSpec(type="bert"), feeds, tmp_path)
    gathered = torch.from_numpy(np.take_along_axis(logits, positions[..., None], axis=1))
    mlm = F.cross_entropy(gathered.reshape(-1, 11), torch.from_numpy(ids).reshape(-1), ignore_index=0)
    nsp = F.cross_entropy(torch.from_numpy(pair), torch.from_numpy(next_sentence))
    assert names.parts == ("mlm_loss", "nsp_loss")
    assert_close(outputs["mlm_loss"], mlm)
    assert_close(outputs["nsp_loss"], nsp)
    assert_close(outputs["total_loss"], mlm + nsp)
