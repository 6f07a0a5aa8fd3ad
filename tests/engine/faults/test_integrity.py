"""Silent corruption: one bit of a weight, a moment or a result on one rank, in every layout, ends all ranks alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.data.batches import Batch
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.callbacks import Callback
from onward.engine.faults import recomputation
from onward.engine.reports import UpdateReport
from onward.environment import Environment
from onward.errors import CorruptionError, ParametersError
from onward.parameters import Parameters, check
from onward.runner import TrainingRunner
from tests.invariants import exchanges
from tests.invariants.cases import tokens
from tests.invariants.layouts import Layout, rows_of_replica
from tests.invariants.rank_pool import call_on_ranks, end_ranks
from tests.mlp import data, parameters, start

UPDATES, DUE = 5, 3
"""Updates of a run, and the period of its checks: the third is checked."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Changes one bit of the last element, in place."""
    words = tensor.detach().reshape(-1).view(torch.int32)
    words[-1] ^= 1 << bit if bit < 31 else -(2**31)


class Flip(Callback):
    """Flips a bit of a weight or moment of this rank, between two updates or while one is computed."""

    def __init__(self, runner: TrainingRunner, name: str, bit: int, in_update: bool) -> None:
        self.runner, self.name, self.bit, self.in_update = runner, name, bit, in_update

    def on_update(self, report: UpdateReport) -> None:
        if not self.in_update and report.update == DUE - 1:
            flip(self.runner.state.sharded_tensors()[self.name].tensor, self.bit)

    def on_batch(self, batch: Batch) -> None:
        if self.in_update and self.runner.state.counters.update == DUE - 1:
            flip(self.runner.state.sharded_tensors()[self.name].tensor, self.bit)
            self.in_update = False


def corrupted(
    sections: dict[str, Any], layout: Layout, rows: dict[str, Any], rank: int, name: str, bit: int, in_update: bool
) -> str:
    """What a rank says of a run in which one rank has a bit flipped; "" where it ends well."""
    runner = TrainingRunner(Parameters.from_mapping(sections), Environment(execution_provider="CPU", threads=1))
    runner.initialize(InMemoryDataLoader(rows).feature_specs())
    if runner.mesh.rank == rank:
        assert f"weights/{name}" in runner.state.sharded_tensors()
        runner.watchers.add([Flip(runner, f"weights/{name}", bit, in_update)])
    elif in_update:
        runner.watchers.add([Inspecting()])
    batch = sections["training"]["batch_size"] * layout.data
    mine = rows_of_replica(rows, runner.mesh.place.data, layout.data, batch)
    try:
        runner.run(InMemoryDataLoader(mine))
    except CorruptionError as error:
        return str(error)
    return ""


class Inspecting(Callback):
    """Looks at batches, as another rank's callback does."""

    def on_batch(self, batch: Batch) -> None:
        pass


NORM, LINEAR, EMBEDDING = "h.0.ln_1.weight", "h.0.mlp.c_fc.weight", "wte.weight"
"""Replicated on tensor-parallel ranks; cut; on the first and the last stage of a pipeline."""
CASES = [
    pytest.param(Layout(2, 1, 1), LINEAR, False, "ranks 0, 1 hold different bits", id="replicas"),
    pytest.param(Layout(3, 1, 1), LINEAR, False, "rank 1 holds other bits", id="three replicas"),
    pytest.param(Layout(1, 2, 1), NORM, False, "ranks 0, 1 hold different bits", id="horizontal"),
    pytest.param(Layout(1, 1, 2), EMBEDDING, False, "ranks 0, 1 hold different bits", id="pipeline, tied"),
    pytest.param(Layout(2, 1, 1), LINEAR, True, "on rank 1", id="replicas, in an update"),
    *(
        pytest.param(Layout(2, 1, 1, {"zero_stage": stage}), LINEAR, True, "on rank 1", id=f"ZeRO {stage}")
        for stage in (1, 2, 3)
    ),
    pytest.param(Layout(1, 2, 1), LINEAR, True, "on rank 1", id="horizontal, cut"),
    pytest.param(Layout(1, 1, 2), "h.1.mlp.c_fc.weight", True, "on rank 1", id="pipeline"),
]


@pytest.mark.parametrize(("layout", "name", "in_update", "words"), CASES)
def test_one_flipped_bit_ends_all_ranks_with_the_rank_and_the_weight(
    layout: Layout, name: str, in_update: bool, words: str, tmp_path: Path
) -> None:
    sections = exchanges.sections_of(tmp_path, layout, UPDATES)
    sections["machine"] = {"check_weights_period": DUE}
    rows = tokens(24 * UPDATES)
    said = call_on_ranks(layout.world_size, corrupted, sections, layout, rows, 1, name, 3, in_update)
    assert len(set(said)) == 1, said
    assert f"silent corruption at update {DUE}: " in said[0]
    assert words in said[0], said[0]
    assert repr(name) in said[0], said[0]
    assert "process " in said[0]
    assert "the same command resumes from the last one" in said[0]


