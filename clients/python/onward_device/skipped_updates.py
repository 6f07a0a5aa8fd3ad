"""Updates that are skipped are reported, so that training that changes nothing is noticed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


class SkippedUpdatesError(RuntimeError):
    """Too many weight updates in a row were skipped; weights and moments are as before them."""


class SkippedUpdates:
    """Watches the updates of a trainer, by the rule of `onward train`.

    Args:
        training: that section of the manifest.
    """

    def __init__(self, training: Mapping[str, Any]) -> None:
        self._most = int(training.get("skipped_in_a_row", 10))
        self._fixed_scale = training.get("fixed_loss_scale")
        self._in_a_row = 0
        self._has_warned = False

    def after_update(self, update: int, is_skipped: bool, lowers_scale: bool, norm: float, loss: float) -> None:
        """Looks at an update.

        Args:
            update: its number, from 1.
            is_skipped: whether it changed nothing.
            lowers_scale: whether it lowered the dynamic loss scale, which is how that one is found: it does not count.
            norm: of its gradient.
            loss: of its last batch.

        Raises:
            SkippedUpdatesError: more in a row were skipped than are allowed.
        """
        if not is_skipped:
            self._in_a_row = 0
            return
        if lowers_scale:
            return
        self._in_a_row += 1
        found = f"gradient norm {norm:g}, loss {loss:g}"
        if self._in_a_row > self._most:
            raise SkippedUpdatesError(
                f"the last {self._in_a_row} weight updates were skipped, since their losses, gradients or batch "
                f"statistics were not finite (update {update}: {found}): nothing was trained by them. "
                f"on_bad_loss.skip of the bundle's run allows {self._most} in a row. {self._what_to_do()}"
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"update {update} was skipped: its loss, gradient or batch statistics are not finite ({found}). Later "
                f"ones are counted in Trainer.skipped_updates; more than {self._most} in a row raise an error.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _what_to_do(self) -> str:
        if self._fixed_scale is not None:
            return (
                f"mixed_precision.loss_scale of the bundle's run is {self._fixed_scale:g}, at which gradients "
                "overflow. Write the bundle again with 0 for dynamic loss scaling, or with a smaller value."
            )
        return (
            "Look for infinite, NaN or very large values in the batches, or write the bundle again with a lower "
            "learning_rate.initial_lr or with optimizer.max_norm_clip."
        )
