"""Folders that live as long as somebody holds them."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path


class TemporaryFolder:
    """A new folder that is removed when this object is, or by `remove`.

    Attributes:
        path: of the folder.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def remove(self) -> None:
        """Removes the folder with all that is in it."""
        self._remove()
