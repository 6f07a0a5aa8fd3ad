"""What ranks agree on: that they are alike, when to stop, and numbers that all hear."""

from __future__ import annotations

from onward.errors import ParametersError
from onward.parallel.agreement import UpdateAgreement, agree_on_any, check_same
from onward.parallel.launch.process import in_world_of_one, start
from onward.parameters.distributed import Distributed
from tests.ranks import run_on_ranks


def stop_wishes() -> tuple[list[bool], list[bool]]:
    mesh = start(Distributed(pipeline_parallel_size=3), "cpu")
    stopping, ending = UpdateAgreement(mesh), UpdateAgreement(mesh)
    after = [stopping.after_update(mesh.rank == 1 and update == 2).stops for update in range(4)]
    at_end = [ending.after_update(mesh.rank == 2).stops, ending.stops_at_end(False)]
    return after, [*at_end, ending.stops_at_end(mesh.rank == 0), ending.stops_at_end(False)]


def test_wish_of_one_rank_stops_all_after_the_same_update_the_next_or_at_the_end() -> None:
    expected = ([False, False, False, True], [False, True, True, False])
    assert run_on_ranks(3, stop_wishes) == [expected] * 3


def given_numbers() -> list[object]:
    """Rank 0 alone gives the first number, every rank the second; after the third update nothing follows."""
    mesh = start(Distributed(data_parallel_size=3), "cpu")
    agreement = UpdateAgreement(mesh, ("rate", "rank"))
    heard = []
    for update in range(3):
        rate = {"rate": 0.25} if mesh.rank == 0 and update == 1 else {}
        heard.append(agreement.after_update(False, {"rank": float(mesh.rank), **rate}))
    return [tuple(one.numbers.values()) for one in (*heard, agreement.settle(), agreement.settle())]


def test_the_largest_of_each_number_is_heard_by_all_one_update_later() -> None:
    expected = [(None, None), (None, 2.0), (0.25, 2.0), (None, 2.0), (None, None)]
    assert run_on_ranks(3, given_numbers) == [expected] * 3


def wishes_of_any() -> list[bool]:
    mesh = start(Distributed(data_parallel_size=2), "cpu")
    return [agree_on_any(mesh, wanted) for wanted in (False, mesh.rank == 1, True)]


def test_what_any_rank_wants_all_hear() -> None:
    assert run_on_ranks(2, wishes_of_any) == [[False, True, True]] * 2
    assert [agree_on_any(in_world_of_one(), wanted) for wanted in (False, True)] == [False, True]


def compare() -> str:
    mesh = start(Distributed(data_parallel_size=4), "cpu")
    check_same(mesh, {"parameters": "a" * 64, "version": "1.0"})
    try:
        check_same(
            mesh,
            {"model": "abc"[min(mesh.rank, 2)] * 64, "data": "d" * 64, **({"seed": "7"} if mesh.rank else {})},
        )
    except ParametersError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_named_with_what_they_have() -> None:
    answers = run_on_ranks(4, compare)
    assert len(set(answers)) == 1
    assert (
        "model: aaaaaaaaaaaaaaaa... on rank 0, bbbbbbbbbbbbbbbb... on rank 1, cccccccccccccccc... on ranks 2, 3"
        in (answers[0])
    )
    assert "seed: nothing on rank 0, 7 on ranks 1, 2, 3" in answers[0]
    assert "data" not in answers[0].partition(". Give")[0]
