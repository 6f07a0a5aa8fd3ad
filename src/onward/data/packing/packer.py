"""Any source -> a directory of shards that appears complete or not at all, with a manifest next to them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from onward.data.manifest import MANIFEST_NAME, Manifest, ShardEntry
from onward.data.packing.arrays import open_arrays
from onward.data.packing.audio import open_audio
from onward.data.packing.chat.sequences import open_conversations
from onward.data.packing.images import open_images
from onward.data.packing.options import (
    KINDS,
    ArrayOptions,
    AudioOptions,
    ConversationOptions,
    ImageOptions,
    PackOptions,
    SourceOptions,
    TableOptions,
    kind_of,
)
from onward.data.packing.source import Advance, Sample, Source, find_source_files, make_split_chooser
from onward.data.packing.splits import find_splits
from onward.data.packing.staging import publish, shards_of, staging_folder
from onward.data.packing.tables import open_table
from onward.data.packing.text import open_text
from onward.data.packing.transforms import make_transforms
from onward.data.shard import FeatureSpec
from onward.data.shard_writer import ShardWriter
from onward.errors import DataError, ParametersError
from onward.remote.files import shown


@dataclass(frozen=True)
class PackSummary:
    """What was packed.

    Attributes:
        dest: the directory.
        kind: of source.
        folders: directory of shards -> its manifest; one of them, or `train` and `test`.
        seconds: how long it took.
    """

    dest: Path
    kind: str
    folders: Mapping[Path, Manifest]
    seconds: float

    @property
    def sample_count(self) -> int:
        """Samples of all folders."""
        return sum(manifest.sample_count for manifest in self.folders.values())

    def describe(self) -> str:
        """A few lines for the user."""
        lines = []
        for folder, manifest in self.folders.items():
            size = sum(shard.bytes for shard in manifest.shards)
            shards = f"{len(manifest.shards)} shard{'' if len(manifest.shards) == 1 else 's'}"
            lines.append(f"{shown(folder)}: {manifest.sample_count:,} samples in {shards}, {_size(size)}")
        manifest = next(iter(self.folders.values()))
        lines += [f"  {name}: {spec['dtype']} {list(spec['shape'])}" for name, spec in manifest.features.items()]
        lines += [f"  {key.replace('_', ' ')}: {_shorten(value)}" for key, value in manifest.details.items()]
        return "\n".join(lines)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.1f} kB"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def pack(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    options: PackOptions | None = None,
    on_phase: Callable[[str | None], None] = lambda name: None,
) -> PackSummary:
    """Packs a file or folder into shards, sample by sample, in an order that depends on source and options alone.

    Args:
        source: a file, or a folder that is walked in the order of names.
        dest: directory for the shards; made if absent. With a test fraction it gets the folders `train` and `test`.
        options: absent: the kind is found out from suffixes, with that kind's defaults.
        on_phase: gets what is done from now on; None: a progress bar shows it.

    Raises:
        DataError: the source is missing, broken or gives no samples, or `dest` already holds shards.
        ParametersError: an option that makes no sense here.
        UserError: a package that this kind needs is not installed.
        StorageError: the disk refused the shards. After any error or interrupt `dest` is as it was before.
    """
    start, dest = time.monotonic(), Path(dest)
    place, options = _with_test_source(Path(source), options or PackOptions())
    asked = kind_of(options.source) if options.source is not None else None
    found = find_source_files(place, asked, options.pattern, options.exclude)
    kind = found.kind
    source_options = options.source if options.source is not None else KINDS[kind]()
    _check_dest(dest, options.overwrite)
    on_phase(f"reading {shown(place)}")
    opened = _open(place, kind, found.paths, source_options, options)
    if ignored := found.describe_ignored():
        opened.details["ignored_files"] = ignored
    with staging_folder(dest) as staging:
        _check_dest(dest, options.overwrite)  # again: until it was locked, another process could pack into it
        sequences = {split: _ShardSequence(staging / split, options.samples_per_file) for split in options.splits}
        on_phase(None if options.progress and sys.stderr.isatty() else f"packing {opened.total:,.0f} {opened.unit}")
        _write_all(opened, sequences, options)
        on_phase(f"writing {shown(dest)}")
        manifests = {}
        if not options.test_fraction:
            opened.details.pop("split_by", None)
        for split, sequence in sequences.items():
            manifest = Manifest(
                source=str(source),
                kind=kind,
                options=options.to_dict(source_options),
                features=sequence.describe_features(),
                sample_count=sum(entry.samples for entry in sequence.entries),
                shards=tuple(sequence.entries),
                details=opened.details,
            )
            _check_not_empty(manifest, split, options, str(source), opened)
            for name, text in {**opened.files, MANIFEST_NAME: manifest.to_json()}.items():
                (staging / split / name).write_text(text, encoding="utf-8")
            manifests[dest / split] = manifest
        publish(staging, dest)
    return PackSummary(dest, kind, manifests, time.monotonic() - start)


def _with_test_source(source: Path, options: PackOptions) -> tuple[Path, PackOptions]:
    """The training data and the options with the test data, where a folder is divided into both already."""
    splits = None if options.test_source or options.pattern else find_splits(source)
    if splits is None:
        return source, options
    if options.test_fraction:
        raise ParametersError(
            f"test_fraction is {options.test_fraction:g}, but {str(source)!r} has test data, {splits.test.name!r}. "
            f"Leave it out, or pack {str(splits.train)!r} alone."
        )
    return splits.train, replace(options, test_source=str(splits.test))


def _open(source: Path, kind: str, paths: list[Path], options: SourceOptions, packing: PackOptions) -> Source:
    test, test_paths = None, list[Path]()
    if packing.test_source:
        test = Path(packing.test_source)
        test_paths = find_source_files(test, kind, packing.pattern, packing.exclude).paths
    if isinstance(options, ArrayOptions):
        return open_arrays(paths, options, test_paths, packing.limits)
    if isinstance(options, TableOptions):
        return open_table(paths, options, test_paths)
    if isinstance(options, ImageOptions):
        return open_images(source, paths, options, packing.seed, test, test_paths)
    if isinstance(options, AudioOptions):
        return open_audio(source, paths, options, packing.seed, test, test_paths, packing.limits)
    if isinstance(options, ConversationOptions):
        return open_conversations(paths, options, test_paths, packing.limits)
    return open_text(paths, options, packing.seed, test_paths)


def _check_not_empty(manifest: Manifest, split: str, options: PackOptions, source: str, opened: Source) -> None:
    if manifest.sample_count:
        return
    if options.test_source:
        name = options.test_source if split == "test" else source
        raise DataError(f"{name!r} gave no samples; nothing was packed. Add samples, or pack the other split alone.")
    if split:
        raise DataError(
            f"no sample of {source!r} fell into {split!r} with test_fraction {options.test_fraction}; the source is "
            "too small for it: choose another fraction, or pack train and test data from two sources."
        )
    why = f"none of its {opened.total:,} {opened.unit} gave one" if opened.total else f"it has no {opened.unit}"
    raise DataError(f"{source!r} gave no samples; nothing was packed: {why}. Pass another source.")


# ------------------------------------------------------------------------------------------------------------ samples


class _ShardSequence:
    """Shards of equal sample counts, one after the other, in one folder."""

    def __init__(self, folder: Path, samples_per_file: int) -> None:
        self.entries: list[ShardEntry] = []
        self._folder = folder
        self._samples_per_file = samples_per_file
        self._specs: dict[str, FeatureSpec] = {}
        self._writer: ShardWriter | None = None
        folder.mkdir(exist_ok=True)

    def write(self, sample: Sample) -> None:
        specs = {name: FeatureSpec(array.shape, array.dtype) for name, array in sample.items()}
        if specs != self._specs:
            self._accept(specs)
        if self._writer is None:
            self._writer = ShardWriter(self._folder / f"shard-{len(self.entries):06d}.pb")
        self._writer.write(sample)
        if self._writer.sample_count == self._samples_per_file:
            self.end_shard()

    def end_shard(self) -> None:
        if self._writer is not None:
            self._writer.publish()
            writer = self._writer
            self.entries.append(ShardEntry(writer.path.name, writer.sample_count, writer.byte_count, writer.checksum))
            self._writer = None

    def discard(self) -> None:
        """Removes the shard begun, if any."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def describe_features(self) -> dict[str, dict[str, Any]]:
        return {name: {"dtype": str(spec.dtype), "shape": list(spec.shape)} for name, spec in self._specs.items()}

    def _accept(self, specs: dict[str, FeatureSpec]) -> None:
        if self._specs:
            number = sum(entry.samples for entry in self.entries) + (self._writer.sample_count if self._writer else 0)
            names = sorted(name for name in {*specs, *self._specs} if specs.get(name) != self._specs.get(name))
            differences = "; ".join(
                f"{name!r} is {specs.get(name, 'missing')}, was {self._specs.get(name, 'missing')}" for name in names
            )
            raise DataError(
                f"sample {number} differs from those before it: {differences}. All samples need the same features, "
                "shapes and dtypes; for a dtype, choose one with --cast NAME=DTYPE."
            )
        self._specs = specs


