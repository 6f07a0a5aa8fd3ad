"""The store of a run: entries are signed with its secret, and bound to their names and restarts."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from onward.errors import ParametersError
from onward.parallel.rendezvous.run_store import ForeignEntryError, RunStore, secret_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="several processes need Linux")
SECRETS = "0123456789abcdef", "fedcba9876543210"


def stores(*secrets: str | None, prefix: str = "onward/0") -> list[RunStore]:
    """One store as ranks with these secrets see it."""
    below = dist.HashStore()
    return [RunStore(below, prefix, None if one is None else one.encode()) for one in secrets]


def test_ranks_with_one_secret_read_each_other() -> None:
    one, other = stores(SECRETS[0], SECRETS[0])
    one.set("failure", "the shard lies: \u00e9")
    assert other.get("failure").decode() == "the shard lies: \u00e9"
    assert other.compare_set("failure", "", "another") == one.get("failure")
    assert other.compare_set("job", "", "a") == b"a"
    assert (other.check(["job"]), other.check(["here/0"])) == (True, False)
    assert (one.add("done", 1), other.add("done", 1)) == (1, 2)


@pytest.mark.parametrize(("writer", "reader"), [(None, SECRETS[0]), (SECRETS[1], SECRETS[0])])
def test_what_is_not_signed_with_the_secret_is_refused(writer: str | None, reader: str) -> None:
    stranger, rank = stores(writer, reader)
    stranger.set("failure", "{}")
    for read in (lambda: rank.get("failure"), lambda: rank.compare_set("failure", "", "mine")):
        with pytest.raises(ForeignEntryError, match=r"as 'failure', which is not signed with this run's secret \(ONW"):
            read()


def test_a_rank_without_the_secret_is_told_to_set_it() -> None:
    rank, forgetful = stores(SECRETS[0], None)
    rank.set("job", "2 processes")
    with pytest.raises(ForeignEntryError, match="signed with a secret that this rank does not have: set ONWARD_SECRET"):
        forgetful.get("job")


def test_an_entry_cannot_be_moved_to_another_name_or_restart() -> None:
    below = dist.HashStore()
    first, second = (RunStore(below, f"onward/{restart}", SECRETS[0].encode()) for restart in (0, 1))
    first.set("here/0", "a")
    signed = first.plain.get("here/0").decode()
    first.plain.set("here/1", signed)
    second.plain.set("here/0", signed)
    for store, name in ((first, "here/1"), (second, "here/0")):
        with pytest.raises(ForeignEntryError):
            store.get(name)
    assert first.get("here/0") == b"a"


def test_the_secret_is_long_enough_or_absent() -> None:
    assert secret_of({}) is None
    assert secret_of({"ONWARD_SECRET": ""}) is None
    assert secret_of({"ONWARD_SECRET": SECRETS[0]}) == SECRETS[0].encode()
    with pytest.raises(ParametersError, match=r"ONWARD_SECRET has 5 characters, expected at least 16\. Set it to"):
        secret_of({"ONWARD_SECRET": "short"})
