"""Models that no test has, in many layouts: `python -m benchmarks.held_out_layouts [MODEL ...] [--layouts h2 p2 ...]`.

Each trains a few updates in each layout; printed is the largest relative difference of a weight from one process, or
why the run was refused. `--collectives` prints what tensor parallelism communicates for a layer, next to Megatron-LM.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from tests.invariants.cases import Case
from tests.invariants.layouts import Layout, tensor_difference, train
from tests.invariants.rank_pool import end_ranks
from tests.parallel.horizontal_models import exported
from torch import nn

from benchmarks.held_out_models import (
    Attention,
    Block,
    ConvNextV2,
    Experts,
    Language,
    LatentAttention,
    Mamba2,
    Mlp,
    Parallel,
    Recurrent,
    TwoTowers,
    VisionTransformer,
)
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import plan_horizontal

WORDS, TOKENS, BATCH = 96, 8, 8
LAYOUTS = {
    "h2": Layout(1, 2, 1),
    "h4": Layout(1, 4, 1),
    "p2": Layout(1, 1, 2),
    "2x2x2 ZeRO 1": Layout(2, 2, 2, {"zero_stage": 1}),
    "2x2x2 ZeRO 2": Layout(2, 2, 2, {"zero_stage": 2}),
    "2x2x2 ZeRO 3": Layout(2, 2, 2, {"zero_stage": 3}),
}
BOUND = 1e-4
"""Largest difference that counts as equal: of the elements of a weight, as a share of its largest."""

ADDED_UP = ("AllReduce", "Enter", "LayerNormOverRanks", "RMSNormOverRanks")


@dataclass(frozen=True)
class HeldOut:
    """A model and its inputs: int64 words or float32 features of these shapes, without the batch.

    Attributes:
        make: the module with so many layers.
        inputs: name -> shape of a sample.
        labels: how many classes, and the shape of a sample's labels; None: each sample is its own class.
    """

    make: Callable[[int], nn.Module]
    inputs: Mapping[str, tuple[int, ...]]
    labels: tuple[int, tuple[int, ...]] | None = (WORDS, (TOKENS,))

    def model(self, layers: int = 2) -> ir.Model:
        """What torch exports."""
        torch.manual_seed(0)
        given = tuple(torch.from_numpy(array) for array in self.features(4).values())
        return exported(self.make(layers), given, (0,))

    def features(self, samples: int) -> dict[str, np.ndarray[Any, Any]]:
        """Of so many samples; words are integers."""
        draw = np.random.default_rng(0)
        return {
            name: draw.integers(0, WORDS, (samples, *shape))
            if name == "tokens"
            else draw.standard_normal((samples, *shape), dtype=np.float32)
            for name, shape in self.inputs.items()
        }

    def data(self, samples: int) -> dict[str, np.ndarray[Any, Any]]:
        """Features and labels."""
        if self.labels is None:
            return {**self.features(samples), "labels": np.arange(samples) % 4}
        return {
            **self.features(samples),
            "labels": np.random.default_rng(1).integers(0, self.labels[0], (samples, *self.labels[1])),
        }


def language(*makers: Callable[[], nn.Module]) -> HeldOut:
    """A language model of so many blocks of attention and MLP, or of one module for both."""

    def block() -> nn.Module:
        return makers[0]() if len(makers) == 1 else Block(makers[0](), makers[1]())

    return HeldOut(lambda layers: Language(*(block() for _ in range(layers))), {"tokens": (TOKENS,)})


def two_towers(style: str, bias: int) -> HeldOut:
    """Two towers for words and patches."""
    inputs = {"tokens": (TOKENS,), "patches": (TOKENS, 16)}
    return HeldOut(lambda layers: TwoTowers(style, bool(bias)), inputs, None)


IMAGES = {"x": (3, 8, 8)}
ATTENTIONS = {
    "MHA": (8, 8, "separate"), "GQA 4": (8, 4, "separate"), "GQA 2": (8, 2, "separate"), "MQA": (8, 1, "separate"),
    "MHA split": (8, 8, "split"), "GQA 2 split": (8, 2, "split"), "MQA split": (8, 1, "split"),
    "GPT-NeoX": (8, 8, "neox"), "Bloom": (8, 8, "bloom"), "Falcon 4": (8, 4, "falcon"), "Falcon 2": (8, 2, "falcon"),
    "permuted": (8, 8, "permute"),
}  # fmt: skip
MODELS = {
    **{name: language(partial(Attention, *given), Mlp) for name, given in ATTENTIONS.items()},
    **{f"gates {gate}": language(Attention, partial(Mlp, gate)) for gate in ("halves", "strided", "viewed")},
    "GPT-J": language(partial(Parallel, key_heads=8)),
    "PaLM": language(Parallel),
    "PaLM GQA 2": language(partial(Parallel, key_heads=2)),
    "MLA": language(LatentAttention, Mlp),
    "MoE top-2": language(Attention, Experts),
    "MLA + MoE": language(LatentAttention, Experts),
    "Mamba2": language(Mamba2, Mlp),
    "Mamba2 + MoE": language(Mamba2, Experts),
    "LSTM": HeldOut(lambda layers: Recurrent(), {"tokens": (TOKENS,)}),
    "GRU, both ways": HeldOut(lambda layers: Recurrent(nn.GRU, both=True), {"tokens": (TOKENS,)}),
    "ViT": HeldOut(lambda layers: VisionTransformer(layers), IMAGES, (10, ())),
    "ConvNeXt-V2": HeldOut(lambda layers: ConvNextV2(layers), IMAGES, (10, ())),
    **{
        f"two towers, {style}{' + bias' * bias}": two_towers(style, bias)
        for style in ("mean", "first")
        for bias in (0, 1)
    },
}
MEGATRON = {"MHA": 4, "GQA 4": 4, "GQA 2": 4, "MQA": 4, "MQA split": 4, "GPT-J": 2, "PaLM": 2, "MLA": 4, "MoE top-2": 4,
            "Mamba2": 4, "ViT": 4}  # fmt: skip
"""All-reduces of a layer forward and backward: one each way for attention (or scan) and for MLP, or for both."""

LOSS = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}


def collectives(held_out: HeldOut, layers: int, size: int) -> Counter[str]:
    """The collective operators of a rank's graph, as training computes it."""
    graph = make_training_graph(held_out.model(layers), loss=LossSpec(**LOSS), fuse=True)  # type: ignore[arg-type]
    shapes = {name: array.shape for name, array in held_out.data(4).items()}
    facts = find_value_facts(graph, {str(v.name): shapes[str(v.name)] for v in graph.model.graph.inputs})
    plan = plan_horizontal(graph, size, facts.shapes, facts.numbers, allow_whole_layers=True)
    nodes = localize(graph, plan, 0).model.graph
    return Counter(node.op_type for node in nodes if node.domain == "onward.parallel")


