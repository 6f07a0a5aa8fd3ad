"""A plan in ONNX's own words: multi-device annotations of IR version 11, written into a model and read from one.

The standard says on which devices a node's tensors are split, and in which pipeline stage a node is (onnx.proto,
`DeviceConfigurationProto` and `NodeDeviceConfigurationProto`). What it has no words for (replicas, ZeRO, the schedule,
blocks of a fused axis, sums that are still to be made) goes into `metadata_props`, as JSON under `onward.plan`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onward.errors import ModelError
from onward.plan.horizontal.planning import HorizontalPlan
from onward.plan.roles import ValueRoles, node_id
from onward.plan.topology import Topology
from onward.spelling import shortened

METADATA_KEY = "onward.plan"
IR_VERSION = 11
"""The first that has multi-device annotations."""

_MOST_NAMED = 3


@dataclass(frozen=True)
class RequestedSharding:
    """What the annotations of a model ask for.

    Attributes:
        configuration: the name of the one that was read.
        stage_of: first output of a node -> pipeline stage.
        splits: initializer -> (axis, into how many parts).
        others: names of configurations that were not read.
    """

    configuration: str
    stage_of: Mapping[str, int] = field(default_factory=dict)
    splits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @property
    def stage_count(self) -> int:
        """How many pipeline stages it names; 0 for none."""
        return len(set(self.stage_of.values()))


def annotate(
    model: ir.Model,
    topology: Topology,
    horizontal: HorizontalPlan,
    stage_of: Mapping[str, int],
    rank_of_stage: Mapping[int, int],
    more: Mapping[str, Any],
) -> int:
    """Writes a plan into a model, in place, as one device configuration; others that it has are kept.

    Device h + p * horizontal_size is tensor-parallel rank h at place p of the pipeline. Replicas are left to the
    launcher.

    Args:
        model: the user's own.
        topology: the mesh.
        horizontal: how weights and values are split.
        stage_of: first output of a node -> stage.
        rank_of_stage: stage -> place in the pipeline.
        more: further facts for the metadata.

    Returns:
        How many nodes were annotated.
    """
    size = topology.horizontal_size
    name = f"onward_h{size}_p{topology.pipeline_size}"
    known = [one for one in model.device_configurations if one.name != name]
    for node in model.graph:
        kept = [own for own in node.device_configurations if own.configuration in known]
        node.device_configurations = tuple(kept)
    model.device_configurations = tuple(known)
    configuration = model.add_device_configuration(name, num_devices=size * topology.pipeline_size)
    cuts = {**horizontal.values, **horizontal.shardings} if size > 1 else {}
    # The standard has no words for an axis of which some blocks are divided among fewer devices.
    cuts = {name: cut for name, cut in cuts.items() if not cut.parts}
    count = 0
    for node in model.graph:
        stage = stage_of.get(node_id(node)) if any(value.name for value in node.outputs) else None
        first = size * rank_of_stage.get(stage or 0, 0)
        split = [v for v in dict.fromkeys((*node.inputs, *node.outputs)) if v is not None and v.name in cuts]
        for value in split:
            cut = cuts[str(value.name)]
            devices = range(first, first + size)
            node.shard(value, configuration=configuration, axis=cut.axis, num_shards=size, device_indices=devices)
        if stage is not None:
            node.set_pipeline_stage(configuration, stage)
        count += bool(split) or stage is not None
    blocks = {key: list(cut.blocks) for key, cut in cuts.items() if len(cut.blocks) > 1}
    facts = {"configuration": name, **more, "blocks": blocks, "partial_sums": list(horizontal.reduced)}
    model.metadata_props[METADATA_KEY] = json.dumps(facts, sort_keys=True)
    model.ir_version = max(model.ir_version, IR_VERSION)
    return count


def read_requested_sharding(model: ir.Model, topology: Topology) -> RequestedSharding | None:
    """What a model's annotations ask for; of several configurations that for as many devices as there are ranks.

    Args:
        model: the user's own.
        topology: the mesh.

    Raises:
        ModelError: annotations contradict the standard or the model; it names all of them.
    """
    if not model.device_configurations and not any(node.device_configurations for node in model.graph):
        return None
    problems = list(_problems(model))
    if problems:
        shown = shortened(problems, _MOST_NAMED, "; ")
        raise ModelError(
            f"the model's multi-device annotations are broken: {shown}. Fix them, or remove them (model.configuration "
            "and the nodes' device_configurations)."
        )
    devices = topology.horizontal_size * topology.pipeline_size
    fitting = [one for one in model.device_configurations if one.num_devices == devices]
    chosen = (fitting or list(model.device_configurations))[0]
    stage_of: dict[str, int] = {}
    splits: dict[str, tuple[int, int]] = {}
    for node in model.graph:
        for own in node.device_configurations:
            if own.configuration is not chosen:
                continue
            if own.pipeline_stage is not None and any(value.name for value in node.outputs):
                stage_of[node_id(node)] = own.pipeline_stage
            for spec in own.sharding_specs:
                if spec.value is not None and spec.value.is_initializer() and len(spec.sharded_dims) == 1:
                    (dim,) = spec.sharded_dims
                    parts = [simple.num_shards for simple in dim.simple_shardings]
                    rank = len(spec.value.shape or ())
                    splits[str(spec.value.name)] = (dim.axis % rank if rank else dim.axis, max(parts, default=1))
    others = tuple(one.name for one in model.device_configurations if one is not chosen)
    return RequestedSharding(chosen.name, stage_of, splits, others)


def _problems(model: ir.Model) -> Iterator[str]:
    """What is wrong, one sentence each; onnx.checker looks at none of it."""
    declared = {id(one): one for one in model.device_configurations}
    names = [one.name for one in model.device_configurations]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"configuration {name!r} is declared twice"
    for one in model.device_configurations:
        if one.num_devices < 1 or (one.device_names and len(one.device_names) != one.num_devices):
            yield f"configuration {one.name!r} has {one.num_devices} devices and {len(one.device_names)} device names"
    for node in model.graph:
        where = f"node {node.name or node_id(node)!r}"
        own = {id(value) for value in (*node.inputs, *node.outputs) if value is not None}
        for placed in node.device_configurations:
            configuration = placed.configuration
            if configuration is None or id(configuration) not in declared:
                called = "" if configuration is None else configuration.name
                listed = ", ".join(map(repr, names)) or "none"
                yield f"{where} refers to configuration {called!r}, which is not declared (declared: {listed})"
                continue
            if placed.pipeline_stage is not None and placed.pipeline_stage < 0:
                yield f"{where} is in pipeline stage {placed.pipeline_stage}; stages are numbered from 0"
            for spec in placed.sharding_specs:
                if spec.value is None or id(spec.value) not in own:
                    called = "" if spec.value is None else str(spec.value.name)
                    yield f"{where} shards {called!r}, which is neither an input nor an output of it"
                    continue
                yield from _problems_of_spec(where, spec, configuration.num_devices)


def _problems_of_spec(where: str, spec: Any, devices: int) -> Iterator[str]:
    value = spec.value
    groups = {entry.key: entry.value for entry in spec.index_to_device_group_map}
    for device in (d for key in spec.device for d in groups.get(key, (key,))):
        if not 0 <= device < devices:
            yield f"{where} puts {value.name!r} on device {device} of {devices}, numbered from 0"
    rank = None if value.shape is None else len(value.shape)
    for dim in spec.sharded_dims:
        if rank is not None and not -rank <= dim.axis < rank:
            yield f"{where} shards axis {dim.axis} of {value.name!r}, which has {rank} axes"
        for simple in dim.simple_shardings:
            if simple.num_shards < 1:
                yield f"{where} shards {value.name!r} into {simple.num_shards} parts"


def requested_stages(requested: RequestedSharding, roles: ValueRoles) -> dict[ir.Node, int]:
    """The stage of every bound node; one that has none in the annotations goes where what it reads comes from.

    Fusion may have replaced several nodes by one: its result has the name and so the stage of their last.
    """
    numbers = {stage: index for index, stage in enumerate(sorted(set(requested.stage_of.values())))}
    found: dict[ir.Node, int] = {}
    for node in roles.nodes:
        if node not in roles.bound:
            continue
        named = [requested.stage_of[str(v.name)] for v in node.outputs if v.name in requested.stage_of]
        if named:
            found[node] = numbers[named[0]]
        else:
            sources = [roles.producers.get(value) for value in node.inputs if value is not None]
            found[node] = max((found[source] for source in sources if source in found), default=0)
    return found


def compare_splits(requested: RequestedSharding, horizontal: HorizontalPlan) -> list[str]:
    """Where the splits that annotations ask for are not those of the plan, one sentence for all."""
    different = []
    for name, (axis, parts) in requested.splits.items():
        sharding = horizontal.shardings.get(name)
        if parts == 1 and sharding is None:
            continue
        if sharding is None:
            why = horizontal.reasons.get(name, "it is not a trainable weight")
            different.append(f"{name!r} (asked: axis {axis} in {parts}; plan: unsharded, since {why})")
        elif (sharding.axis, horizontal.size) != (axis, parts):
            different.append(
                f"{name!r} (asked: axis {axis} in {parts}; plan: axis {sharding.axis} in {horizontal.size})"
            )
    if not different:
        return []
    return [
        f"the model's annotations ({requested.configuration!r}) ask for other splits than the plan, which is followed: "
        f"{shortened(different, _MOST_NAMED)}."
    ]
