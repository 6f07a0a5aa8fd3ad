"""What a rank communicates with others for one update of the weights: calls and bytes of every kind.

A ring over n ranks sends 2 (n - 1) / n of the bytes of an all-reduce, and (n - 1) / n of those of an all-gather or a
reduce-scatter (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onward.graph.training_graph import TrainingGraph
from onward.parameters.distributed import Distributed
from onward.plan.decision import Plan
from onward.plan.horizontal.cuts import DOMAIN
from onward.plan.memory import StageFootprint, Traffic
from onward.plan.pipeline.schedules import SPLITS_BACKWARD
from onward.plan.pipeline.stages import StagePlan
from onward.plan.topology import Place

BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
"""torch's DistributedDataParallel reduces gradients in buckets of about this size; the first is smaller."""


def stage_traffic(footprints: Mapping[int, StageFootprint], micro_batches: int, is_pipeline: bool) -> list[Traffic]:
    """What the micro-batches of an update communicate: among tensor-parallel ranks, replicas (ZeRO), and stages."""
    found: dict[str, Traffic] = {}
    for one in footprints.values():
        for traffic in one.traffic_first:
            _add(found, traffic)
        for traffic in one.traffic_between:
            _add(found, traffic, micro_batches - 2)
        for traffic in one.traffic_last:
            _add(found, traffic)
        if is_pipeline:
            sends = (
                ("activations to the next stage", one.sent[0]),
                ("gradients to the previous stage", one.received[1]),
            )
            for what, size in sends:
                _add(found, Traffic(what=what, calls=float(size > 0), payload=size, ranks=2, share=1.0), micro_batches)
    return [traffic for traffic in found.values() if traffic.calls]


_REDUCE, _GATHER, _SCATTER = (
    "tensor-parallel all-reduce",
    "tensor-parallel all-gather",
    "tensor-parallel reduce-scatter",
)
_COLLECTIVES = {
    "AllReduce": (_REDUCE,), "Enter": (_REDUCE,), "ScatterTokens": (_GATHER,),
    "GatherTokens": (_GATHER, _SCATTER), "ReduceScatter": (_SCATTER, _GATHER),
}  # fmt: skip
"""Collective operators at the borders of regions -> what they communicate forward and backward."""

_OF_ROWS = {
    "ShardedCrossEntropy": (2, 3), "ShardedSoftmax": (3, 3), "ShardedLogSoftmax": (3, 3),
    "LayerNormOverRanks": (2, 4), "RMSNormOverRanks": (2, 2), "MovingScaleOfShards": (1, 1),
}  # fmt: skip
"""Operators that reduce a few numbers a row, forward and backward -> in how many calls, and how many numbers."""


_C_REDUCE, _C_GATHER, _C_SCATTER = "context all-reduce", "context all-gather", "context reduce-scatter"
_CONTEXT = {
    "ContextAttention": (_C_GATHER, _C_GATHER, _C_SCATTER), "ContextGather": (_C_GATHER, _C_SCATTER),
    "ContextSum": (_C_REDUCE, _C_REDUCE), "ContextMeanLoss": (_C_REDUCE,) * 3, "ContextHalo": (_C_GATHER, _C_SCATTER),
}  # fmt: skip
"""Operators by which context ranks communicate -> how, forward and backward; keys and values are gathered twice."""


