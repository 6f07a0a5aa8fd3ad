"""The layout that a search chose as text: its fields, the runners-up, and why the obvious ones lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onward.plan.report.text import _wrapped
from onward.plan.search.choosing import AS_FAST, LayoutChoice
from onward.plan.search.hardware import Cluster
from onward.plan.search.layout import DIMENSIONS, Settings
from onward.plan.search.network import NetworkWork
from onward.plan.search.pricing import Estimate, limit_words
from onward.tables import aligned, bytes_text, section

_RUNNERS_UP = 6


def render_choice(
    choice: LayoutChoice,
    work: NetworkWork,
    cluster: Cluster,
    settings: Settings,
    explain: bool,
    files: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The text of `onward plan --ranks`.

    Args:
        choice: what was found.
        work: the network.
        cluster, settings: what the search was for.
        explain: also how the forecast is made up, and what it is based on.
        files: what to do about data of fewer files than ranks; empty: nothing.
        notes: what else to know, a line each.
    """
    sections = [
        _heading(choice, work, cluster, settings),
        section("RUN.yaml", yaml_lines(choice.chosen.layout.sections())),
        section("Nodes", _nodes(cluster, settings)),
        section("Files of the data", _wrapped(files) if files else []),
        section("Samples of an update", _even(choice, settings)),
        section("Runners-up", _runners_up(choice)),
        section("Why not the obvious", _obvious(choice, settings)),
        section("Notes", list(notes)),
        *(_explanation(choice, work, cluster, settings) if explain else ()),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def summary(choice: LayoutChoice) -> str:
    """The choice in a sentence."""
    one = choice.chosen
    peak = bytes_text(choice.planned_bytes or one.total_bytes)
    return f"{one.layout}; forecast: {_seconds(one.total_seconds)} an update, {peak} at peak"


def yaml_lines(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Fields as RUN.yaml has them, a line for each section."""

    def shown(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else f"{value}"

    return [
        f"{section}: {{{', '.join(f'{name}: {shown(value)}' for name, value in fields.items())}}}"
        for section, fields in sections.items()
    ]


def _heading(choice: LayoutChoice, work: NetworkWork, cluster: Cluster, settings: Settings) -> str:
    one, nodes = choice.chosen, -(-settings.ranks // cluster.ranks_of_node)
    seconds = one.total_seconds
    rate = work.operations(settings.samples) / seconds / settings.ranks
    rows = [
        ("ranks", f"{settings.ranks} on {nodes} node{'s' if nodes > 1 else ''} of {cluster.device.name}"),
        ("update", f"{settings.samples} samples, {settings.precision}"),
        ("chosen", str(one.layout)),
        ("forecast", f"{_seconds(seconds)} an update, {_number(settings.samples / seconds)} samples/s, "
                     f"{rate / 1e12:,.3g} TFLOP/s a rank"),
        ("peak memory", f"{bytes_text(choice.planned_bytes or one.total_bytes)} of "
                        f"{bytes_text(choice.limit_bytes)} for tensors; the search counted "
                        f"{bytes_text(one.total_bytes)}"),
    ]  # fmt: skip
    return "\n".join(["Layout", *(f"  {line}" for line in aligned(rows))])


def _nodes(cluster: Cluster, settings: Settings) -> list[str]:
    """That the last node is not filled, which the forecast does not know."""
    ranks, size = settings.ranks, cluster.ranks_of_node
    full, rest = divmod(ranks, size)
    if not full or not rest:
        return []
    divisors = [one for one in range(1, ranks + 1) if ranks % one == 0]
    near = " or ".join(str(one) for one in (max(d for d in divisors if d < size), min(d for d in divisors if d > size)))
    return _wrapped(
        f"{ranks} ranks do not fill nodes of {size}: {full} {'are' if full > 1 else 'is'} full, the last has {rest}. "
        f"The forecast counts groups of ranks as if every node were full. Pass --nodes-of {near}, which divide "
        f"{ranks}, or {full * size} or {(full + 1) * size} ranks."
    )


def _even(choice: LayoutChoice, settings: Settings) -> list[str]:
    """What a number of samples that all ranks can share would gain; with fewer than ranks, that these wait."""
    if settings.samples < settings.ranks:
        return _wrapped(
            f"An update has {settings.samples} samples, fewer than the {settings.ranks} ranks: replicas cannot share "
            "them, so that ranks wait in a pipeline or communicate within layers. Raise training.batch_size or "
            "gradient_accumulation_steps, or use fewer ranks."
        )
    rate = settings.samples / choice.chosen.total_seconds
    gains = [
        f"with {samples}, {_number(samples / one.total_seconds)} samples/s ({samples / one.total_seconds / rate:.2f} "
        f"times as many) in {one.layout}"
        for samples, one in choice.even.items()
    ]
    if not gains:
        return []
    return _wrapped(
        f"{settings.ranks} ranks cannot share {settings.samples} samples evenly. The forecast is "
        f"{'; '.join(gains)}. training.batch_size * gradient_accumulation_steps sets them."
    )


def _runners_up(choice: LayoutChoice) -> list[str]:
    others = [one for one in choice.ranked if one.layout != choice.chosen.layout][:_RUNNERS_UP]
    if not others:
        return ["none: no other layout fits"]
    rows = [
        (
            str(one.layout),
            _seconds(one.total_seconds),
            f"{one.total_seconds / choice.chosen.total_seconds:.2f}",
            bytes_text(one.total_bytes),
            _loss(one, choice.chosen),
        )
        for one in others
    ]
    return aligned(rows, right=(1, 2, 3), head=("layout", "an update", "times as long", "peak", "mostly for"))


def _obvious(choice: LayoutChoice, settings: Settings) -> list[str]:
    lines = []
    for name, one in choice.obvious.items():
        if one is None or one.layout == choice.chosen.layout:
            impossible = (
                f"there is none: {settings.ranks} ranks cannot divide the {settings.samples} samples of an update, or "
                "the network, like that"
            )
            why = "it is the chosen one" if one else impossible
        elif not one.fits:
            kind = max(one.memory, key=lambda kind: one.memory[kind])
            why = (
                f"does not fit: {bytes_text(one.total_bytes)} at peak even in its smallest form ({one.layout}), mostly "
                f"{kind} ({bytes_text(one.memory[kind])})"
            )
        else:
            times = one.total_seconds / choice.chosen.total_seconds
            about = (
                f"{times:.2f} times as long, mostly for {_loss(one, choice.chosen)}" if times > AS_FAST else "as fast"
            )
            why = f"{_seconds(one.total_seconds)} an update ({one.layout}), {about}"
        lines += _wrapped(f"- {name}: {why}")
    return lines


def _loss(one: Estimate, than: Estimate) -> str:
    """What a layout spends more time on than another."""
    more = {kind: seconds - than.seconds.get(kind, 0.0) for kind, seconds in one.seconds.items()}
    return max(more, key=lambda kind: more[kind])


def _explanation(choice: LayoutChoice, work: NetworkWork, cluster: Cluster, settings: Settings) -> Sequence[str]:
    one, device = choice.chosen, cluster.device
    total = one.total_seconds
    times = [(kind, _seconds(part), f"{part / total:.0%}") for kind, part in one.seconds.items() if part]
    memory = [
        (kind, bytes_text(part), f"{part / one.total_bytes:.0%}") for kind, part in one.memory.items() if part >= 1
    ]
    rates = [
        (f"{settings.precision} matmuls", f"{device.operations_per_second[settings.precision] / 1e12:.4g} TFLOP/s"),
        ("memory of a rank", f"{bytes_text(settings.memory_bytes)}, {device.bytes_per_second / 1e9:.4g} GB/s"),
        ("left for tensors", f"{bytes_text(choice.limit_bytes)}: {limit_words(cluster, settings)}"),
        *(
            (f"{what} nodes", f"{link.bytes_per_second / 1e9:.3g} GB/s, {link.latency_seconds * 1e6:.3g} us")
            for what, link in (("inside", cluster.inside), ("between", cluster.between))
        ),
        ("to start an operator", f"{device.operator_seconds * 1e6:.3g} us"),
    ]
    sizes = [
        ("parameters", f"{_number(work.weights / 1e6)} M"),
        ("operations of a sample", f"{_number(work.operations(1) / 1e9)} GFLOP, forward and backward"),
        ("activations of a sample", bytes_text(float(work.kept.sum()) * settings.width / work.width)),
        ("places to cut a pipeline", str(work.blocks - 1)),
    ]
    counted = [
        f"searched: {', '.join(DIMENSIONS)}, and recompute",
        f"{choice.examined:,} layouts priced, {choice.examined - sum(choice.too_large.values()):,} of them fit",
        *(f"{count:,} do not fit, mostly for {kind}" for kind, count in choice.too_large.items()),
    ]
    return (
        section("Time of an update", aligned(times, right=(1, 2))),
        section("Peak tensor memory of a rank", aligned(memory, right=(1, 2))),
        section("Network", aligned(sizes)),
        section("Attainable rates", aligned(rates)),
        section("Search", counted),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
