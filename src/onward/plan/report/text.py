"""A plan as aligned text: who holds what, stages and their balance, memory, communication, the schedule, a verdict."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from onward.graph.training_graph import TrainingGraph
from onward.parameters import Parameters
from onward.plan.decision import Plan
from onward.plan.layers import find_layers
from onward.plan.memory import KINDS, Forecast, RankForecast, stage_cost
from onward.plan.pipeline.schedules import draw, ideal_bubble_share
from onward.plan.topology import Place, Topology
from onward.spelling import shortened
from onward.tables import aligned, bytes_text, section

_Group = tuple[str, tuple[int, ...], str, str]
_WIDTH = 118
_MOST_ROWS = 60
_SHORT = {"gathered weights": "all-gathered", "low-precision copies": "16-bit", "communication": "buffers",
          "working memory": "temporary"}  # fmt: skip


def render(
    parameters: Parameters,
    graph: TrainingGraph,
    plan: Plan,
    forecast: Forecast,
    memory_limit_bytes: float | None = None,
    notes: Iterable[str] = (),
) -> str:
    """The text of `onward plan`.

    Args:
        parameters: of the run.
        graph: of the entire network, with its loss.
        plan: who does what.
        forecast: what that takes.
        memory_limit_bytes: of one rank; the verdict is about it.
        notes: further sentences.
    """
    sections = [
        _heading(parameters, graph, plan, forecast),
        section("Weights", [*_weights(graph, plan, forecast), *_holdings(plan, forecast)]),
        section("Learning rate of the layers", _layer_rates(parameters, graph)),
        section("Weights that are unsharded on every tensor-parallel rank", _reasons(graph, plan)),
        section("Stages", _stages(plan, forecast)),
        section("Peak tensor memory of each rank, in MB", _memory(plan, forecast)),
        section("Communication of a rank per weight update", _communication(plan, forecast)),
        section("Schedule of one update", _schedule(plan, forecast)),
        section("Notes", [line for note in (*notes, *_problems(forecast)) for line in _wrapped(f"- {note}")]),
        section("Verdict", _wrapped(verdict(forecast, plan, memory_limit_bytes))),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def verdict(forecast: Forecast, plan: Plan, memory_limit_bytes: float | None) -> str:
    """Whether it fits, in a sentence; without a limit, how much there has to be."""
    fullest = max(forecast.ranks, key=lambda rank: rank.memory.total)
    need, where = fullest.memory.total, ranks_at(plan.topology, fullest.pipeline)
    if memory_limit_bytes is None:
        return f"Peak tensor memory: {bytes_text(need)} ({where}). Pass --memory-gb to check whether it fits."
    share = need / memory_limit_bytes
    limit = bytes_text(memory_limit_bytes)
    if share <= 1.0:
        return f"Fits {limit}: the highest peak tensor memory ({where}) is {bytes_text(need)}, {share:.0%} of it."
    kinds = fullest.memory.kinds
    largest = max(kinds, key=lambda kind: kinds[kind])
    return (
        f"Does not fit {limit}: the highest peak tensor memory ({where}) is {bytes_text(need)}, {share:.2f} times as "
        f"much, mostly {largest} ({bytes_text(kinds[largest])}). {_REMEDIES.get(largest, _REMEDIES['activations'])}"
    )


_REMEDIES = {
    "activations": "Try recompute.segments, a smaller batch_size with more gradient_accumulation_steps, or more "
    "tensor-parallel or pipeline ranks.",
    "weights": "Try distributed.zero_stage 3, or more tensor-parallel or pipeline ranks.",
    "moments": "Try distributed.zero_stage 1, or more tensor-parallel or pipeline ranks.",
    "gradients": "Try distributed.zero_stage 2, or more tensor-parallel or pipeline ranks.",
}


def ranks_at(topology: Topology, pipeline: int) -> str:
    """The ranks at one place of the pipeline: `rank 0`, `ranks 0-7`."""
    first = topology.rank(Place(0, 0, pipeline))
    last = first + topology.data_size * topology.horizontal_size - 1
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _heading(parameters: Parameters, graph: TrainingGraph, plan: Plan, forecast: Forecast) -> str:
    t, files = plan.topology, parameters.model_files
    inputs = ", ".join(f"{name} {shape}" for name, shape in forecast.inputs.items())
    micro = f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''} per update"
    facts = [t.as_text, micro]
    if plan.experts.size > 1:
        facts.append(f"experts over {plan.experts.size} replicas")
    if plan.stage_count > 1:
        facts.append(f"{plan.schedule} over {plan.stage_count} stages")
    if plan.zero_stage:
        facts.append(plan.zero_words)
    if t.worker_count > 1:
        facts.append(f"workers synchronized every {parameters.distributed.sync_every_updates} updates")
    if parameters.mixed_precision.use_mixed_precision:
        facts.append("bf16" if parameters.mixed_precision.use_bfloat16 else "fp16")
    total = sum(math.prod(shape) for shape in _shapes(graph).values())
    lines = [
        f"Plan of {', '.join(file.name for file in files)}",
        f"  model        {len(graph.weights)} trainable weights, {_millions(total)} parameters",
        *_wrapped(f"micro-batch  {inputs}", "               ", "  "),
        f"  ranks        {t.world_size} = {'; '.join(facts)}",
    ]
    return "\n".join(lines)


def _weights(graph: TrainingGraph, plan: Plan, forecast: Forecast) -> list[str]:
    """One row for all weights that are called alike and treated alike; the name of one that stands alone."""
    stages = forecast.stages
    held: dict[str, tuple[int, ...]] = {}
    for stage in stages.stages if stages is not None else ():
        for name in stage.weights:
            held[name] = (*held.get(name, ()), stage.index)
    local = _shapes(forecast.local)
    groups: dict[_Group, list[str]] = {}
    for name, shape in _shapes(graph).items():
        cut = plan.horizontal.shardings.get(name)
        where = "unsharded" if cut is None else f"axis {cut.axis} in {plan.horizontal.size}"
        if cut is not None and len(cut.blocks) > 1 and len(cut.blocks) <= 4:
            where += f" ({len(cut.blocks)} blocks)"
        copies = max(cut.copies(plan.horizontal.size)) if cut is not None else 1
        where += f", heads on {copies} ranks each" if copies > 1 else ""
        where += _of_experts(name, plan)
        zero = "-" if name in plan.experts.weights else _zero(local[name], plan)
        groups.setdefault((pattern_of(name), shape, where, zero), []).append(name)
    rows, sizes = [], list[int]()
    for pattern, shape, where, zero in in_successive_rows(groups):
        names = groups[pattern, shape, where, zero]
        on = sorted({stage for name in names for stage in held.get(name, ())})
        called = pattern if len(names) > 1 else names[0]
        sizes.append(math.prod(shape) * len(names))
        rows.append((
            called, str(len(names)), "x".join(map(str, shape)) or "1", _millions(sizes[-1]), where, zero, _ranges(on),
        ))  # fmt: skip
    largest = sorted(range(len(rows)), key=lambda row: -sizes[row])[:_MOST_ROWS]
    shown = rows if len(rows) <= _MOST_ROWS else [rows[row] for row in largest]
    head = ("weights", "tensors", "shape", "parameters", "tensor parallel", "ZeRO over replicas", "stages")
    lines = aligned(shown, right=(1, 2, 3), head=head)
    return lines + ([f"... and {len(rows) - len(shown)} more kinds of weights"] if len(shown) < len(rows) else [])


def in_successive_rows(groups: Iterable[_Group]) -> list[_Group]:
    """The groups in order of the first of those whose weights are called alike."""
    together: dict[str, list[_Group]] = {}
    for group in groups:
        together.setdefault(group[0], []).append(group)
    return [group for alike in together.values() for group in alike]


def _of_experts(name: str, plan: Plan) -> str:
    if name in plan.experts.owners:
        return f", on one of {plan.experts.size} replicas"
    return f", experts in {plan.experts.size}" if name in plan.experts.stacks else ""


def _zero(shape: tuple[int, ...], plan: Plan) -> str:
    if not plan.zero_stage:
        return "-"
    if not shape:
        return "unsharded: one element"
    owner = -(-shape[0] // plan.topology.zero_size)
    what = {1: "moments", 2: "moments, gradients", 3: "all"}[plan.zero_stage]
    return f"{what}: {owner} of {shape[0]} rows each"


def pattern_of(name: str) -> str:
    """A name with its numbers starred, so that the layers of a network are called alike."""
    return re.sub(r"\d+", "*", name)


def _holdings(plan: Plan, forecast: Forecast) -> list[str]:
    """How many parameters each place of the pipeline holds."""
    local = _shapes(forecast.local)
    rows = []
    for rank in forecast.ranks:
        stages = plan.stages_of(Place(0, 0, rank.pipeline))
        names = local if forecast.stages is None else {n for s in stages for n in forecast.stages.stages[s].weights}
        count = sum(math.prod(local[name]) for name in names)
        zero = plan.topology.zero_size if plan.zero_stage == 3 else 1
        is_one = plan.topology.data_size * plan.topology.horizontal_size == 1
        rows.append(
            f"{ranks_at(plan.topology, rank.pipeline)} hold{'s' if is_one else ''} {len(names)} "
            f"tensor{'' if len(names) == 1 else 's'}, {_millions(count / zero)} parameters{'' if is_one else ' each'}"
        )
    return ["", *rows]


def _layer_rates(parameters: Parameters, graph: TrainingGraph) -> list[str]:
    """What `optimizer.layer_decay` multiplies the rate of each layer with; rules multiply it further."""
    decay = parameters.optimizer.layer_decay
    if decay is None:
        return []
    layers = find_layers(graph)
    of_layer: dict[int, list[str]] = {}
    for name, layer in layers.of_weight.items():
        of_layer.setdefault(layer, []).append(name)
    rows = [
        (str(layer), f"{decay ** (layers.count - 1 - layer):.4g}", str(len(of_layer.get(layer, []))),
         shortened(map(graph.known_as.shown, of_layer.get(layer, [])), 2))
        for layer in range(layers.count)
    ]  # fmt: skip
    return aligned(rows, right=(0, 1, 2), head=("layer", "times", "weights", "names"))


def _reasons(graph: TrainingGraph, plan: Plan) -> list[str]:
    if plan.horizontal.size == 1:
        return []
    groups: dict[str, list[str]] = {}
    for name, reason in plan.horizontal.reasons.items():
        groups.setdefault(reason, []).append(name)
    shapes, lines = _shapes(graph), list[str]()
    for reason, names in groups.items():
        kinds = list(dict.fromkeys(pattern_of(graph.known_as.paths.get(name, name)) for name in names))
        total = _millions(sum(math.prod(shapes[name]) for name in names if name in shapes))
        many = "weight" if len(names) == 1 else "weights"
        lines += _wrapped(f"- {reason}: {len(names)} {many}, {total} parameters ({shortened(kinds, 6)})")
    return lines


def _stages(plan: Plan, forecast: Forecast) -> list[str]:
    stages = forecast.stages
    if stages is None:
        cost = forecast.costs.total(forecast.costs.nodes)
        who = "tensor-parallel and context" if plan.topology.context_size > 1 else "tensor-parallel"
        return [f"one stage: {cost.forward / 1e9:.3f} GFLOP forward per micro-batch, over all {who} ranks"]
    costs = [stage_cost(stage, forecast.costs) for stage in stages.stages]
    times = [cost.time.forward + cost.time.backward_input + cost.time.backward_weight for cost in costs]
    rows = []
    for stage, cost, time in zip(stages.stages, costs, times, strict=True):
        rank = 0 if forecast.timeline is None else forecast.timeline.rank_of_stage[stage.index]
        print_ = forecast.footprints[stage.index]
        rows.append((
            str(stage.index), ranks_at(plan.topology, rank), str(len(stage.nodes) - len(stage.repeated)),
            str(len(stage.weights)), f"{cost.forward / 1e9:.3f}", f"{time / sum(times):.1%}",
            f"{print_.sent[0] / 1e6:.2f}", shortened([t.name for t in stage.sent], 2),
        ))  # fmt: skip
    head = ("stage", "held by", "nodes", "weights", "GFLOP fwd", "of the time", "sends MB", "values")
    worst = max(times) * len(times) / sum(times)
    tied = [f"{name!r} is stored on stages {_ranges(on)}" for name, on in stages.shared_weights.items()]
    return [
        *aligned(rows, right=(0, 2, 3, 4, 5, 6), head=head),
        f"balance: the slowest stage takes {worst:.2f} times the mean",
        *(_wrapped("tied weights: " + "; ".join(tied)) if tied else []),
    ]


def _memory(plan: Plan, forecast: Forecast) -> list[str]:
    kinds = [kind for kind in KINDS if any(rank.memory.kinds[kind] >= 500 for rank in forecast.ranks)]
    rows = [
        (
            ranks_at(plan.topology, rank.pipeline),
            *(f"{rank.memory.kinds[kind] / 1e6:.2f}" for kind in kinds),
            f"{rank.memory.total / 1e6:.2f}",
            rank.memory.moment,
        )
        for rank in forecast.ranks
    ]
    head = ("", *(_SHORT.get(kind, kind) for kind in kinds), "total", "when")
    kept = [f"{size / 1e6:.2f}" for rank in forecast.ranks for size in rank.memory.kept]
    what = "one micro-batch keeps for its backward pass"
    return [
        *aligned(rows, right=range(1, len(kinds) + 2), head=head),
        f"{what}: {kept[0]} MB" if len(kept) == 1 else f"{what}, by rank and stage: {', '.join(kept)} MB",
    ]


def _communication(plan: Plan, forecast: Forecast) -> list[str]:
    if plan.topology.world_size == 1:
        return ["none: there is one rank"]
    lines: list[str] = []
    for places, rank in _alike(forecast.ranks):
        if len(forecast.ranks) > 1:
            lines.append(", ".join(ranks_at(plan.topology, place) for place in places))
        rows = [
            (t.what, str(t.ranks), _calls(t.calls), f"{t.payload / 1e6:.3f}", f"{t.sent / 1e6:.3f}")
            for t in rank.traffic
        ]
        rows.append(("total", "", "", "", f"{sum(t.sent for t in rank.traffic) / 1e6:.3f}"))
        lines += aligned(rows, right=(1, 2, 3, 4), head=("what", "ranks", "calls", "tensors MB", "sent MB"))
    return lines


def _calls(count: float) -> str:
    """For an update; those of local SGD are less than one."""
    return f"{count:.0f}" if count == round(count) else f"{count:.3g}"


def _alike(ranks: Sequence[RankForecast]) -> list[tuple[list[int], RankForecast]]:
    found: list[tuple[list[int], RankForecast]] = []
    for rank in ranks:
        same = next((places for places, other in found if other.traffic == rank.traffic), None)
        if same is None:
            found.append(([rank.pipeline], rank))
        else:
            same.append(rank.pipeline)
    return found


def _schedule(plan: Plan, forecast: Forecast) -> list[str]:
    if forecast.timeline is None:
        return []
    size = plan.topology.pipeline_size
    ideal = ideal_bubble_share(plan.schedule, size, plan.micro_batches, plan.stage_count // size)
    drawn = draw(forecast.timeline, width=96).splitlines()
    text = "" if ideal is None else f"; with equal stages {ideal:.1%} (the paper's formula)"
    return [*drawn[:-1], drawn[-1] + text]


def recompute_note(parameters: Parameters, forecast: Forecast) -> str | None:
    """How much of each rank's graph is computed twice; None where nothing was asked for."""
    asked = parameters.recompute
    if not (asked.segments or asked.attention or asked.memory_budget is not None):
        return None
    plans = [planned.segments for planned in forecast.planned.own.values()]
    recomputed, count = sum(len(plan.recomputed) for plan in plans), sum(plan.count for plan in plans)
    return f"recompute: {recomputed} of {count} segments of the network are recomputed."


