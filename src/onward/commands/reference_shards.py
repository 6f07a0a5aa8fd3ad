"""What `onward reference` does: the shards of a run again, with the log-probabilities of its reference as a feature."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from onward.data.loader import DataLoader
from onward.data.manifest import MANIFEST_NAME, Manifest, ShardEntry, read_manifest
from onward.data.packing.staging import publish, shards_of, staging_folder
from onward.data.shard import FeatureSpec
from onward.data.shard_files import list_shards
from onward.data.shard_format import read_samples
from onward.data.shard_writer import ShardWriter
from onward.engine.building.assembly import network_of
from onward.engine.building.preparation import feature_ranges, plan_run, read_training_graph
from onward.engine.network.forward import Forward
from onward.engine.network.precision import Precision
from onward.engine.network.precision_choice import settled_precision
from onward.environment import Environment
from onward.errors import DataError, ParametersError
from onward.graph.losses.writer import PREFIX
from onward.losses.dpo import REFERENCE
from onward.losses.registry import loss_named
from onward.parallel.launch.process import Mesh, in_world_of_one
from onward.parameters import Distributed, Parameters
from onward.plan.rank import plan_rank
from onward.remote.copies import local_folder
from onward.remote.files import shown, url_of
from onward.report.phases import Phases


def add_reference(
    file: str | Path, dest: str | Path, overrides: Mapping[str, str] | None = None, phases: Phases | None = None
) -> str:
    """Writes the training data of a run, and its test data, with what the reference gives to each answer.

    Args:
        file: RUN.yaml.
        dest: directory for the shards; with test data it gets the folders `train` and `test`.
        overrides: fields of RUN.yaml.
        phases: announce what takes long.

    Returns:
        Where they are, and what to set.

    Raises:
        UserError: of any kind, each with what to do; `dest` is as it was then.
    """
    phases, dest = phases or Phases.silent(), Path(dest)
    parameters = replace(Parameters.load(file, overrides), distributed=Distributed())
    folders = _folders(parameters, dest)
    environment = Environment.of(parameters.machine)
    environment.apply()
    mesh, forward = in_world_of_one(environment.device_kind), None
    parameters, _ = settled_precision(parameters, environment.device_kind)
    with staging_folder(dest) as staging:
        for name, folder in folders.items():
            names = parameters.data.input_name_map
            with DataLoader(names, folder, parameters.data.max_num_files_preload, 0, 1) as loader:
                forward = forward or _reference(parameters, loader.feature_specs(), mesh, phases)
                phases.begin(f"computing the reference of {shown(folder)}")
                _write(loader, folder, staging / name, forward, parameters.training.batch_size)
        publish(staging, dest)
    fields = {"": "train_data_dir", "train": "train_data_dir", "test": "test_data_dir"}
    lines = [f"paths.{fields[name]}: {shown(dest / name)}" for name in folders]
    return "\n".join(["wrote the shards. To train on them, set:", *lines, f"loss.{REFERENCE}: {REFERENCE}"])


def _folders(parameters: Parameters, dest: Path) -> dict[str, Path]:
    """Folders in `dest` -> of the shards that they are made from."""
    loss, paths = parameters.loss, parameters.paths
    has_reference = loss_named(loss.type).is_of_pairs
    if not has_reference or loss.reference_log_probabilities is not None:
        given = f"loss.{REFERENCE} is given" if has_reference else f"loss.type is {loss.type!r}"
        raise ParametersError(
            f"{given}, so that the run computes no reference. Set loss.type: dpo, without loss.{REFERENCE}."
        )
    if paths.train_data_dir is None:
        raise ParametersError("paths.train_data_dir is missing; name the folder of the training shards.")
    if url_of(dest) is not None:
        raise ParametersError(f"destination {shown(dest)!r} is a URL; name a local folder, and upload it.")
    if dest.exists() and shards_of(dest):
        raise DataError(f"destination {shown(dest)!r} already holds shards: pass another one, or delete them.")
    if paths.test_data_dir is None:
        return {"": local_folder(paths.train_data_dir)}
    return {"train": local_folder(paths.train_data_dir), "test": local_folder(paths.test_data_dir)}


def _reference(parameters: Parameters, specs: Mapping[str, FeatureSpec], mesh: Mesh, phases: Phases) -> Forward:
    """What computes the log-probabilities [pairs, 2] of the reference."""
    phases.begin(f"reading {parameters.paths.model_path or 'the model'}")
    graph = read_training_graph(parameters)
    plan = plan_run(parameters, mesh.topology, graph, specs)
    (own,) = plan_rank(graph, plan, mesh.place).own.values()
    network = network_of(own, parameters, mesh)
    network.eval()
    ranges = feature_ranges(parameters.loss, graph)
    precision = Precision.of(parameters.mixed_precision)
    forward = Forward(network, (f"{PREFIX}{REFERENCE}",), precision, feature_ranges=ranges)
    forward.reader.check_specs(specs)
    return forward


def _write(loader: DataLoader, folder: Path, target: Path, forward: Forward, batch_size: int) -> None:
    target.mkdir(exist_ok=True)
    values = _values(loader, forward, batch_size)
    entries, features = list[ShardEntry](), dict[str, dict[str, object]]()
    for path in list_shards(folder):
        with ShardWriter(target / path.name) as writer:
            for sample in read_samples(path):
                complete = {**sample, REFERENCE: next(values)}
                writer.write(complete)
            features = {name: {"dtype": str(one.dtype), "shape": list(one.shape)} for name, one in complete.items()}
        entries.append(ShardEntry(path.name, writer.sample_count, writer.byte_count, writer.checksum))
    count = sum(entry.samples for entry in entries)
    packed = read_manifest(folder) or Manifest(
        source=str(folder), kind="shards", options={}, features={}, sample_count=0, shards=()
    )
    manifest = replace(packed, features=features, sample_count=count, shards=tuple(entries))
    (target / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    for name in ("tokenizer.json", "chat_template.jinja"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


@torch.no_grad()
def _values(loader: DataLoader, forward: Forward, batch_size: int) -> Iterator[np.ndarray]:
    """Of each sample, in the order of the files."""
    for batch in loader.one_pass(batch_size):
        (found,) = forward(forward.reader.to_tensors(batch.features)).values()
        yield from found.float().cpu().numpy()
