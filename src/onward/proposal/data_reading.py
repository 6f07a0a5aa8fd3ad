"""What data hold, looked at without packing them: features with types, shapes and a sample of their values."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.manifest import MANIFEST_NAME, read_manifest
from onward.data.packing.arrays import open_arrays
from onward.data.packing.audio import most_frequent_rate, read_header, resampled_length
from onward.data.packing.documents import count_bytes
from onward.data.packing.images import OF_16_BITS
from onward.data.packing.options import ArrayOptions, TableOptions, TextOptions
from onward.data.packing.rows import is_missing, read_blocks
from onward.data.packing.source import Sample, find_source_files, require
from onward.data.packing.splits import EVALUATION_NAMES, TRAINING_NAMES, Splits, find_splits
from onward.data.shard_format import index_shard, read_samples
from onward.errors import DataError
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.proposal.data_facts import WORDS, DataFacts, Feature

_MOST_ROWS = 20_000
_MOST_SAMPLES = 512
_MOST_SAMPLED_BYTES = 64 << 20
_MOST_WORDS = 100_000
_LARGEST_SHARE_OF_WORDS = 0.1
"""In a column of numbers so many cells, at most, are taken for mistakes; else it is one of words."""


def read_data_facts(path: Path, limits: Limits = DEFAULT_LIMITS, kind: str | None = None) -> DataFacts:
    """Looks at data: a folder of shards, or whatever `onward pack` takes within the limits.

    Args:
        path: of a folder or a file.
        limits: of the machine.
        kind: of source, as `onward pack` calls it; None: found out from suffixes.

    Raises:
        DataError: there is nothing, nothing of a known kind, or it is broken.
    """
    packed = _packed_folders(path)
    if packed is not None:
        return _read_packed(path, *packed)
    splits = find_splits(path)
    if splits is not None:
        return _read_splits(splits, limits, kind)
    if path.is_dir() and path.name in (*TRAINING_NAMES, *EVALUATION_NAMES) and not any(path.iterdir()):
        raise DataError(f"data folder {str(path)!r} is empty; pass a folder or file with data.")
    return _read_source(path, kind, limits)


def _read_source(path: Path, kind: str | None, limits: Limits) -> DataFacts:
    found = find_source_files(path, kind)
    readers: dict[str, Callable[[Path, list[Path]], DataFacts]] = {
        "arrays": partial(_read_arrays, limits=limits),
        "table": _read_table,
        "images": _read_images,
        "audio": _read_audio,
        "text": _read_text,
    }
    return replace(readers[found.kind](path, found.paths), ignored=found.describe_ignored(), asked_kind=kind)


def _read_splits(splits: Splits, limits: Limits, kind: str | None) -> DataFacts:
    """Training and test data of a divided folder: the columns of words hold the words of both."""
    train = _read_source(splits.train, kind, limits)
    test = _read_source(splits.test, train.kind, limits)
    features = tuple(_with_words_of(feature, test.feature(feature.name)) for feature in train.features)
    return replace(train, features=features, test=test, unused=splits.unused)


def _with_words_of(feature: Feature, other: Feature | None) -> Feature:
    if feature.dtype != WORDS or other is None:
        return feature
    return replace(feature, words=tuple(sorted({*feature.words, *other.words})))


# ------------------------------------------------------------------------------------------------------------- packed


def _packed_folders(path: Path) -> tuple[Path, Path | None] | None:
    """The folders of training and test shards."""
    if not path.is_dir():
        return None
    if _holds_shards(path):
        return path, _test_shards(path.parent) if path.name in TRAINING_NAMES else None
    train = next((path / name for name in TRAINING_NAMES if _holds_shards(path / name)), None)
    return None if train is None else (train, _test_shards(path))


def _test_shards(folder: Path) -> Path | None:
    return next((folder / name for name in EVALUATION_NAMES if _holds_shards(folder / name)), None)


def _holds_shards(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST_NAME).is_file() or any(folder.glob("*.pb")))


def _read_packed(path: Path, train: Path, test: Path | None) -> DataFacts:
    manifest = read_manifest(train)
    shards = sorted(train.glob("*.pb"))
    if not shards:
        raise DataError(f"data folder {str(train)!r} holds no .pb files; write shards there with onward pack.")
    samples = [one for shard in _spread(shards, 4) for one in islice(read_samples(shard), _MOST_SAMPLES // 4)]
    details: Mapping[str, Any] = {} if manifest is None else manifest.details
    named = {name: tuple(words) for name, words in details.get("categories", {}).items()}
    return DataFacts(
        path=path,
        kind="packed",
        features=_features_of(samples),
        sample_count=_count(train),
        test_count=0 if test is None else _count(test),
        train_dir=train,
        test_dir=test,
        classes=tuple(details.get("classes", ())),
        are_pairs=manifest is not None and manifest.kind == "preference",
        categories=named,
    )


def _count(folder: Path) -> int:
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest.sample_count
    return sum(index_shard(shard).sample_count for shard in sorted(folder.glob("*.pb")))


def _spread(items: list[Path], count: int) -> list[Path]:
    """Some of them, evenly spaced, the first included."""
    return items[:: max(1, len(items) // count)][:count]


def _features_of(samples: list[Sample]) -> tuple[Feature, ...]:
    features = []
    for name, first in samples[0].items():
        values = np.stack([np.asarray(sample[name]) for sample in samples if sample[name].shape == first.shape])
        features.append(Feature(name=name, dtype=str(first.dtype), shape=tuple(first.shape), values=values))
    return tuple(features)


# ------------------------------------------------------------------------------------------------------------- arrays


def _read_arrays(path: Path, paths: list[Path], limits: Limits) -> DataFacts:
    source = open_arrays(paths, ArrayOptions(), limits=limits)
    features = []
    if paths[0].suffix.lower() == ".npy":
        for one in paths:
            array = np.load(one, mmap_mode="r", allow_pickle=False)
            features.append(_feature_of_array(one.stem, array))
    elif _unpacked_bytes(paths[0]) <= _MOST_SAMPLED_BYTES:
        with np.load(paths[0], allow_pickle=False) as archive:
            features = [_feature_of_array(name, archive[name]) for name in archive.files]
    else:
        rows = (sample for _, sample in source.read(lambda _: "train", lambda _: None))
        features = list(_features_of(_some(rows)))
    return DataFacts(path=path, kind="arrays", features=tuple(features), sample_count=source.total)


def _some(rows: Iterator[Sample]) -> list[Sample]:
    """The first rows, of bounded size together; one at least."""
    found: list[Sample] = []
    total = 0
    for row in islice(rows, _MOST_SAMPLES):
        total += sum(value.nbytes for value in row.values())
        if found and total > _MOST_SAMPLED_BYTES:
            break
        found.append(row)
    return found


def _unpacked_bytes(path: Path) -> int:
    """Of all arrays of an archive: a small file can hold large ones."""
    with zipfile.ZipFile(path) as archive:
        return sum(member.file_size for member in archive.infolist())


def _feature_of_array(name: str, array: np.ndarray) -> Feature:
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    most = max(_MOST_SAMPLES, min(len(array), (4 << 20) // row_bytes))
    values = np.array(array[:: max(1, -(-len(array) // most))])
    return Feature(name=name, dtype=str(array.dtype), shape=tuple(array.shape[1:]), values=values)


# -------------------------------------------------------------------------------------------------------------- table


def _read_table(path: Path, paths: list[Path]) -> DataFacts:
    options = TableOptions(delimiter=_find_delimiter(paths[0]))
    columns: dict[str, list[Any]] = {}
    places: list[str] = []
    rows = read_bytes = 0
    total_bytes = sum(one.stat().st_size for one in paths)
    is_counted = True
    for one in paths:
        for block in read_blocks(one, options):
            rows += block.count
            read_bytes += block.read_bytes
            if rows <= _MOST_ROWS + block.count:
                for name, values in block.columns.items():
                    columns.setdefault(name, [None] * len(places)).extend(values)
                places += [block.where(row) for row in range(block.count)]
                for values in columns.values():
                    values += [None] * (len(places) - len(values))
            if rows > _MOST_ROWS and total_bytes > _MOST_SAMPLED_BYTES:
                is_counted = False
                break
    if not columns:
        raise DataError(f"table {str(path)!r} has no rows.")
    count = rows if is_counted else int(rows * total_bytes / max(1, read_bytes))
    _refuse_conversations(path, columns)
    if paths[0].suffix.lower() in (".csv", ".tsv"):
        _refuse_numbers_as_names(path, list(columns))
    features = tuple(_feature_of_column(name, values, places) for name, values in columns.items())
    lacking = [[is_missing(v, one.dtype != WORDS) for v in columns[one.name]] for one in features if one.missing]
    return DataFacts(
        path=path,
        kind="table",
        features=features,
        sample_count=count,
        is_counted=is_counted,
        missing_rows=sum(map(any, zip(*lacking, strict=True))),
        delimiter=options.delimiter,
    )


def _refuse_conversations(path: Path, columns: Mapping[str, list[Any]]) -> None:
    """Turns of conversations are no columns that a model reads."""
    kind = "preference" if {"chosen", "rejected"} <= columns.keys() else "chat"
    for name, values in columns.items():
        first = next((value for value in values if value is not None), None)
        has_turns = isinstance(first, list) and first and isinstance(first[0], dict)
        if has_turns or (kind == "preference" and name == "chosen"):
            raise DataError(
                f"{str(path)!r} holds conversations (column {name!r}), which the model's chat template turns into "
                f"tokens. Pack them first, onward pack {path} DEST --kind {kind} --tokenizer FOLDER, and pass DEST "
                "instead."
            )


def _find_delimiter(path: Path) -> str:
    """The character that is between the columns of a CSV file: the one that is in its first line most often."""
    if path.suffix.lower() != ".csv":
        return ","
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        line = file.readline()
    return max(",;\t|", key=lambda delimiter: (line.count(delimiter), delimiter == ","))


def _refuse_numbers_as_names(path: Path, names: list[str]) -> None:
    """A first line of numbers is a sample; whole numbers may be names, as pandas writes them."""
    numbers = [name for name in names if _is_number(name) and not name.strip().lstrip("+-").isdigit()]
    if numbers:
        raise DataError(
            f"the first line of {str(path)!r} should name the columns, but it holds numbers: "
            f"{', '.join(map(repr, numbers[:4]))}. Insert a line with the names of the {len(names)} columns, or "
            "pack the file with onward pack --no-header, which calls them column_0, column_1, ..."
        )


def _feature_of_column(name: str, values: list[Any], places: list[str]) -> Feature:
    present = [value for value in values if not is_missing(value)]
    array = _as_numbers(present) if present else None
    if array is not None:
        return Feature(
            name=name,
            dtype=str(array.dtype),
            shape=tuple(array.shape[1:]),
            values=array,
            words=(),
            missing=len(values) - len(present),
        )
    present = [value for value in values if value is not None]
    words = {value if isinstance(value, str) else repr(value) for value in islice(present, _MOST_WORDS)}
    others = [k for k, value in enumerate(values) if not is_missing(value) and not _is_number(value)]
    few = len(others) <= _LARGEST_SHARE_OF_WORDS * len(present) and len(others) < len(present)
    not_numbers = tuple((places[k], str(values[k])) for k in others) if few else ()
    places_of_words: dict[str, int] = {}
    return Feature(
        name=name,
        dtype=WORDS,
        shape=(),
        values=None,
        words=tuple(sorted(words)),
        missing=len(values) - len(present),
        codes=np.array([places_of_words.setdefault(str(value), len(places_of_words)) for value in present]),
        not_numbers=not_numbers,
    )


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, list) and bool(np.isfinite(float(value)))
    except (ValueError, TypeError):
        return False


def _as_numbers(values: list[Any]) -> np.ndarray | None:
    """int64 or float32, as packing makes them; None for words, or for lists of unequal lengths."""
    for dtype in (np.int64, np.float32):
        try:
            if dtype is np.int64 and any(isinstance(value, float) for value in values):
                continue
            array = np.array(values)
            if array.dtype.kind in "US":
                array = np.array([dtype(value) for value in values])
            if array.dtype.kind not in "iubf":
                return None
            if array.dtype.kind == "f" and dtype is np.int64:
                continue
            return array.astype(dtype)
        except (ValueError, TypeError, OverflowError):
            continue
    return None


# ---------------------------------------------------------------------------------------------- images, audio and text


def _read_images(path: Path, paths: list[Path]) -> DataFacts:
    pil = require("PIL.Image", "reading images")
    label, classes = _class_folders(path, paths, "image")
    sizes, modes = [], []
    for one in _spread(paths, 16):
        try:
            with pil.open(one) as image:
                sizes.append((image.height, image.width))
                modes.append(image.mode)
        except (OSError, ValueError, SyntaxError):
            continue
    if not sizes:
        raise DataError(f"none of the images of {str(path)!r} that were sampled can be decoded; replace them.")
    height, width = sorted(sizes)[len(sizes) // 2]
    channels = 1 if all(mode in ("L", "LA", "1", "I", *OF_16_BITS) for mode in modes) else 3
    image = Feature(name="image", dtype="float32", shape=(channels, height, width))
    return DataFacts(path=path, kind="images", features=(image, label), sample_count=len(paths), classes=classes)


def _class_folders(path: Path, paths: list[Path], what: str) -> tuple[Feature, tuple[str, ...]]:
    """The label that the names of folders give, and the classes."""
    flat = [one for one in paths if len(one.relative_to(path).parts) < 2]
    folders = [one.relative_to(path).parts[0] for one in paths if one not in flat]
    classes = sorted(set(folders))
    if flat or len(classes) < 2:
        found = f"{len(flat)} {what}s in no folder" if flat else f"one folder, {classes[0]!r}"
        article = "an" if what[0] in "aeio" else "a"
        raise DataError(
            f"{str(path)!r} holds {found}; the class of {article} {what} is the name of the folder it is in. Sort the "
            f"{what}s into one folder for each class: {str(path / 'CLASS' / (flat or paths)[0].name)!r}."
        )
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[name] for name in folders], np.int64)
    return Feature(name="label", dtype="int64", shape=(), values=labels), tuple(classes)


def _read_audio(path: Path, paths: list[Path]) -> DataFacts:
    label, classes = _class_folders(path, paths, "recording")
    recordings = [one for each in paths if (one := read_header(each)) is not None]
    if not recordings:
        raise DataError(f"none of the recordings of {str(path)!r} can be decoded; replace them.")
    rate = most_frequent_rate(recordings)
    lengths = sorted(resampled_length(one.duration, one.rate, rate) for one in recordings)
    audio = Feature(name="audio", dtype="float32", shape=(lengths[-1],))
    return DataFacts(
        path=path,
        kind="audio",
        features=(audio, label),
        sample_count=len(paths),
        classes=classes,
        sample_rate=rate,
        median_length=lengths[len(lengths) // 2],
    )


def _read_text(path: Path, paths: list[Path]) -> DataFacts:
    size = count_bytes(paths)
    if size == 0:
        raise DataError(f"text {str(path)!r} is empty.")
    return DataFacts(path=path, kind="text", features=(), sample_count=0, is_counted=False, bytes=size)


def text_options_length(data: DataFacts, options: TextOptions) -> int:
    """About how many samples text gives with these options, at four bytes a token (one for a byte tokenizer)."""
    bytes_a_token = 1 if options.tokenizer == "bytes" else 4
    return max(1, data.bytes // bytes_a_token // options.sequence_length)
