"""The entries that ranks write for each other into the store of a run, signed where the run has a secret.

torch's store accepts every connection. A stranger without the secret can still delete entries or add to counters, but
no rank believes what the stranger wrote: no forged failure, no process number to be signalled.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

from torch._C._distributed_c10d import PrefixStore, Store

from onward.errors import ParametersError

SECRET = "ONWARD_SECRET"
"""Environment variable, the same on every rank: what their entries are signed with."""
SHORTEST_SECRET = 16
_MARK = b"signed:"


class ForeignEntryError(ParametersError):
    """The store holds something that no rank of this run wrote."""

    def __init__(self, name: str, content: bytes, why: str = "which no rank wrote") -> None:
        super().__init__(
            f"the store where the ranks rendezvous holds {content[:40]!r} as {name!r}, {why}. Close its port to "
            "everything but the machines of the run (see docs/howto/distributed.md, Ports), and start again."
        )


def secret_of(variables: Mapping[str, str] = os.environ) -> bytes | None:
    """The run's secret; None where there is none.

    Raises:
        ParametersError: it is too short to be one.
    """
    text = variables.get(SECRET, "")
    if text and len(text) < SHORTEST_SECRET:
        raise ParametersError(
            f"the environment variable {SECRET} has {len(text)} characters, expected at least {SHORTEST_SECRET}. Set "
            "it to the same random text on every rank, as `openssl rand -hex 16` prints, or unset it."
        )
    return text.encode() or None


class RunStore:
    """A store as torch's are, whose text entries are signed with the secret and the entry's own name.

    Attributes:
        plain: torch's store below, for torch's own groups.
    """

    def __init__(self, plain: Store, prefix: str, secret: bytes | None) -> None:
        self.plain: Store = PrefixStore(prefix, plain)
        self._prefix = prefix
        self._secret = secret
        self._below = plain

    def clone(self) -> RunStore:
        """The same entries through its own connection."""
        return RunStore(self._below.clone(), self._prefix, self._secret)  # type: ignore[attr-defined]

    def set(self, name: str, text: str) -> None:
        """Writes an entry."""
        self.plain.set(name, self._signed(name, text))

    def get(self, name: str) -> bytes:
        """Waits for an entry and reads it.

        Raises:
            ForeignEntryError: it is not signed with this run's secret.
        """
        return self._verified(name, self.plain.get(name))

    def compare_set(self, name: str, expected: str, text: str) -> bytes:
        """Writes an entry where there is none (`expected` is empty); returns what is there. Raises as `get` does."""
        assert not expected, "entries are written once"
        return self._verified(name, self.plain.compare_set(name, "", self._signed(name, text)))

    def check(self, names: list[str]) -> bool:
        """Whether all entries are there; anybody can write them, so that only `get` shows whether a rank did."""
        return bool(self.plain.check(names))

    def add(self, name: str, number: int) -> int:
        """Adds to a counter, which is not signed."""
        return self.plain.add(name, number)

    def _signature(self, name: str, content: bytes) -> bytes:
        assert self._secret is not None
        message = f"{self._prefix}/{name}\0".encode() + content
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest().encode()

    def _signed(self, name: str, text: str) -> str:
        if self._secret is None:
            return text
        return f"{(_MARK + self._signature(name, text.encode())).decode()}:{text}"

    def _verified(self, name: str, content: bytes) -> bytes:
        if self._secret is None:
            if content.startswith(_MARK):
                raise ForeignEntryError(
                    name, content, f"signed with a secret that this rank does not have: set {SECRET}"
                )
            return content
        signature, _, text = content.removeprefix(_MARK).partition(b":")
        if not content.startswith(_MARK) or not hmac.compare_digest(signature, self._signature(name, text)):
            raise ForeignEntryError(name, content, f"which is not signed with this run's secret ({SECRET})")
        return text