def estimated_traffic(
    graph: ir.Graph, value_bytes: Mapping[str, float], ranks: int, context_ranks: int = 1
) -> tuple[Traffic, ...]:
    """What tensor-parallel and context ranks communicate for a micro-batch, counted from the graph of one of them.

    Args:
        graph: of the rank.
        value_bytes: of the values of the entire graph.
        ranks: how many share the tensors.
        context_ranks: how many share the sequences.
    """
    found: dict[str, Traffic] = {}
    for node in graph:
        if node.domain == DOMAIN and node.op_type in _CONTEXT:
            payloads = _context_payloads(node, value_bytes, context_ranks)
            for what, payload in itertools.product(_CONTEXT[node.op_type], payloads):
                share = (2.0 if what == _C_REDUCE else 1.0) * (context_ranks - 1) / context_ranks
                _add(found, Traffic(what=what, calls=1, payload=payload, ranks=context_ranks, share=share))
        values = (*node.outputs, *node.inputs[:1])
        names = [re.sub("/part(ial)?$", "", str(value.name)) for value in values if value is not None]
        payload = max((value_bytes.get(name, 0.0) for name in names), default=0.0)
        if node.domain == DOMAIN and node.op_type in _OF_ROWS:
            calls, numbers = _OF_ROWS[node.op_type]
            rows = value_bytes.get(names[-1], 0.0) / sum(node.attributes["blocks"].as_ints())
            share = 2.0 * (ranks - 1) / ranks
            _add(found, Traffic(what=_REDUCE, calls=calls, payload=rows * numbers, ranks=ranks, share=share))
        for what in _COLLECTIVES.get(node.op_type, ()) if node.domain == DOMAIN else ():
            share = (2.0 if what == _REDUCE else 1.0) * (ranks - 1) / ranks
            _add(found, Traffic(what=what, calls=1, payload=payload, ranks=ranks, share=share))
    return tuple(found.values())


def _context_payloads(node: ir.Node, value_bytes: Mapping[str, float], ranks: int) -> list[float]:
    """Bytes of the full tensors by which a node communicates with other context ranks."""
    values = {"ContextAttention": node.inputs[1:3], "ContextHalo": node.inputs[:1]}.get(node.op_type, node.outputs)
    if node.op_type == "ContextAttention" and not node.attributes["key_blocks"].as_ints():
        return []
    names = [re.sub("/(own|all)$", "", str(value.name)) for value in values if value is not None]
    part = 1.0
    if node.op_type == "ContextHalo":  # the edges of two chunks of every rank
        edges = node.attributes["before"].as_int() + node.attributes["after"].as_int()
        part = 2 * ranks * edges / node.attributes["blocks"].as_ints()[0]
    return [part * value_bytes.get(name, 0.0) for name in names]


def _add(found: dict[str, Traffic], traffic: Traffic, count: int = 1) -> None:
    traffic, known = traffic.times(count), found.get(traffic.what)
    if known is not None:
        calls, payload = known.calls + traffic.calls, known.payload + traffic.payload
        traffic = Traffic(what=traffic.what, calls=calls, payload=payload, ranks=traffic.ranks, share=traffic.share)
    found[traffic.what] = traffic


def replica_traffic(
    distributed: Distributed,
    plan: Plan,
    local: TrainingGraph,
    stages: StagePlan | None,
    pipeline: int,
    width: int,
    updates: int | None = None,
) -> list[Traffic]:
    """What replicas and tensor-parallel ranks communicate about gradients, apart from ZeRO.

    Args:
        distributed: of the parameters.
        plan: who does what.
        local: the graph of a rank.
        stages: of it.
        pipeline: place of the rank in the pipeline.
        width: bytes of an element of a gradient on its way.
        updates: of the round; None: that is not known.
    """
    sizes = weight_elements(local)
    by_stage = [_weights_of(local, stages, stage) for stage in plan.stages_of(Place(0, 0, pipeline))]
    found = []
    data, horizontal = plan.topology.worker_size, plan.topology.horizontal_size
    partial = [name for weights in by_stage for name in weights if name in plan.horizontal.partial_gradients]
    if partial:
        found.append(_all_reduce("gradients of unsharded weights", 1, 4.0 * sum(sizes[n] for n in partial), horizontal))
    held = {n: cut for weights in by_stage for n in weights if (cut := plan.horizontal.shardings.get(n)) and cut.parts}
    copied = sum(
        sizes[name] / cut.local_size(0, horizontal) * block
        for name, cut in held.items()
        for block, copies in zip(cut.blocks, cut.copies(horizontal), strict=True)
        if copies > 1
    )
    if copied:
        found.append(_all_reduce("gradients of replicated heads", 1, 4.0 * copied, horizontal))
    if data > 1 and not distributed.zero_stage:
        apart = plan.experts.weights
        totals = [sum(sizes[name] for name in weights if name not in apart) for weights in by_stage]
        if distributed.enable_adasum:
            steps = math.ceil(math.log2(data))
            payload = 4.0 * sum(totals) * steps
            found.append(Traffic(what="gradients (Adasum)", calls=steps, payload=payload, ranks=data, share=1.0))
        else:
            is_one = stages is not None and plan.schedule in SPLITS_BACKWARD
            calls = 1 if is_one else sum(_buckets(4 * total) for total in totals)
            payload = float((4 if is_one else width) * sum(totals))
            found.append(_all_reduce("gradients over the replicas", calls, payload, data))
    of_experts = [name for weights in by_stage for name in weights if name in plan.experts.weights]
    copies = data // plan.experts.size
    if of_experts and copies > 1:
        found.append(_all_reduce("gradients of experts", 1, 4.0 * sum(sizes[name] for name in of_experts), copies))
    elements = [sizes[name] for one in by_stage for name in one]
    return [*found, *_outer_traffic(distributed, plan, elements, updates)]


