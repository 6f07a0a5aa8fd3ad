"""Runs that lose ranks and nodes resume from the checkpoint in memory that is left, to the bits of a run that lost
nothing. Each rank is a node here: it has a folder of its own as its memory."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from onward.checkpoint.memory import run_memory
from tests.invariants.elastic import weights_of
from tests.invariants.killing import LONGEST_SECONDS, make_run, ranks_of
from tests.invariants.lives import Life, start_server, wait_until

LAYOUTS = (
    "ZeRO 3",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("one process", "replicas", "replicas of a pipeline")),
)
PERIOD_ON_DISK = 12


def with_own_memory(rank: int) -> None:
    """What a process sees as its node's memory."""
    run_memory.SHARED_MEMORY = Path(f"memory{rank}").absolute()


class Cluster:
    """Ranks that are started, killed and started again, each a node."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.folder, self.ranks = make_run(folder, layout), ranks_of(layout)
        file = folder / "run.yaml"
        sections = yaml.safe_load(file.read_text())
        sections["checkpoint"] |= {"checkpoint_period": PERIOD_ON_DISK, "memory_period_updates": 1}
        file.write_text(yaml.safe_dump(sections))

    @property
    def nodes(self) -> str:
        """As messages name them."""
        return "this node" if self.ranks == 1 else f"{self.ranks} nodes"

    def start(self, output: str, *options: str) -> Life:
        return Life(self.folder, output, self.ranks, False, options, with_own_memory)

    def train(self, output: str, *options: str) -> str:
        """Trains to the end; what was said."""
        life = self.start(output, *options)
        try:
            assert wait_until(lambda: None not in life.exit_codes(), LONGEST_SECONDS), life.log()
            assert life.exit_codes() == [0] * self.ranks, life.log()
            return life.log()
        finally:
            life.end()

    def kill(self, output: str, victim: int, least_update: int) -> int:
        """Kills a rank after an update is complete in memory; the newest such update."""
        life = self.start(output)
        try:
            assert wait_until(lambda: life.is_over or self.newest() >= least_update, LONGEST_SECONDS), life.log()
            assert not life.is_over, life.log()
            assert life.kill("a rank", victim)
            assert wait_until(lambda: None not in life.exit_codes(), LONGEST_SECONDS), life.log()
            return self.newest()
        finally:
            life.end()

    def held(self) -> dict[Path, int]:
        """Checkpoints with a manifest in the memory of any node -> their update."""
        found = self.folder.glob("memory*/onward-*/checkpoint-*/manifest.json")
        return {path.parent: int(path.parent.name[-8:]) for path in found}

    def newest(self) -> int:
        """The newest update that all nodes have, or 0."""
        counts = list(self.held().values())
        return max((update for update in counts if counts.count(update) == self.ranks), default=0)

    def wipe(self, rank: int) -> None:
        shutil.rmtree(self.folder / f"memory{rank}")


@pytest.fixture(scope="module", params=LAYOUTS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    start_server()
    one = Cluster(tmp_path_factory.mktemp("memory") / "run", request.param)
    said = one.train("whole")
    assert "resumed" not in said
    assert not one.held(), "a run that is over leaves nothing in memory"
    return one


def resumed(said: str) -> list[str]:
    return re.findall(r"resumed from (.*?): round", said)


def test_a_lost_rank_resumes_from_memory(cluster: Cluster) -> None:
    update = cluster.kill("rank", cluster.ranks - 1, least_update=3)
    said = cluster.train("rank")
    assert resumed(said) == [f"checkpoint-{update:08d} in the memory of {cluster.nodes}"]
    assert weights_of(cluster.folder / "rank") == weights_of(cluster.folder / "whole")


def test_lost_nodes_resume_from_the_copies_of_another(cluster: Cluster) -> None:
    """One node after the other is lost with its memory, in one run."""
    if cluster.ranks == 1:
        pytest.skip("there is no other node")
    updates = []
    for lost, least in ((0, 5), (cluster.ranks - 1, 15)):
        updates.append(cluster.kill("node", lost, least))
        cluster.wipe(lost)
    said = cluster.train("node")
    assert resumed(said) == [f"checkpoint-{update:08d} in the memory of {cluster.nodes}" for update in updates]
    assert weights_of(cluster.folder / "node") == weights_of(cluster.folder / "whole")


def test_memory_that_is_lost_leaves_the_disk(cluster: Cluster) -> None:
    cluster.kill("disk", 0, least_update=PERIOD_ON_DISK + 3)
    for rank in range(cluster.ranks):
        cluster.wipe(rank)
    said = cluster.train("disk")
    assert resumed(said) == [str(cluster.folder / f"disk/checkpoints/checkpoint-{PERIOD_ON_DISK:08d}")]
    assert weights_of(cluster.folder / "disk") == weights_of(cluster.folder / "whole")
