"""CTC loss and greedy decoding: torch's own functions on the same numbers, and errors in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from onward.lowering.ops.ctc import ctc_greedy_matches, ctc_loss

TIME, BATCH, CLASSES, PAD = 9, 4, 6, -1
SEQUENCES = [[1, 2, 2, 5], [3], [], [4, 4]]


def labels(pad: int = PAD) -> torch.Tensor:
    return torch.tensor([row + [pad] * (5 - len(row)) for row in SEQUENCES])


def scores(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape or (BATCH, TIME, CLASSES), generator=generator, dtype=dtype).requires_grad_()


def reference(logits: torch.Tensor, steps: list[int], **options: Any) -> torch.Tensor:
    """Of logits [batch, time, classes], with targets concatenated: torch's other form of them."""
    targets = torch.tensor([label for row in SEQUENCES for label in row])
    lengths = torch.tensor([len(row) for row in SEQUENCES])
    return F.ctc_loss(logits.transpose(0, 1).log_softmax(-1), targets, torch.tensor(steps), lengths, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("pad", [PAD, 0, -100])
@pytest.mark.parametrize("axes", [(1, 2), (0, 2), (2, 1), (2, 0)])
def test_loss_and_gradient_are_torchs(reduction: str, with_lengths: bool, pad: int, axes: tuple[int, int]) -> None:
    time, classes = axes
    order = [0, 0, 0]
    order[3 - time - classes], order[time], order[classes] = 0, 1, 2
    logits = scores(dtype=torch.float64)
    steps = [9, 4, 7, 6] if with_lengths else [TIME] * BATCH
    given = torch.tensor(steps) if with_lengths else None
    found = ctc_loss(
        logits.permute(order), labels(pad), given, ignore_index=pad or -1, time_axis=time, class_axis=classes,
        reduction=reduction,
    )  # fmt: skip
    wanted = reference(logits, steps, reduction=reduction, zero_infinity=True)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits)[0], torch.autograd.grad(wanted, logits)[0], rtol=1e-12, atol=1e-14
    )


def test_the_gradient_is_that_of_finite_differences() -> None:
    logits = scores(dtype=torch.float64)
    torch.autograd.gradcheck(lambda x: ctc_loss(x, labels()), (logits,), eps=1e-6, atol=1e-8)


def test_16_bits_and_autocast_are_computed_in_float32() -> None:
    logits = scores().detach().bfloat16()
    wanted = ctc_loss(logits.float(), labels())
    with torch.autocast("cpu", torch.bfloat16):
        found = ctc_loss(logits, labels())
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_compiled_code_gives_the_same() -> None:
    logits = scores()
    compiled = torch.compile(lambda x, y: ctc_loss(x * 2, y), backend="aot_eager")
    found, wanted = compiled(logits, labels()), ctc_loss(logits * 2, labels())
    assert torch.equal(found, wanted)
    assert torch.equal(torch.autograd.grad(found, logits)[0], torch.autograd.grad(wanted, logits)[0])


def test_a_forecast_needs_no_labels() -> None:
    with FakeTensorMode():
        logits = torch.randn(BATCH, TIME, CLASSES, requires_grad=True)
        made = torch.ones(BATCH, 5, dtype=torch.int64)
        loss = ctc_loss(logits, made)
        loss.backward()
        assert loss.shape == ctc_greedy_matches(logits, made).shape == ()


def test_samples_without_an_alignment_are_told_or_refused() -> None:
    logits, made = scores(2, 4, CLASSES), torch.tensor([[1, 2, 3, 4, -1], [2, 2, 2, -1, -1]])
    words = (
        r"CTC: a sample has 3 labels and 2 repeated in a row, which need a blank between them, but the prediction has "
        r"only 4 time steps for it; it counts as a loss of 0 \(loss.zero_infinity\). Leave such samples out"
    )
    with pytest.warns(UserWarning, match=words):
        found = ctc_loss(logits, made, reduction="sum")
    alone = ctc_loss(logits[:1], made[:1], reduction="sum")
    assert torch.equal(found, alone)
    with pytest.raises(ValueError, match=r"sample 1 of the batch: CTC: a sample has 3 labels.*its loss is infinite"):
        ctc_loss(logits, made, zero_infinity=0)


@pytest.mark.parametrize(
    ("rows", "lengths", "words"),
    [
        (
            [[1, 0, 2], [1, 2, 3]],
            None,
            "sample 0 of the batch has label 0 at position 1, which is padding .*Set loss.blank",
        ),
        ([[1, 2, 3], [1, 6, -1]], None, "sample 1 of the batch has the label 6; expected 0 to 5, or padding"),
        ([[1, 2, 3], [1, -7, -1]], None, "has the label -7; .*set loss.ignore_index"),
        ([[1, 2, 3]] * 3, None, r"the labels have shape \[3, 3\].*2 samples of 8 time steps.*set loss.time_axis"),
        ([[1, 2, 3]] * 2, [8, 9], "loss.prediction_lengths of sample 1 of the batch is 9; expected 1 to 8"),
        ([[1, 2, 3]] * 2, [8], r"loss.prediction_lengths has shape \[1\]; expected one number for each of 2 samples"),
    ],
)
def test_wrong_data_are_refused(rows: list[list[int]], lengths: list[int] | None, words: str) -> None:
    given = None if lengths is None else torch.tensor(lengths)
    with pytest.raises(ValueError, match=words):
        ctc_loss(scores(2, 8, CLASSES), torch.tensor(rows), given)


def test_greedy_decoding_merges_repeats_and_drops_blanks() -> None:
    paths = np.array([[1, 1, 0, 1, 2, 0], [1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0], [3, 3, 0, 0, 0, 4]])
    logits = torch.nn.functional.one_hot(torch.from_numpy(paths), CLASSES).float()
    made = torch.tensor([[1, 1, 2], [1, 1, 2], [-1, -1, -1], [3, -1, -1]])
    assert ctc_greedy_matches(logits, made).item() == 2
    assert ctc_greedy_matches(logits, made, torch.tensor([6, 6, 6, 5])).item() == 3
    assert ctc_greedy_matches(logits.transpose(0, 1), made, time_axis=0).item() == 2