def _outer_traffic(distributed: Distributed, plan: Plan, elements: Sequence[int], updates: int | None) -> list[Traffic]:
    """What local SGD sends every so many updates and after the last one, as a part of it for each update."""
    workers, every = plan.topology.worker_count, distributed.sync_every_updates
    if workers == 1 or every is None or not elements:
        return []
    share = plan.topology.zero_size if plan.zero_stage else 1
    calls, size = 0, 0.0
    for count in elements:
        size += 4.0 * count / share
        if size >= BUCKET_BYTES:
            calls, size = calls + 1, 0.0
    calls += size > 0
    rate = math.ceil(updates / every) / updates if updates else 1 / every
    return [_all_reduce("weights over the workers", calls, 4.0 * sum(elements) / share, workers).times(rate)]


def tied_traffic(plan: Plan, local: TrainingGraph, stages: StagePlan | None, pipeline: int) -> list[Traffic]:
    """Gradients of weights that several stages hold, sent to every other rank that holds them."""
    if stages is None:
        return []
    sizes, calls, payload = weight_elements(local), 0, 0.0
    share = plan.topology.zero_size if plan.zero_stage else 1
    own = set(plan.stages_of(Place(0, 0, pipeline)))
    ranks = {s: p for p in range(plan.topology.pipeline_size) for s in plan.stages_of(Place(0, 0, p))}
    for name, holders in stages.shared_weights.items():
        if own & set(holders):
            others = {ranks[stage] for stage in holders} - {pipeline}
            calls += len(others)
            payload += 4.0 * sizes[name] / share * len(others)
    return (
        [Traffic(what="gradients of tied weights", calls=calls, payload=payload, ranks=2, share=1.0)] if calls else []
    )


def weight_elements(graph: TrainingGraph) -> dict[str, int]:
    """Elements of every trained weight as the graph's initializers have them."""
    initializers = graph.model.graph.initializers
    stored = {name: initializers[name].const_value for name in graph.weights if name in initializers}
    return {name: int(tensor.size) for name, tensor in stored.items() if tensor is not None}


def _weights_of(local: TrainingGraph, stages: StagePlan | None, stage: int) -> Sequence[str]:
    return tuple(local.weights) if stages is None else stages.stages[stage].weights


def _all_reduce(what: str, calls: int, payload: float, ranks: int) -> Traffic:
    return Traffic(what=what, calls=calls, payload=payload, ranks=ranks, share=2.0 * (ranks - 1) / ranks)


def _buckets(total: float) -> int:
    return 1 + math.ceil(max(0.0, total - FIRST_BUCKET_BYTES) / BUCKET_BYTES)
