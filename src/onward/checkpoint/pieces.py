"""`Piece` lives in `onward.parallel.pieces`, since the train state is made of pieces, too."""

from __future__ import annotations

from onward.parallel.pieces import Piece

__all__ = ["Piece"]