def _write_all(source: Source, sequences: Mapping[str, _ShardSequence], options: PackOptions) -> None:
    transform, cast = make_transforms(options.transform), _make_cast(options)
    only = next(iter(sequences.values())) if len(sequences) == 1 else None
    with _progress(source, options.progress) as advance, ExitStack() as stack:
        for sequence in sequences.values():
            stack.callback(sequence.discard)
        samples = source.read(make_split_chooser(options.test_fraction, options.seed), advance)
        if options.shuffle_buffer > 1:
            samples = _mix(samples, options.shuffle_buffer, options.seed)
        for split, sample in samples:
            (only or sequences[split]).write(cast(transform(sample)))
        for sequence in sequences.values():
            sequence.end_shard()
    _check_same_features(sequences, options)


def _check_same_features(sequences: Mapping[str, _ShardSequence], options: PackOptions) -> None:
    """Test samples have the features of training samples."""
    described = [sequence.describe_features() for sequence in sequences.values() if sequence.entries]
    if len(described) == 2 and described[0] != described[1]:
        train, test = described
        names = sorted(name for name in {*train, *test} if train.get(name) != test.get(name))
        said = "; ".join(f"{name!r} is {_said(test.get(name))}, in training {_said(train.get(name))}" for name in names)
        raise DataError(
            f"the test samples ({options.test_source}) differ from the training samples: {said}. Both need the same "
            "features, shapes and dtypes; for a dtype, choose one with --cast NAME=DTYPE."
        )


