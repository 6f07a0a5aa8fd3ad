"""`onward plan --ranks`, and `distributed.layout: auto` of `onward train`: the cluster, the network, the layout."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onward.checkpoint.reading import find_latest, read_record
from onward.checkpoint.run_files import localize
from onward.data.manifest import read_manifest
from onward.data.shard_files import list_shards
from onward.engine.building.preparation import present_feature_specs
from onward.engine.forecast.batch_size import peak_bytes
from onward.engine.forecast.hardware_here import cluster_here
from onward.engine.forecast.network_work import TrainingGraphs, count_network, search_settings, with_context
from onward.engine.network.precision_choice import settled_precision
from onward.errors import ParametersError
from onward.parallel.rendezvous.launcher import Launch
from onward.parameters import Parameters
from onward.parameters.yaml_file import to_plain
from onward.plan.batch_size import samples_of_update, with_micro_batches
from onward.plan.report.layouts import render_choice, summary
from onward.plan.search.choosing import LayoutChoice, LayoutSearch, even_updates
from onward.plan.search.hardware import Cluster, known_cluster
from onward.plan.search.layout import Layout, Settings
from onward.plan.search.network import NetworkWork
from onward.plan.search.pricing import Estimate, check_memory, limit_words
from onward.plan.topology import Topology
from onward.remote.files import is_folder, shown
from onward.report.phases import Phases


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Options of `onward plan` about a layout.

    Attributes:
        ranks: processes; None: `distributed.ranks`.
        gpu: a listed one; None: this machine's device.
        nodes_of: ranks of a node; None: as the GPU's usual nodes have, or all on this machine.
        explain: print how the forecast is made up.
    """

    ranks: int | None = None
    gpu: str | None = None
    nodes_of: int | None = None
    explain: bool = False


DEFAULT_OPTIONS = LayoutOptions()


def plan_layout(parameters: Parameters, options: LayoutOptions, memory_gb: float | None, phases: Phases) -> str:
    """The best layout of a run as text.

    Raises:
        UserError: of any kind, each with what to do.
    """
    ranks = parameters.distributed.ranks if options.ranks is None else options.ranks
    if ranks is None:
        raise ParametersError("distributed.layout is auto; pass --ranks, or set distributed.ranks.")
    if ranks < 1:
        raise ParametersError(f"--ranks is {ranks}; pass the number of processes, at least 1.")
    if options.nodes_of is not None and options.nodes_of < 1:
        raise ParametersError(f"--nodes-of is {options.nodes_of}; pass the ranks of a node, at least 1.")
    phases.begin("measuring or looking up the hardware")
    if options.gpu is not None:
        cluster = known_cluster(options.gpu, options.nodes_of)
    else:
        cluster = cluster_here(options.nodes_of or ranks, parameters.machine.execution_provider)
    stated = parameters.machine.memory_gb if memory_gb is None else memory_gb
    device = cluster.device
    parameters, chosen = settled_precision(parameters, _kind(cluster), None, device.computes_in_bf16)
    choice, works, settings, files = _search(parameters, cluster, ranks, stated, phases)
    float8 = device.check_types(settings.precision, parameters.mixed_precision.float8)
    notes = [f"- {note}" for note in (chosen, float8) if note is not None]
    return render_choice(choice, works[0], cluster, settings, options.explain, files, notes)


def _kind(cluster: Cluster) -> str:
    return "cuda" if cluster.device.is_asynchronous else "cpu"


