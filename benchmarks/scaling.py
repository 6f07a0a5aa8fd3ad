"""Step time against the same network written by hand: `python -m benchmarks.scaling [--ranks 2] [--rounds 12]`.

GPT-2 of `transformers` under torch's DDP and FSDP2 (`fully_shard` of every block, the loop written by hand) and the
same weights as ONNX under onward, in the same processes, on the same batches. All take turns, a few updates each, so
that whatever else the machine does falls on all of them alike. Printed are the medians of an update, by the clock and
in processor time of rank 0 (which a busy machine disturbs less), and the ratios to the hand-written peer; the losses of
all must agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.distributed as dist
from tests.models.running import initial_weights
from tests.ranks import run_on_ranks
from tests.watching import Recorder
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.rounds import round_steps
from onward.engine.loop import Clock
from onward.environment import Environment
from onward.models import create_model
from onward.parameters import Parameters
from onward.runner import TrainingRunner

LAYERS, WIDTH, HEADS, WORDS, TOKENS, BATCH = 4, 256, 8, 2048, 128, 4
UPDATES_A_TURN, RATE = 4, 1e-3
OPTIONS = {
    "size": "tiny", "layers": LAYERS, "width": WIDTH, "heads": HEADS, "vocab_size": WORDS, "context_length": TOKENS,
    "dropout": 0.0,
}  # fmt: skip


def batches(rank: int, updates: int) -> np.ndarray:
    """Token ids [updates * BATCH, TOKENS] of a rank."""
    return np.random.default_rng(rank).integers(0, WORDS, (updates * BATCH, TOKENS))


def by_hand(weights: dict[str, torch.Tensor], ids: np.ndarray, kind: str, attention: str) -> Iterator[float]:
    """An update of torch's own engine each time it is asked; gives its loss."""
    config = GPT2Config(  # type: ignore[call-arg]
        n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=WORDS, n_positions=TOKENS, attn_implementation=attention,
        activation_function="gelu_new", embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    network: nn.Module = GPT2LMHeadModel(config).train()
    network.load_state_dict({f"transformer.{name}": weight for name, weight in weights.items()}, strict=False)
    if kind == "DDP":
        network = DistributedDataParallel(network, gradient_as_bucket_view=True)
    else:
        for block in network.transformer.h:  # type: ignore[union-attr]
            fully_shard(block, reshard_after_forward=kind == "FSDP2")
        fully_shard(network, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    for rows in torch.from_numpy(ids).split(BATCH):
        logits = network(rows, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        yield float(total) / dist.get_world_size()


def by_onward(path: str, ids: np.ndarray, updates: int, zero_stage: int) -> Iterator[float]:
    """An update of onward's own loop each time it is asked; gives its loss."""
    sections: dict[str, Any] = {
        "paths": {"model_path": path},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
        "training": {"batch_size": BATCH, "num_train_steps": updates, "display_loss_steps": 1},
        "learning_rate": {"initial_lr": RATE},
        "optimizer": {
            "training_optimizer_name": "AdamW", "max_norm_clip": 1.0, "optimizer_attributes": [{"lambda": 0.0}],
        },
        "distributed": {"data_parallel_size": dist.get_world_size(), "zero_stage": zero_stage},
    }  # fmt: skip
    recorder = Recorder()
    environment = Environment(execution_provider="CPU", threads=1)
    runner = TrainingRunner(Parameters.from_mapping(sections), environment, [recorder], progress=False)
    loader = InMemoryDataLoader({"input_ids": ids, "labels": ids})
    runner.initialize(loader.feature_specs())
    runner.state.mark()
    run = runner._initialized()
    for done in round_steps(run.parameters, run.assembly, {}, run.feature_ranges, loader.batches(BATCH), Clock()):
        assert done.report is not None
        yield done.report.loss


PEERS = {"onward": "DDP by hand", "onward ZeRO 2": "FSDP2, weights kept", "onward ZeRO 3": "FSDP2 by hand"}


@dataclass(frozen=True)
class Measured:
    """Of one contestant: seconds of an update in every turn, by the clock and of this process's cores; all losses."""

    clock: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def take_turns(path: str, weights: dict[str, torch.Tensor], rounds: int) -> dict[str, Measured]:
    """What was measured, by contestant."""
    updates = (rounds + 1) * UPDATES_A_TURN
    ids = batches(dist.get_rank(), updates)
    contestants: dict[str, Callable[[], Iterator[float]]] = {
        "DDP by hand": lambda: by_hand(weights, ids, "DDP", "sdpa"),
        "onward": lambda: by_onward(path, ids, updates, 0),
        "FSDP2, weights kept": lambda: by_hand(weights, ids, "FSDP2, weights kept", "sdpa"),
        "onward ZeRO 2": lambda: by_onward(path, ids, updates, 2),
        "FSDP2 by hand": lambda: by_hand(weights, ids, "FSDP2", "sdpa"),
        "onward ZeRO 3": lambda: by_onward(path, ids, updates, 3),
    }
    running = {name: make() for name, make in contestants.items()}
    found = {name: Measured() for name in running}
    for turn in range(rounds + 1):
        for name, run in running.items():
            dist.barrier()
            clock, cores = time.perf_counter(), time.process_time()
            found[name].losses.extend(next(run) for _ in range(UPDATES_A_TURN))
            if turn:  # the first turn builds and warms up
                found[name].clock.append((time.perf_counter() - clock) / UPDATES_A_TURN)
                found[name].cores.append((time.process_time() - cores) / UPDATES_A_TURN)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=12)
    asked = arguments.parse_args()
    model = create_model("gpt2", **OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        ir.save(model, path)
        found = run_on_ranks(asked.ranks, take_turns, path, initial_weights(model), asked.rounds)[0]
    reference = found["DDP by hand"].losses
    print(f"{asked.ranks} ranks, {asked.rounds} turns of {UPDATES_A_TURN} updates each, milliseconds of an update")
    head = ("clock", "fastest", "to its peer", "turn by turn", "cores", "to its peer", "worst loss")
    print(f"{'':<20}" + "".join(f"{word:>14}" for word in head))
    for name, one in found.items():
        worst = max(abs(a - b) / abs(b) for a, b in zip(one.losses, reference, strict=True))
        ratios = ["", "", ""]
        if name in PEERS:
            peer = found[PEERS[name]]
            turns = [a / b for a, b in zip(one.clock, peer.clock, strict=True)]
            numbers = (_ratio(one.clock, peer.clock), statistics.median(turns), _ratio(one.cores, peer.cores))
            ratios = [f"{number:.3f}" for number in numbers]
        cells = (_median_ms(one.clock), f"{min(one.clock) * 1e3:.1f}", *ratios[:2], _median_ms(one.cores), ratios[2])
        print(f"{name:<20}" + "".join(f"{cell:>14}" for cell in (*cells, f"{worst:.1e}")))


def _median_ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


if __name__ == "__main__":
    main()
