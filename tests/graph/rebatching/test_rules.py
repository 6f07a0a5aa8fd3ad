"""Rules of rebatching: any number of samples is computed as the module does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.lowering.rebatching_proof import BOUND, prove_rebatching
from tests.lowering.fixed_batches import IMAGE, STEPS, TOKENS, export
from tests.lowering.saved_models import Separable
from tests.lowering.vision_models import RecurrentClassifier, SmallUNet


class Flat(nn.Module):
    """A flattening to stored sizes, with batch normalization before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        return self.head(x.view(x.shape[0], -1))


class Tokens(nn.Module):
    """Attention over tokens; a class token that was expanded to the batch, or a mean."""

    def __init__(self, class_token: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(20, 16), nn.Parameter(torch.randn(1, 6, 16))
        self.token = nn.Parameter(torch.randn(1, 1, 16)) if class_token else None
        self.norm, self.qkv, self.out, self.head = (
            nn.LayerNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, 3),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions[:, : x.shape[1]]
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 16))
        return self.head(x[:, 0] if self.token is not None else x.mean(1))


class Recurrent(nn.Module):
    """A recurrent net over steps, whose initial states the exporter stores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = getattr(nn, kind)(6, 8, bidirectional=kind == "GRU")
        self.head = nn.Linear(16 if kind == "GRU" else 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x.transpose(0, 1))[0][-1])


class Resized(nn.Module):
    """An image resized to stored sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.conv(x), size=(12, 12), mode="bilinear").flatten(1)


class Squeezed(nn.Module):
    """A batch of one that is squeezed away and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.squeeze(0)).relu()).unsqueeze(0)


class Scaled(nn.Module):
    """A second input that has no batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x) * scale


def _encoder() -> nn.Module:
    """Steps are joined with the batch in one axis, steps first, and taken apart again."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "flat": (Flat, (IMAGE,)),
    "separable": (Separable, (torch.randn(1, 3, 16, 16),)),
    "unet": (SmallUNet, (torch.randn(1, 3, 16, 16),)),
    "resized": (Resized, (IMAGE,)),
    "mean of tokens": (lambda: Tokens(False), (TOKENS,)),
    "class token": (lambda: Tokens(True), (TOKENS,)),
    "encoder": (_encoder, (torch.randn(1, 5, 16),)),
    "lstm": (lambda: Recurrent("LSTM"), (STEPS,)),
    "gru": (lambda: Recurrent("GRU"), (STEPS,)),
    "rnn": (lambda: Recurrent("RNN"), (STEPS,)),
    "recurrent classifier": (lambda: RecurrentClassifier("LSTM"), (TOKENS,)),
    "squeezed": (Squeezed, (STEPS,)),
    "an input without batch": (Scaled, (STEPS, torch.randn(4))),
}  # fmt: skip
OF_TWO = ("flat", "mean of tokens", "class token", "lstm", "recurrent classifier")


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(("name", "samples"), [*((name, 1) for name in CASES), *((name, 2) for name in OF_TWO)])
def test_any_number_of_samples_is_computed_as_the_module_does(name: str, samples: int, dynamo: bool) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    module = make().eval()
    inputs = tuple(x.repeat(samples, *(1,) * (x.dim() - 1)) if x.shape[0] == 1 else x for x in inputs)
    model = export(module, inputs, dynamo)
    assert prove_rebatching(model) <= BOUND
    graph = make_training_graph(model, rebatch=True)
    assert graph.rebatching is not None
    assert graph.rebatching.size == samples
    net = OnnxModule(graph)
    more = tuple(
        x if x.dim() == 1 else torch.randint(0, 20, (7, 5)) if x.dtype == torch.int64 else torch.randn(7, *x.shape[1:])
        for x in inputs
    )
    if name == "squeezed":
        with torch.no_grad():
            expected = torch.cat([module(x) for x in more[0].split(1)])
    else:
        expected = module(*more)
    torch.testing.assert_close(net(*more).detach(), expected.detach(), rtol=1e-4, atol=1e-5)