def _search(
    parameters: Parameters, cluster: Cluster, ranks: int, memory_gb: float | None, phases: Phases
) -> tuple[LayoutChoice, tuple[NetworkWork, ...], Settings, str]:
    """What was chosen, the network as counted, what was searched for, and a note on the files of the data."""
    is_auto = parameters.distributed.layout == "auto"  # its data are those that it trains with, not a sample of them
    parameters, _ = settled_precision(_manual(parameters), _kind(cluster), None, cluster.device.computes_in_bf16)
    phases.begin(f"reading {parameters.paths.model_path or 'the model'}")
    specs = present_feature_specs(parameters)
    rounds = tuple(TrainingGraphs(one) for one in (parameters, *parameters.next_rounds))
    works = count_network(parameters, specs, ranks, rounds[0])
    device = cluster.device
    own = device.memory_bytes if device.is_asynchronous else device.memory_bytes / min(ranks, cluster.ranks_of_node)
    memory = own if memory_gb is None else memory_gb * 1e9
    settings = search_settings(parameters, rounds[0].of(False), ranks, memory, torch.__version__)
    device.check_types(settings.precision, parameters.mixed_precision.float8)
    check_memory(cluster, settings)
    folder, files = _fewest_files(parameters)
    if is_auto and folder is not None:
        settings = dataclasses.replace(settings, most_data=files)
    phases.begin(f"searching layouts of {ranks} ranks")
    try:
        choice, reason = _planned_choice(parameters, rounds, works, cluster, settings, phases), None
    except ParametersError as error:
        choice, reason = None, error
    if ranks > 1 and (choice is None or (not settings.kept and choice.chosen.layout.kept == 0)):
        phases.begin("following sequences through the model")
        with contextlib.suppress(ParametersError):  # it has none that ranks could share
            works = with_context(parameters, specs, ranks, works, rounds[0])
            choice = _planned_choice(parameters, rounds, works, cluster, settings, phases)
    if choice is None:
        assert reason is not None
        raise reason
    return choice, works, settings, _files_note(folder, files, settings, choice.chosen.layout)


def _fewest_files(parameters: Parameters) -> tuple[Path | None, int]:
    """The folder of the run, of those that data-parallel ranks share out, with the fewest files, and how many."""
    folders = set[Path]()
    for one in (parameters, *parameters.next_rounds):
        tested = one.paths.test_data_dir if one.data.test_data == "partitioned" else None
        folders |= {path for path in (one.paths.train_data_dir, tested) if path is not None and is_folder(path)}
    counts = {path: len(list_shards(path)) for path in sorted(folders)}
    fewest = min(counts, key=lambda path: counts[path], default=None)
    return fewest, 0 if fewest is None else counts[fewest]


def _files_note(folder: Path | None, files: int, settings: Settings, chosen: Layout) -> str:
    """What to do about data of fewer files than the layout, or a faster one, needs; empty: nothing."""
    wanted = chosen.data if settings.most_data is None else math.gcd(settings.samples, settings.ranks)
    if folder is None or files >= wanted:
        return ""
    manifest = read_manifest(folder)
    few = f" {manifest.sample_count // wanted}" if manifest and manifest.sample_count >= wanted else ""
    again = f"pack the data again with onward pack --samples-per-file{few} --overwrite"
    held = f"data directory {shown(folder)!r} holds {files} .pb file{'s' if files > 1 else ''}, and every"
    if settings.most_data is None:
        return (
            f"The chosen layout has {wanted} data-parallel ranks, but {held} one reads its own. Before training, "
            f"{again}."
        )
    return (
        f"The {held} data-parallel rank reads its own: layouts of at most {files} data-parallel "
        f"rank{'s' if files > 1 else ''} were searched. For those of up to {wanted}, {again}."
    )


def _manual(parameters: Parameters) -> Parameters:
    """A run, and each of its later rounds, whose sizes are those that are written."""
    manual = dataclasses.replace(parameters.distributed, layout="manual", ranks=None)
    later = tuple(_manual(one) for one in parameters.next_rounds)
    return dataclasses.replace(parameters, distributed=manual, next_rounds=later)