def outcome(held_out: HeldOut, layout: Layout) -> str:
    """The difference from one process, or the reason of a refusal."""
    if held_out.labels is None and layout.data > 1:
        return "left out: the loss compares the samples of a batch"
    case = Case(held_out.model, LOSS, held_out.data)
    options: dict[str, Any] = {"global_batch": 8, "updates": 3, "accumulation": 2}
    try:
        found = train(case, layout, **options)
    except AssertionError as error:  # of a rank, with its traceback
        last = str(error).strip().splitlines()[-1]
        return "refused: " + re.sub(r"^onward\.errors\.\w+: ", "", last)
    difference = tensor_difference(found, train(case, Layout(), **options), ("weights/",))
    return f"{'equal' if difference <= BOUND else 'DIFFERENT'} {difference:.0e}"


def main() -> None:
    """Prints one of the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    arguments.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments.add_argument("--collectives", action="store_true")
    asked = arguments.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = {name: MODELS[name] for name in asked.models or MODELS}
    if asked.collectives:
        print(f"{'a layer of':<24}{'forward':>8}{'backward':>9}{'of rows':>8}{'Megatron-LM, both':>18}")
        for name, held_out in chosen.items():
            one, two = (collectives(held_out, layers, 2) for layers in (1, 2))
            added = {kind: two[kind] - one[kind] for kind in ADDED_UP}
            rows = 2 * (added["LayerNormOverRanks"] + added["RMSNormOverRanks"])
            print(
                f"{name:<24}{added['AllReduce']:>8}{added['Enter']:>9}{rows:>8}{MEGATRON.get(name, '-'):>18}",
                flush=True,
            )
        return
    for name, held_out in chosen.items():
        for layout in asked.layouts:
            started = time.perf_counter()
            print(
                f"{name:<24}{layout:<14}{outcome(held_out, LAYOUTS[layout])} ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    end_ranks()


if __name__ == "__main__":
    main()