@pytest.mark.parametrize(
    "layout", [Layout(2, 1, 1), Layout(2, 1, 1, {"zero_stage": 2}), Layout(1, 2, 1), Layout(1, 1, 2)], ids=str
)
def test_nothing_is_found_where_nothing_is_wrong(layout: Layout, tmp_path: Path) -> None:
    sections = exchanges.sections_of(tmp_path, layout, UPDATES)
    sections["machine"] = {"check_weights_period": 1}
    rows = exchanges.data_of(UPDATES)
    assert set(call_on_ranks(layout.world_size, corrupted, sections, layout, rows, -1, "", 0, False)) == {""}


def saved_after_flip(sections: dict[str, Any], layout: Layout, rows: dict[str, Any]) -> str:
    said = corrupted(sections, layout, rows, 1, LINEAR, 3, False)
    saved = Path(sections["checkpoint"]["checkpoints_dir"]).glob("checkpoint-*")
    return f"{said} / {sorted(path.name for path in saved)}"


def test_what_replicas_do_not_agree_on_is_never_saved(tmp_path: Path) -> None:
    """The bit flips after update 2, before its checkpoint is saved; no other check is due before update 100."""
    layout = Layout(2, 1, 1)
    sections = exchanges.sections_of(tmp_path, layout, UPDATES)
    sections["checkpoint"] = {"checkpoints_dir": str(tmp_path / "c"), "checkpoint_period": 2, "max_num_checkpoints": 9}
    for said in call_on_ranks(2, saved_after_flip, sections, layout, exchanges.data_of(UPDATES)):
        assert said.endswith(" / []"), said
        assert "silent corruption at update" in said


def test_one_process_finds_what_changes_in_an_update_and_does_not_save_it(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, machine={"check_weights_period": DUE}, checkpoint={"checkpoints_dir": tmp_path / "c"})
    runner.watchers.add([Flip(runner, "weights/w1", 0, True)])
    with pytest.raises(CorruptionError, match=r"on rank 0 \(.*, process \d+\) 'w1' changed between two weight updates"):
        runner.run(InMemoryDataLoader(data(64)))
    assert not list((tmp_path / "c").glob("checkpoint-*"))


def recomputed(sections: dict[str, Any], layout: Layout, rows: dict[str, Any], faulty: int) -> tuple[str, list[Any]]:
    """A run in which every computation of one rank is wrong in its last bit, if it is watched; and its weights."""
    runner = TrainingRunner(Parameters.from_mapping(sections), Environment(execution_provider="CPU", threads=1))
    runner.initialize(InMemoryDataLoader(rows).feature_specs())
    mine = rows_of_replica(rows, runner.mesh.place.data, layout.data, exchanges.BATCH)
    try:
        with _wrong_computations() if runner.mesh.rank == faulty else contextlib.nullcontext():
            runner.run(InMemoryDataLoader(mine))
    except CorruptionError as error:
        return str(error), []
    return "", [
        sharded.tensor.tolist()
        for name, sharded in runner.state.sharded_tensors().items()
        if name.startswith("weights/")
    ]


@contextlib.contextmanager
def _wrong_computations() -> Iterator[None]:
    """As a processor has of which one multiplier is broken: results that are a bit off, and weights that are right."""
    right = recomputation.shared_loss
    recomputation.shared_loss = lambda *arguments: right(*arguments) * (1 + 2**-20)
    try:
        yield
    finally:
        recomputation.shared_loss = right


RECHECKED = [Layout(2, 1, 1), Layout(2, 1, 1, {"zero_stage": 3}), Layout(2, 2, 1)]


@pytest.mark.parametrize("layout", RECHECKED, ids=str)
def test_a_rank_that_computes_wrongly_is_found(layout: Layout, tmp_path: Path) -> None:
    sections = exchanges.sections_of(tmp_path, layout, UPDATES)
    sections["machine"] = {"check_computation_period": 2}
    answers = call_on_ranks(layout.world_size, recomputed, sections, layout, exchanges.data_of(UPDATES), 1)
    said = {text for text, _ in answers}
    assert len(said) == 1
    (text,) = said
    assert text.startswith("silent corruption before update 2: a micro-batch of replica ")
    assert "computed it and got different bits of the loss" in text, text
    assert ("the gradient of" in text) == ("zero_stage" not in layout.distributed)
    assert "rank 1 on " in text


@pytest.mark.parametrize("layout", RECHECKED, ids=str)
def test_recomputing_changes_nothing(layout: Layout, tmp_path: Path) -> None:
    """The same bits with and without it, dropout and all."""
    rows = exchanges.data_of(UPDATES)
    found = []
    for period in (0, 1):
        sections = exchanges.sections_of(tmp_path / str(period), layout, UPDATES)
        sections["machine"] = {"check_computation_period": period}
        found.append(call_on_ranks(layout.world_size, recomputed, sections, layout, rows, -1))
    assert found[0] == found[1]
    assert found[0][0][0] == ""


def test_recomputing_needs_replicas(tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match=r"machine\.check_computation_period is 5, .*data_parallel_size above 1"):
        check(parameters(tmp_path, machine={"check_computation_period": 5}))