def zero_note(plan: Plan, forecast: Forecast) -> str | None:
    """What ZeRO all-gathers and reduce-scatters at once, over all stages; None without ZeRO."""
    if not plan.zero_stage:
        return None
    sizes = [unit.nbytes for planned in forecast.planned.own.values() for unit in planned.segments.units]
    if not sizes:
        return "ZeRO all-gathers all weights of a rank at once and reduce-scatters their gradients at once."
    units = f"{len(sizes)} unit{'s' if len(sizes) > 1 else ''}"
    return (
        f"ZeRO all-gathers weights and reduce-scatters gradients in {units} of up to {bytes_text(max(sizes))}, "
        f"and one more on each stage for weights of several segments and small ones."
    )


def _problems(forecast: Forecast) -> list[str]:
    return [
        f"the memory of stage {index} is estimated from the graph, since it cannot run without its data ({one.problem})"
        for index, one in forecast.footprints.items()
        if one.problem
    ]


def _wrapped(text: str, indent: str = "  ", first: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _shapes(graph: TrainingGraph) -> Mapping[str, tuple[int, ...]]:
    initializers = graph.model.graph.initializers
    stored = {name: initializers[name].const_value for name in graph.weights if name in initializers}
    return {name: tuple(int(n) for n in tensor.shape.numpy()) for name, tensor in stored.items() if tensor is not None}


def _millions(count: float) -> str:
    return f"{count / 1e6:.3f} M" if count >= 1e4 else f"{count:,.0f}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5`: ascending numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts) or "-"
