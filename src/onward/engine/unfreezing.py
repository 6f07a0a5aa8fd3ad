"""Weights that are trained from some update on: until then they have no gradient, and their moments stay zero.

They belong to the trainable weights from the beginning, so that checkpoints, plans and engines need to know nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onward.engine.network.local_weights import LocalWeight
from onward.errors import ParametersError
from onward.graph.weights.names import WeightNames
from onward.parameters import UnfreezeRule


class Unfreezing:
    """Which weights are frozen now.

    Args:
        first_updates: weight -> updates before it is trained; weights that are not listed are trained at once.
        skips_gradients: whether the gradients of frozen weights are not computed, rather than dropped: torch's engines
            for sharded weights and for pipelines know which weights have gradients from the beginning.
    """

    def __init__(self, first_updates: Mapping[str, int], skips_gradients: bool) -> None:
        self._first_updates = dict(first_updates)
        self._skips_gradients = skips_gradients
        self._frozen: frozenset[str] | None = None

    def frozen(self, updates: int) -> frozenset[str]:
        """The weights that are frozen after so many updates."""
        return frozenset(name for name, first in self._first_updates.items() if updates < first)

    def before_pass(self, updates: int, weights: Mapping[str, LocalWeight]) -> None:
        """Turns gradients of weights off or on before a pass.

        Args:
            updates: done so far.
            weights: of this rank.
        """
        if not self._first_updates or not self._skips_gradients:
            return
        frozen = self.frozen(updates)
        if frozen == self._frozen:
            return
        self._frozen = frozen
        for name in self._first_updates.keys() & weights.keys():
            for copy in (weights[name].source, *weights[name].followers):
                copy.requires_grad_(name not in frozen)


NEVER_FROZEN = Unfreezing({}, skips_gradients=False)


def make_unfreezing(
    rules: Sequence[UnfreezeRule], weights: Sequence[str], known_as: WeightNames, skips_gradients: bool
) -> Unfreezing:
    """What `training.unfreeze` asks for; of several rules that match a weight, the last counts.

    Raises:
        ParametersError: a pattern matches no trainable weight, or nothing is trained at the beginning.
    """
    first_updates: dict[str, int] = {}
    for index, rule in enumerate(rules):
        for pattern in (rule.weights,) if isinstance(rule.weights, str) else rule.weights:
            matched = [name for name in weights if known_as.matches(name, pattern)]
            if not matched:
                raise ParametersError(
                    f"training.unfreeze[{index}].weights: {pattern!r} matches none of the {len(weights)} trainable "
                    "weights. Name weights that are trainable: not those in weights_not_to_train, nor those that "
                    "train_last leaves out."
                )
            first_updates |= dict.fromkeys(matched, rule.after_updates)
    if weights and len(first_updates) == len(weights):
        raise ParametersError(
            f"training.unfreeze names all {len(weights)} trainable weights, so that nothing is trained before update "
            f"{min(first_updates.values())}. Leave out those that are to be trained first."
        )
    return Unfreezing(first_updates, skips_gradients)
