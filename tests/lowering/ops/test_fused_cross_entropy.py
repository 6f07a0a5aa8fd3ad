"""Chunks in which the fused cross entropy is computed."""

from __future__ import annotations

import pytest
import torch

import onward.lowering.ops.fused_cross_entropy as fused_cross_entropy


@pytest.mark.parametrize("rows", [0, 200, 600])
def test_chunks_on_a_cpu_have_256_rows_or_8_mib(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows at all give no loss and gradients of zero; chunks are summed up to what one would give."""
    monkeypatch.undo()
    classes, width = 2**14, 4
    assert fused_cross_entropy.rows_of_chunk("cpu", torch.empty(classes, width)) == 256
    assert fused_cross_entropy.rows_of_chunk("cpu", torch.empty(512, 5)) == 8 * 2**20 // (4 * 512)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, width, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    loss = fused_cross_entropy.linear_cross_entropy(hidden, weight, labels, reduction="sum")
    found = torch.autograd.grad(loss, (hidden, weight))
    expected_loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    expected = torch.autograd.grad(expected_loss, (hidden, weight))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ignored", [0, 30, 36])
def test_small_logits_are_differentiated_at_once(ignored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many numbers as fit; labels that do not count change nothing, and a wrong one is an error either way."""
    generator = torch.Generator().manual_seed(0)
    rows, classes = 36, 1000
    hidden = torch.randn(rows, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    labels[:ignored] = -1
    found = []
    for limit in (4 * rows * classes, 4 * rows * classes - 1):
        monkeypatch.setattr(fused_cross_entropy, "SMALL_BYTES", limit)
        loss = fused_cross_entropy.linear_cross_entropy(hidden, weight, labels, ignore_index=-1)
        assert ("_Chunked" in type(loss.grad_fn).__name__) == (limit < 4 * rows * classes)
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
        wrong = labels.index_fill(0, torch.tensor([35]), -2)
        with pytest.raises(ValueError, match=r"label -2 is out of range for 1000 classes .* the first at \[35\]"):
            fused_cross_entropy.linear_cross_entropy(hidden, weight, wrong, ignore_index=-1)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows_are_classes", [1, 0])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_rows_of_logits_that_are_aligned_change_nothing(
    dtype: torch.dtype, has_bias: bool, rows_are_classes: int, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where classes are added up to a multiple of 16 bytes."""
    rows, classes, width = 300, 13, 8
    monkeypatch.setattr(fused_cross_entropy, "SMALL_BYTES", 0 if in_chunks else 2**20)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    shape = (classes, width) if rows_are_classes else (width, classes)
    drawn = [torch.randint(-4, 5, of, generator=generator) / 8 for of in ((rows, width), shape, (classes,))]
    found = []
    for alignment in (1, 16):
        monkeypatch.setitem(fused_cross_entropy.ALIGNED_BYTES, "cpu", alignment)
        inputs = [tensor.to(dtype).requires_grad_() for tensor in drawn[: 2 + has_bias]]
        hidden, weight, *bias = inputs
        loss = fused_cross_entropy.linear_cross_entropy(
            hidden, weight, labels, bias=bias[0] if bias else None, rows_are_classes=rows_are_classes
        )
        assert ("_Chunked" in type(loss.grad_fn).__name__) == in_chunks
        found.append((loss, *torch.autograd.grad(loss, inputs)))
    # Products of the gradient are summed in another order; in bf16 they round to one step more or less.
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(one.detach().abs().max()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does that
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_chunks_are_compiled_without_a_graph_break(
    dtype: torch.dtype, alignment: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks of 256 rows, forward and backward; the gradients are those of eager code, with zeros where labels are
    ignored, and with class weights."""
    monkeypatch.setitem(fused_cross_entropy.COMPILED_BYTES, "cpu", 0)
    monkeypatch.setitem(fused_cross_entropy.ALIGNED_BYTES, "cpu", alignment)
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in ((512, 8), (41, 8), (41,))][: 2 + has_bias]
    labels = torch.randint(0, 41, (512,), generator=generator)
    labels[::3] = -1
    class_weights = torch.rand(41, generator=generator)
    found = {}
    for name, compute in (
        ("eager", fused_cross_entropy.linear_cross_entropy),
        ("compiled", torch.compile(fused_cross_entropy.linear_cross_entropy, backend="aot_eager", fullgraph=True)),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in drawn]
        hidden, weight, *bias = inputs
        named = {"class_weights": class_weights, "bias": bias[0] if bias else None, "ignore_index": -1}
        loss = compute(hidden, weight, labels, **named)
        found[name] = (loss, *torch.autograd.grad(2 * loss, inputs))
    for eager, compiled in zip(*found.values(), strict=True):
        # In bf16 a gradient of the scores may round to one step more or less, as does their sum.
        low = 2**-7, 2**-7 * float(eager.detach().abs().max())
        relative, absolute = (1e-6, 1e-7) if dtype == torch.float32 else low
        torch.testing.assert_close(compiled, eager, rtol=relative, atol=absolute)
    assert not found["compiled"][1][::3].any()