def _planned_choice(
    parameters: Parameters,
    rounds: Sequence[TrainingGraphs],
    works: Sequence[NetworkWork],
    cluster: Cluster,
    settings: Settings,
    phases: Phases,
) -> LayoutChoice:
    """The fastest of the layouts whose plan keeps the limit of memory, in every round.

    Raises:
        ParametersError: there is none.
    """
    factors: dict[tuple[Any, ...], float] = {}
    refusal: ParametersError | None = None
    search = LayoutSearch(works, cluster, settings)
    while True:
        known = [one for one in factors.values() if one < math.inf]
        general = max(known) if len(known) >= ALIKE_AFTER else 1.0

        def more_memory(one: Layout, general: float = general) -> float:
            return factors.get(one.form, general)

        try:
            choice = search.choose(more_memory)
        except ParametersError as error:
            raise error if refusal is None else refusal from None
        one, limit = choice.chosen, choice.limit_bytes
        phases.begin(f"planning {one.layout}")
        try:
            planned = _planned_bytes(parameters, rounds, one)
        except ParametersError as error:  # its stages cannot be cut, or torch refuses its schedule
            factors[one.layout.form], refusal = math.inf, error
            continue
        if planned <= limit:
            even = even_updates(works, cluster, settings, one, more_memory)
            return dataclasses.replace(choice, planned_bytes=planned, even=even)
        factors[one.layout.form] = planned / one.total_bytes * MORE
        refusal = ParametersError(
            f"no layout of {settings.ranks} ranks fits {limit / 1e9:.3g} GB for tensors "
            f"({limit_words(cluster, settings)}): by its plan, the last that could, {one.layout}, needs "
            f"{planned / 1e9:.3g} GB. Use more ranks or GPUs with more memory, or an update of fewer samples."
        )


ALIKE_AFTER = 3
"""When the plans of so many layouts need more than was counted, others are taken to need as much more."""
MORE = 1.001
"""A plan that is a byte too large may not be chosen again."""


def _planned_bytes(parameters: Parameters, rounds: Sequence[TrainingGraphs], chosen: Estimate) -> float:
    """At the peak of the rank that needs most, in the round that does."""
    layout, found = chosen.layout, 0.0
    in_layout = _with_layout(parameters, layout.sections())
    topology = Topology.of_sizes(in_layout.distributed)
    for one, graphs in zip((in_layout, *in_layout.next_rounds), rounds, strict=True):
        graph, specs = graphs.of(layout.horizontal > 1), present_feature_specs(one)
        found = max(found, peak_bytes(one, graph, specs, topology, [chosen.fullest]))
    return found


def chosen_overrides(
    parameters: Parameters, overrides: Mapping[str, str], launch: Launch, phases: Phases
) -> tuple[dict[str, str], str]:
    """The overrides that make a run with `distributed.layout: auto` one with the layout chosen for it, and a note.

    A run that resumes with as many processes keeps the layout of its checkpoint.

    Args:
        parameters: of the run.
        overrides: of the command.
        launch: who started this process.
        phases: announce what takes long.

    Raises:
        UserError: there is no such layout.
    """
    ranks, of_node = _ranks_of(parameters, launch)
    files, fields, note = "", _fields_of_checkpoint(parameters, ranks), "as in the checkpoint that the run resumes from"
    if fields is None:
        is_alone = launch.launcher == "none"  # what one process measures another would not find
        cluster = cluster_here(of_node, parameters.machine.execution_provider, measures=is_alone)
        choice, _, _, files = _search(parameters, cluster, ranks, parameters.machine.memory_gb, phases)
        fields, note = choice.chosen.layout.sections(), summary(choice)
    return {**overrides, **_differences(parameters, fields)}, f"distributed.layout: {note}. {files}".rstrip()


def _ranks_of(parameters: Parameters, launch: Launch) -> tuple[int, int]:
    """Processes of the run and of this machine."""
    asked = parameters.distributed.ranks
    if launch.launcher != "none":
        if asked not in (None, launch.world_size):
            raise ParametersError(
                f"distributed.ranks is {asked}, but {launch.launcher} started {launch.world_size} processes. Start "
                f"{asked}, or remove distributed.ranks."
            )
        return launch.world_size, launch.local_size
    found = asked or torch.cuda.device_count()
    if not found:
        raise ParametersError(
            "distributed.layout is auto, but nothing says how many processes there are: no launcher started this one, "
            "and there is no GPU. Set distributed.ranks, or start with torchrun, mpirun or srun."
        )
    return found, found


