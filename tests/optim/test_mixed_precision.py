"""Every optimizer in mixed precision with clipping, in a run, against a loop by hand with its authors' optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onward.data.in_memory import InMemoryDataLoader
from tests import mlp

UPDATES, BATCH, RATE, CLIP = 10, 4, 0.01, 0.5
Weights = dict[str, nn.Parameter]


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of its paper, as written."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                momentum = self.state[weight].setdefault("m", torch.zeros_like(weight))
                update = torch.sign(torch.add(0.9 * momentum, weight.grad, alpha=1 - 0.9)) + 0.1 * weight
                momentum.copy_(torch.add(0.99 * momentum, weight.grad, alpha=1 - 0.99))
                weight -= self.param_groups[0]["lr"] * update


def schedule_free(weights: Weights) -> list[torch.optim.Optimizer]:
    package = pytest.importorskip("schedulefree", reason="the package is a peer for comparison only")
    optimizer = package.AdamWScheduleFree(weights.values(), lr=RATE, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1)
    optimizer.train()
    return [optimizer]


def eight_bits(weights: Weights) -> list[torch.optim.Optimizer]:
    package = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    return [package.AdamW8bit(weights.values(), lr=RATE, eps=1e-6, weight_decay=0.1)]


def muon(weights: Weights) -> list[torch.optim.Optimizer]:
    biases = [weight for name, weight in weights.items() if name.startswith("b")]
    matrices = [weight for name, weight in weights.items() if name.startswith("w")]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(biases, lr=RATE, eps=1e-6, weight_decay=0.1),
    ]


DECAYED: dict[str, Any] = {"lambda": 0.1, "epsilon": 1e-6}
PEERS: dict[str, tuple[list[dict[str, Any]], Callable[[Weights], list[torch.optim.Optimizer]]]] = {
    "AdamW": ([DECAYED], lambda weights: [torch.optim.AdamW(weights.values(), lr=RATE, eps=1e-6, weight_decay=0.1)]),
    "Muon": ([DECAYED, {"weights": "w?", "use_muon": True}], muon),
    "Lion": ([{"lambda": 0.1}], lambda weights: [Lion(weights.values(), {"lr": RATE})]),
    "Adafactor": (
        [{"lambda": 0.1}],
        lambda weights: [torch.optim.Adafactor(weights.values(), lr=RATE, weight_decay=0.1)],
    ),
    "AdamWScheduleFree": ([DECAYED], schedule_free),
    "AdamW8bit": ([DECAYED], eight_bits),
}


def by_hand(make: Callable[[Weights], list[torch.optim.Optimizer]], dtype: torch.dtype, scale: float) -> Weights:
    """fp32 masters, their low-precision copies in the forward and backward pass, the loss scaled, gradients clipped."""
    masters = {name: nn.Parameter(torch.from_numpy(array)) for name, array in mlp.weights().items()}
    optimizers, data = make(masters), mlp.data(BATCH * UPDATES)
    for update in range(UPDATES):
        rows = slice(BATCH * update, BATCH * (update + 1))
        x, target = (torch.from_numpy(data[name][rows]) for name in ("x", "target"))
        low = {name: master.to(dtype) for name, master in masters.items()}
        hidden = torch.addmm(low["b1"], x.to(dtype), low["w1"]).relu()
        logits = torch.addmm(low["b2"], hidden, low["w2"])
        (scale * (logits.float() - target).square().mean()).backward()
        for master in masters.values():
            assert master.grad is not None
            master.grad /= scale
        assert nn.utils.clip_grad_norm_(masters.values(), CLIP) > CLIP
        for optimizer in optimizers:
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            optimizer.zero_grad()
    return masters


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 256.0)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", PEERS)
def test_ten_updates_equal_a_loop_by_hand(
    name: str, dtype: torch.dtype, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-5 of the norm of each weight, and 1e-2 where a sign may turn with the last bit of the norm that clips; one
    matrix is large enough for moments in 8 bits."""
    monkeypatch.setattr(mlp, "HIDDEN", 1024)
    rules, make = PEERS[name]
    expected = by_hand(make, dtype, scale)
    is_bf16 = dtype is torch.bfloat16
    runner, _ = mlp.start(
        tmp_path,
        loss=mlp.SQUARES,
        training={"batch_size": BATCH, "num_train_steps": UPDATES},
        learning_rate={"initial_lr": RATE},
        optimizer={"training_optimizer_name": name, "optimizer_attributes": rules, "max_norm_clip": CLIP},
        mixed_precision={
            "use_mixed_precision": True, "use_bfloat16": is_bf16, **({} if is_bf16 else {"loss_scale": scale})
        },
    )  # fmt: skip
    runner.run(InMemoryDataLoader(mlp.data(BATCH * UPDATES)))
    found = mlp.weights_of(runner)
    for weight, master in expected.items():
        difference = float((found[weight] - master.detach()).norm() / master.detach().norm())
        assert difference < (1e-2 if name == "Lion" else 1e-5), f"{weight}: {difference:.1e}"