def _said(spec: Mapping[str, Any] | None) -> str:
    return "missing" if spec is None else f"{spec['dtype']} {spec['shape']}"


def _mix(samples: Iterator[tuple[str, Sample]], size: int, seed: int) -> Iterator[tuple[str, Sample]]:
    """Each sample leaves the buffer when a later one, at random, takes its place."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 1])))
    buffer: list[tuple[str, Sample]] = []
    for sample in samples:
        if len(buffer) < size:
            buffer.append(sample)
            continue
        place = int(random.integers(size))
        yield buffer[place]
        buffer[place] = sample
    for place in random.permutation(len(buffer)).tolist():
        yield buffer[place]


def _make_cast(options: PackOptions) -> Callable[[Sample], Sample]:
    dtypes = {name: _dtype(name, text) for name, text in options.cast}

    def cast(sample: Sample) -> Sample:
        for name, dtype in dtypes.items():
            if name not in sample:
                raise ParametersError(f"--cast names {name!r}; the samples hold {', '.join(map(repr, sample))}.")
            sample[name] = sample[name].astype(dtype)
        return sample

    return cast if dtypes else lambda sample: sample


def _dtype(name: str, text: str) -> np.dtype:
    if text == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    try:
        dtype = np.dtype(text)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biufc":
        raise ParametersError(f"--cast {name}={text}: expected a dtype of numbers as int64, float32, bfloat16.")
    return dtype


@contextmanager
def _progress(source: Source, shown: bool) -> Iterator[Advance]:
    columns = (
        TextColumn("packing"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("packing", total=source.total, unit=source.unit)
        yield lambda amount: bar.advance(task, amount)


# ---------------------------------------------------------------------------------------------------------- directory


def _check_dest(dest: Path, overwrite: bool) -> None:
    if dest.exists() and not dest.is_dir():
        raise DataError(f"destination {str(dest)!r} is a file; give a directory.")
    if not dest.is_dir():
        return
    shards = shards_of(dest)
    if shards and not overwrite:
        raise DataError(
            f"destination {str(dest)!r} already holds {len(shards)} files of packed data, the first "
            f"{str(shards[0].relative_to(dest))!r}: give another directory, or replace them with --overwrite."
        )
