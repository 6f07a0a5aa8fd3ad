"""What `onward plan` does: who does what in a run, what it takes, and whether it fits, found on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from onward.commands.layout_search import DEFAULT_OPTIONS, LayoutOptions, plan_layout
from onward.commands.pictures import checked_image, write_image
from onward.commands.roofline import plan_roofline
from onward.data.shard import FeatureSpec
from onward.engine.building.preparation import check_dimensions, plan_run, present_feature_specs, read_training_graph
from onward.engine.forecast.batch_size import find_by_forecast, outcome
from onward.engine.forecast.plan_forecast import forecast
from onward.engine.network.precision_choice import settled_precision
from onward.environment import Environment
from onward.errors import ParametersError
from onward.exclusive.lock import writing_to
from onward.graph.reading.model_file import read_model
from onward.graph.training_graph import TrainingGraph
from onward.graph.writing.model_saving import save_model
from onward.parameters import Parameters
from onward.plan.annotations import annotate
from onward.plan.pipeline.schedules import rank_of_stage
from onward.plan.report.drawing import picture
from onward.plan.report.text import recompute_note, render, zero_note
from onward.plan.topology import Topology
from onward.report.phases import Phases


def plan(
    file: str | Path,
    overrides: Mapping[str, str] | None = None,
    *,
    image: str | Path | None = None,
    memory_gb: float | None = None,
    write: str | Path | None = None,
    layout: LayoutOptions = DEFAULT_OPTIONS,
    roofline: bool = False,
    phases: Phases | None = None,
) -> str:
    """Plans a run for the world size that its `distributed` asks for; returns the text.

    Args:
        file: RUN.yaml.
        overrides: fields of it.
        image: where a picture goes, .svg or .png.
        memory_gb: of one rank, in 10^9 bytes; else `machine.memory_gb`, or that of this machine's first GPU.
        write: where the model goes with the plan in ONNX's multi-device annotations.
        layout: for how many ranks of what the best layout is searched, instead of planning the one that is asked for.
        roofline: what limits one device, instead of a plan; of `layout`, `gpu` counts alone.
        phases: announce what takes long.

    Raises:
        UserError: of any kind, each with what to do.
    """
    target = None if image is None else checked_image(Path(image))
    if memory_gb is not None and memory_gb <= 0:
        raise ParametersError(f"--memory-gb is {memory_gb:g}; pass the memory of one rank in GB, above 0.")
    parameters = Parameters.load(file, overrides)
    sizes = parameters.distributed
    phases = phases or Phases.silent()
    if roofline:
        if image is not None or write is not None or layout.ranks is not None:
            raise ParametersError("--roofline is of one device; leave --ranks, --image and --write out.")
        if layout.explain or layout.nodes_of is not None or memory_gb is not None:
            raise ParametersError("--roofline does not use --explain, --nodes-of and --memory-gb; leave them out.")
        return plan_roofline(parameters, layout.gpu, phases)
    if layout.ranks is not None or sizes.layout == "auto":
        if image is not None or write is not None:
            raise ParametersError("--image and --write show one layout; set the one that --ranks prints, then plan it.")
        return plan_layout(parameters, layout, memory_gb, phases)
    if layout != DEFAULT_OPTIONS:
        raise ParametersError(
            "--gpu, --nodes-of and --explain are about the search of a layout; pass --ranks, too (or, with --gpu, "
            "--roofline)."
        )
    parameters, precision_note = settled_precision(parameters, Environment.of(parameters.machine).device_kind)
    topology = Topology.of_sizes(sizes)
    phases.begin(f"reading {parameters.paths.model_path or 'the model'}")
    graph = read_training_graph(parameters)
    check_dimensions(parameters.training.mapped_dimensions, graph)
    specs = present_feature_specs(parameters)
    limit = memory_gb * 1e9 if memory_gb is not None else _memory_of_rank(parameters)
    found_batch = []
    phases.begin(f"planning the run for {topology.world_size} ranks")
    if parameters.training.find_batch_size:
        parameters, said = _with_found_batch(parameters, topology, graph, specs, limit)
        found_batch.append(said)
    decided = plan_run(parameters, topology, graph, specs)
    phases.begin("forecasting memory and communication")
    found = forecast(parameters, graph, decided, specs)
    told = (precision_note, *found_batch, *decided.notes, recompute_note(parameters, found), zero_note(decided, found))
    notes = [one for one in told if one is not None]
    text = render(parameters, graph, decided, found, limit, notes)
    phases.begin("writing" if image or write else None)
    if target is not None:
        shapes, height = picture(text.splitlines()[0], decided, found, limit)
        write_image(target, shapes, height)
        text += f"\nwrote {target}\n"
    if write is not None:
        text += f"\n{_write_annotated(parameters, topology, specs, Path(write))}\n"
    return text


def _write_annotated(parameters: Parameters, topology: Topology, specs: Mapping[str, FeatureSpec], target: Path) -> str:
    """The user's own model with the plan; returns what to report."""
    source = parameters.paths.model_path
    if source is None or parameters.distributed.pipeline_stage_paths:
        raise ParametersError("--write annotates the model of paths.model_path; pipeline_stage_paths name several.")
    if target.resolve() == source.resolve():
        raise ParametersError(f"--write {str(target)!r} is the model itself; name another file.")
    # Of the nodes that the file has: what fusion makes of them has other names.
    as_written = dataclasses.replace(parameters, speed=dataclasses.replace(parameters.speed, fuse=False))
    decided = plan_run(as_written, topology, read_training_graph(as_written, source), specs)
    model = read_model(source, parameters.limits)
    more = {
        "data_parallel_size": topology.reader_count,
        "horizontal_parallel_size": topology.horizontal_size,
        "pipeline_parallel_size": topology.pipeline_size,
        **({"context_parallel_size": topology.context_size} if topology.context_size > 1 else {}),
        "zero_stage": decided.zero_stage,
        "pipeline_schedule": decided.schedule if decided.stage_count > 1 else None,
        "stages": decided.stage_count,
        "micro_batches": decided.micro_batches,
    }
    ranks = {
        stage: rank_of_stage(decided.schedule, topology.pipeline_size, stage) if decided.stage_count > 1 else 0
        for stage in range(decided.stage_count)
    }
    count = annotate(model, topology, decided.horizontal, decided.stage_of, ranks, more)
    with writing_to(files=[target]):
        save_model(model, target)
    return f"wrote {target}: {count} of {len(list(model.graph))} nodes annotated"


def _memory_of_rank(parameters: Parameters) -> float | None:
    if parameters.machine.memory_gb is not None:
        return parameters.machine.memory_gb * 1e9
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory)


def _with_found_batch(
    parameters: Parameters,
    topology: Topology,
    graph: TrainingGraph,
    specs: Mapping[str, FeatureSpec],
    limit: float | None,
) -> tuple[Parameters, str]:
    """The run with the micro-batch that a forecast finds, and what to report."""
    if limit is None:
        raise ParametersError(
            "training.find_batch_size: the memory of a rank is not known here. Pass --memory-gb, or set "
            "machine.memory_gb; `onward train` uses nine tenths of the free memory."
        )
    chosen, _ = find_by_forecast(parameters, topology, graph, specs, limit)
    return (
        chosen,
        f"training.find_batch_size: {outcome(parameters, chosen)}; `onward train` runs trials and may differ.",
    )
