"""JSON between ranks: what arrives is what was sent, and what is none, or too much, is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onward.errors import OnwardError
from onward.parallel import messages
from onward.parallel.messages import all_gather_json, gather_json, scatter_json


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("value", [None, True, 0, -1.5, "", "größe", [], {}, {"a": [1, {"b": None}]}, "x" * 100_000])
def test_values_arrive_as_they_were_sent(value: Any, alone: Any) -> None:
    assert all_gather_json(alone, value) == [value]
    assert gather_json(alone, value) == [value]
    assert scatter_json(alone, [value]) == value


def test_a_message_that_is_too_large(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LARGEST_BYTES", 10)
    with pytest.raises(OnwardError, match=r"rank 0 announces a message of 22 bytes; expected 1 to 10\. Check that all"):
        all_gather_json(alone, "x" * 20)


@pytest.mark.parametrize("content", [b"\x80\x04", b"{", b"[" * 100_000, b""])
def test_what_is_no_json(content: bytes) -> None:
    data = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)
    with pytest.raises(OnwardError, match=r"rank 3 sent .*, which is no JSON \("):
        messages._decode(3, data, torch.tensor(len(content)))


def test_an_announcement_that_cannot_be() -> None:
    for size in (0, -1, 2**62):
        with pytest.raises(OnwardError, match="rank 1 announces a message of"):
            messages._largest([torch.tensor([5]), torch.tensor([size])])
