"""The search: every layout priced, those that do not fit counted by reason, the obvious ones kept for comparison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onward.errors import ParametersError
from onward.plan.search.hardware import Cluster
from onward.plan.search.layout import Layout, Settings, layouts
from onward.plan.search.network import NetworkWork
from onward.plan.search.pricing import Estimate, Pricing, limit_bytes, limit_words

AS_FAST = 1.01
"""Of layouts within one percent of the fastest the simplest is chosen: the forecast is not more precise than that."""

NEARBY = 0.1
"""Of the samples of an update, by which a number that ranks can share evenly may differ to be proposed."""

OBVIOUS: Mapping[str, Callable[[Layout], bool]] = {
    "replicas only": lambda one: one.data == one.ranks and one.zero_stage == 0 and one.experts == 1,
    "ZeRO 3 over all ranks": lambda one: one.data == one.sharers == one.ranks and one.zero_stage == 3,
    "tensor parallelism in a node, replicas between": lambda one: (
        one.horizontal > 1
        and one.data * one.horizontal == one.ranks
        and (one.zero_stage, one.experts, one.sequence_parallel) == (0, 1, False)
    ),
    "pipeline only": lambda one: one.pipeline == one.ranks > 1,
}
"""What people try first -> whether a layout is that."""


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """What a search found.

    Attributes:
        chosen: the layout to train with.
        ranked: those that fit, the fastest first; one for each mesh and stage of ZeRO.
        obvious: what people try first -> the best of its kind, which may not fit; None: the run allows none.
        examined: how many layouts were priced.
        too_large: kind of memory -> how many layouts do not fit mostly because of it.
        limit_bytes: of a rank, for tensors.
        planned_bytes: at the peak of the rank that needs most, by the plan of the chosen layout; None: it was not made.
        even: choices for updates of nearby numbers of samples that all ranks can share, if more samples a second are
            forecast for them, by that number.
    """

    chosen: Estimate
    ranked: tuple[Estimate, ...]
    obvious: Mapping[str, Estimate | None]
    examined: int
    too_large: Mapping[str, int]
    limit_bytes: float
    planned_bytes: float | None = None
    even: Mapping[int, Estimate] = field(default_factory=dict)


class LayoutSearch:
    """All layouts of a run; what is counted of each is counted once, however often one is chosen.

    Args:
        works: the network in each form that tensor parallelism needs.
        cluster: what it runs on.
        settings: of the run.
    """

    def __init__(self, works: Sequence[NetworkWork], cluster: Cluster, settings: Settings) -> None:
        pricings = [Pricing(work, cluster, settings) for work in works]
        self.cluster, self.settings, self._limit_bytes = cluster, settings, limit_bytes(cluster, settings)
        self._priced = [(one, layout) for one in pricings for layout in layouts(one.work, cluster, settings)]

    def choose(self, more_memory: Callable[[Layout], float] = lambda layout: 1.0) -> LayoutChoice:
        """The layout in which an update takes the shortest time.

        Args:
            more_memory: how many times the memory that is counted for a layout it needs.

        Raises:
            ParametersError: no layout fits, or the ranks cannot share the samples of an update.
        """
        best: dict[tuple[int, ...], Estimate] = {}
        obvious: dict[str, Estimate] = {}
        smallest: Estimate | None = None
        too_large: Counter[str] = Counter()
        fitting: list[Estimate] = []
        for pricing, layout in self._priced:
            found = pricing.least_recompute(layout, more_memory(layout))
            if smallest is None or found.total_bytes < smallest.total_bytes:
                smallest = found
            for name, is_one in OBVIOUS.items():
                if is_one(layout):
                    obvious[name] = min(obvious.get(name, found), found, key=_order)
            if not found.fits:
                too_large[max(found.memory, key=lambda kind: found.memory[kind])] += 1
                continue
            fitting.append(found)
            key = (layout.data, layout.context, layout.horizontal, layout.pipeline, layout.experts, layout.zero_stage)
            best[key] = min(best.get(key, found), found, key=_order)
        if not fitting:
            raise ParametersError(_nothing_fits(smallest, self.cluster, self.settings))
        fastest = min(one.total_seconds for one in fitting)
        near = [one for one in fitting if one.total_seconds <= fastest * AS_FAST]
        return LayoutChoice(
            chosen=min(near, key=lambda one: one.layout.complexity),
            ranked=tuple(sorted(best.values(), key=lambda one: one.total_seconds)),
            obvious={name: obvious.get(name) for name in OBVIOUS},
            examined=len(self._priced),
            too_large=dict(too_large.most_common()),
            limit_bytes=self._limit_bytes,
        )


def choose_layout(works: Sequence[NetworkWork], cluster: Cluster, settings: Settings) -> LayoutChoice:
    """What `LayoutSearch` chooses at once.

    Raises:
        ParametersError: no layout fits, or the ranks cannot share the samples of an update.
    """
    return LayoutSearch(works, cluster, settings).choose()


def even_updates(
    works: Sequence[NetworkWork],
    cluster: Cluster,
    settings: Settings,
    chosen: Estimate,
    more_memory: Callable[[Layout], float] = lambda layout: 1.0,
) -> dict[int, Estimate]:
    """What updates of nearby numbers of samples, which all ranks can share, would gain; empty: nothing.

    Args:
        works, cluster, settings, more_memory: as `choose_layout` takes them.
        chosen: what it found.
    """
    ranks, samples, found = settings.ranks, settings.samples, dict[int, Estimate]()
    if samples % ranks == 0 or settings.later_samples:
        return found
    fewer = samples // ranks * ranks
    for near in (fewer, fewer + ranks):
        if abs(near - samples) > NEARBY * samples:  # another update, with another learning rate
            continue
        best = LayoutSearch(works, cluster, replace(settings, samples=near)).choose(more_memory).chosen
        if best.total_seconds / near * AS_FAST < chosen.total_seconds / samples:
            found[near] = best
    return found


def few_files(files: int) -> str:
    """Why there are no more data-parallel ranks than files."""
    held = "1 file" if files == 1 else f"{files} files"
    return f"the data have {held}, and every data-parallel rank reads its own"


def _order(one: Estimate) -> tuple[bool, float, float]:
    """Those that fit by time, others by memory."""
    return not one.fits, one.total_seconds if one.fits else one.total_bytes, one.total_seconds


def _nothing_fits(smallest: Estimate | None, cluster: Cluster, settings: Settings) -> str:
    if smallest is None:
        shared, most = math.gcd(settings.samples, settings.ranks), settings.most_data
        if most is not None and shared > most:
            return (
                f"no layout of {settings.ranks} ranks: {few_files(most)}, and the network cannot be cut over the rest. "
                f"Pack the data again into at least {shared} files, with fewer samples in each (onward pack "
                "--samples-per-file), or use fewer ranks."
            )
        fewer = settings.samples // settings.ranks * settings.ranks
        near = f"{fewer} or {fewer + settings.ranks}" if fewer else f"{settings.ranks}"
        return (
            f"no layout of {settings.ranks} ranks can share the {settings.samples} samples of an update. Make them "
            f"(training.batch_size * gradient_accumulation_steps) a multiple of {settings.ranks}, such as {near}; now "
            f"{shared} replicas could share them, and the network cannot be cut over the rest."
        )
    kind = max(smallest.memory, key=lambda one: smallest.memory[one])
    return (
        f"no layout of {settings.ranks} ranks fits {limit_bytes(cluster, settings) / 1e9:.3g} GB for tensors "
        f"({limit_words(cluster, settings)}): the smallest, {smallest.layout}, needs "
        f"{smallest.total_bytes / 1e9:.3g} GB, mostly {kind} ({smallest.memory[kind] / 1e9:.3g} GB). Use more ranks or "
        f"GPUs with more memory, or an update of fewer samples.{_held_back(settings)}"
    )


def _held_back(settings: Settings) -> str:
    """That more files would allow more layouts; empty: they would not."""
    most = settings.most_data
    if most is None or most >= math.gcd(settings.samples, settings.ranks):
        return ""
    return f" Only layouts of at most {most} data-parallel ranks were searched: {few_files(most)}."