def _fields_of_checkpoint(parameters: Parameters, ranks: int) -> dict[str, dict[str, Any]] | None:
    """Layout fields of the newest checkpoint, if it was saved by as many processes for updates of as many samples."""
    folder = localize(parameters)[0].checkpoint.checkpoints_dir
    newest = None if folder is None else find_latest(folder)
    if newest is None:
        return None
    saved = read_record(newest).get("parameters", {})
    distributed, training = saved.get("distributed", {}), saved.get("training", {})
    names = [f"{name}_parallel_size" for name in ("data", "horizontal", "pipeline", "context")]
    sizes = [distributed.get(name, 1) for name in names]
    samples = sizes[0] * training.get("batch_size", 0) * training.get("gradient_accumulation_steps", 1)
    before = parameters.training.batch_size * parameters.training.gradient_accumulation_steps
    if math.prod(sizes) != ranks or samples != before:
        return None
    recompute = {name: saved.get("recompute", {}).get(name) for name in ("segments", "memory_budget")}
    names += ["zero_stage", "zero_group_size", "expert_parallel_size", "pipeline_schedule", "stages_per_rank"]
    names += ["sequence_parallel"]
    return {
        "distributed": {name: distributed[name] for name in names if distributed.get(name) is not None},
        "training": {name: training[name] for name in ("batch_size", "gradient_accumulation_steps")},
        "recompute": {name: value for name, value in recompute.items() if value},
    }


def _with_layout(parameters: Parameters, fields: Mapping[str, Mapping[str, Any]]) -> Parameters:
    """A run in a layout; recompute that the user asked for stays, and later rounds have the mesh of the first."""
    training, recompute = fields["training"], parameters.recompute
    is_asked = recompute.segments or recompute.attention or recompute.memory_budget is not None
    distributed = dataclasses.replace(_manual(parameters).distributed, **fields["distributed"])
    size, count = training["batch_size"], training["gradient_accumulation_steps"]

    def changed(one: Parameters, size: int, count: int) -> Parameters:
        found = dataclasses.replace(
            one,
            distributed=distributed,
            training=dataclasses.replace(one.training, find_batch_size=False),  # the search has found it
            recompute=one.recompute if is_asked else dataclasses.replace(recompute, **fields.get("recompute", {})),
            next_rounds=(),
        )
        return with_micro_batches(found, size, count)

    later = []
    for one in parameters.next_rounds:
        samples = samples_of_update(one) // distributed.data_parallel_size
        most = max(one for one in range(1, size + 1) if samples % one == 0)
        in_round = samples // count if distributed.pipeline_parallel_size > 1 else most
        later.append(changed(one, in_round, samples // in_round))
    return dataclasses.replace(changed(parameters, size, count), next_rounds=tuple(later))


def _differences(parameters: Parameters, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """`section.field` -> value for every field that the layout changes, those that are counted in steps included.

    A later round has what the first has, unless it says otherwise: `next_rounds.0.section.field`.
    """
    before, after = (one.to_mapping() for one in (parameters, _with_layout(parameters, fields)))
    found = _changed("", [before], after)
    for number, (old, new) in enumerate(zip(before["next_rounds"], after["next_rounds"], strict=True)):
        found |= _changed(f"next_rounds.{number}.", [old, after], new)
    return found


def _changed(where: str, before: Sequence[Mapping[str, Any]], after: Mapping[str, Any]) -> dict[str, str]:
    """Fields that differ from any of the mappings before."""
    return {
        f"{where}{section}.{name}": _as_yaml(value)
        for section in ("distributed", "training", "recompute", "learning_rate", "profiler")
        for name, value in after[section].items()
        if any(value != one[section][name] for one in before)
    }


def _as_yaml(value: Any) -> str:
    plain = to_plain(value)
    return "null" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain)
