"""What no rank wrote is refused with what to do."""

from __future__ import annotations

import sys

import pytest

from onward.parallel.rendezvous.launcher import Launch
from onward.parallel.rendezvous.rendezvous import open_store, peer_info
from onward.parallel.rendezvous.run_store import ForeignEntryError
from onward.parallel.watch.heartbeats import Failure
from tests.parallel.starting import (
    free_port,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="several processes need Linux")


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04", b"[1]", b"3", b"[" * 100_000, b'{"rank": "x"}'])
def test_what_no_rank_wrote_is_refused(content: bytes) -> None:
    store = open_store(
        Launch(
            launcher="Slurm",
            rank=0,
            world_size=2,
            local_rank=0,
            local_size=2,
            master_address="127.0.0.1",
            master_port=free_port(),
        ),
        5.0,
    )
    store.set("here/1", content.decode("latin1") or "{")
    with pytest.raises(ForeignEntryError, match=r"as 'here/1', which no rank wrote\. Close its port"):
        peer_info(store, 1)
    with pytest.raises(ForeignEntryError, match="as 'failure'"):
        Failure.read(content)
