"""Checkpoints in memory: what they cost a step, and what a lost node costs a run that has them.

    python -m benchmarks.memory_checkpoints [--megabytes 16] [--rounds 5] [--kills 6]

First two ranks, each a node with its own memory, multiply matrices and save so many megabytes of state each: into
memory with a copy on the other node after every tenth and every step, onto disk after every tenth, and not at all.
Rounds of the four alternate, and the table shows medians relative to steps without checkpoints. Then a run of ZeRO 3
on two such nodes loses one of them with its memory, again and again: how many updates were lost, and how long it took
until the first new one, compared with the disk, onto which it saves every twelfth update.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.invariants.lives import start_server, wait_until
from tests.invariants.test_memory_checkpoints import Cluster, resumed
from tests.ranks import run_on_ranks

from onward.checkpoint.memory.nodes import prepare_nodes
from onward.checkpoint.memory.writing import MemoryWriter
from onward.checkpoint.writing import CheckpointWriter
from onward.parallel.sharded_tensors import ShardedTensor
from onward.plan.shards import TensorShard

STEPS = 10
RANKS = 2
CASES = {"none": 0, "disk, every 10 steps": 10, "memory, every 10 steps": 10, "memory, every step": 1}


def steps_of_a_rank(folder: Path, megabytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step by case, and CPU seconds that it and its saves take; one mean a round."""
    rank, group = dist.get_rank(), dist.group.WORLD
    rows = megabytes * 10**6 // 4000
    tensor = torch.randn(rows, 1000)
    shard = TensorShard((rank * rows, 0), (rows, 1000), (0, 0))
    tensors = {"weights/w": ShardedTensor(tensor, (RANKS * rows, 1000), (shard,))}
    left, root = torch.randn(512, 512), folder / f"memory{rank}"
    memory = MemoryWriter(root, prepare_nodes(root, group), group)
    writers = {"disk": CheckpointWriter(folder / "disk", 1, group=group), "memory": memory}
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    update = 0
    for _ in range(rounds + 1):
        for case, period in CASES.items():
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                for _ in range(8):
                    left = (left @ left).clamp_(-1, 1)
                update += 1
                if period and update % period == 0:
                    writers[case.partition(",")[0]].save(update, tensors, {})
            seconds = time.perf_counter() - started
            for writer in writers.values():
                writer.wait()
            found[case].append((seconds / STEPS, (time.process_time() - cpu_started) / STEPS))
    return {case: seconds[1:] for case, seconds in found.items()}


def lose_nodes(folder: Path, kills: int, keeps_memory: bool) -> tuple[list[int], list[float]]:
    """Updates lost and seconds from the start after each kill until the first new update is complete in memory."""
    cluster, draw = Cluster(folder, "ZeRO 3"), random.Random(1)
    found = []
    for number in range(kills):
        victim = number % RANKS
        wiped = [victim] if keeps_memory else list(range(RANKS))
        found.append(_lose(cluster, f"run{number}", victim, draw.randint(13, 22), wiped))
    return [lost for lost, _ in found], [seconds for _, seconds in found]


def _lose(cluster: Cluster, output: str, victim: int, least_update: int, wiped: list[int]) -> tuple[int, float]:
    killed = cluster.kill(output, victim, least_update)
    for rank in wiped:
        cluster.wipe(rank)
    started = time.monotonic()
    life = cluster.start(output)
    try:
        wait_until(lambda: life.is_over or bool(resumed(life.log())), 120)
        update = int(resumed(life.log())[-1].partition("checkpoint-")[2][:8])
        wait_until(lambda: life.is_over or cluster.newest() > killed, 120)
        return killed - update, time.monotonic() - started
    finally:
        life.end()
        for rank in range(RANKS):
            cluster.wipe(rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=16, help="of state on each rank (16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=6)
    asked = parser.parse_args()
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        first = run_on_ranks(RANKS, steps_of_a_rank, Path(folder), asked.megabytes, asked.rounds)[0]
    alone = first["none"]
    print(f"{asked.megabytes} MB a rank, {statistics.median(one for one, _ in alone) * 1000:.0f} ms a step by itself\n")
    print("| checkpoints | step, relative | CPU time of a step, relative |\n|---|---|---|")
    for case, seconds in first.items():
        pairs = list(zip(seconds, alone, strict=True))
        ratios = [statistics.median(one[kind] / none[kind] for one, none in pairs) for kind in (0, 1)]
        print(f"| {case} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)
    print("\n| resumes from | updates lost, mean | seconds until the first new one, median |\n|---|---|---|")
    for name, keeps_memory in {"the copy on the other node": True, "the disk": False}.items():
        with tempfile.TemporaryDirectory() as folder:
            lost, times = lose_nodes(Path(folder) / "run", asked.kills, keeps_memory)
        print(f"| {name} | {statistics.mean(lost):.1f} | {statistics.median(times):.1f} |", flush=True)


if __name__ == "__main__":
    main()
