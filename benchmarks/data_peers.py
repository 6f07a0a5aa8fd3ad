"""The peers of `benchmarks.data_loading`: run by the Python of `make peers`, which has no onward.

Reads one JSON request a line from standard input, writes one JSON answer a line:
    {"prepare": "tokens", "folder": F}                             -> {}
    {"read": NAME, "kind": KIND, "folder": F, "batch_size": 64, "workers": 2, "seconds": 2.0}
                                                                   -> {"samples_per_second": 12345.6}
`F/arrays/` holds one .npy file a feature, over all samples; the peers' own formats are written next to it.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

# streaming imports torchvision, which registries have for GPUs only; importing it needs these operators to be declared.
TORCHVISION = torch.library.Library("torchvision", "DEF")
for one in ("nms", "qnms"):
    TORCHVISION.define(one + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import streaming  # noqa: E402
import webdataset  # noqa: E402
from PIL import Image  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

SHARD_SAMPLES = 500
FIRST_BATCHES = 10
"""Left out of the time: workers start, and read ahead."""


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Feature -> memory-mapped array over all samples."""
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted((folder / "arrays").glob("*.npy"))}


# ------------------------------------------------------------------------------------------------------------- writing


def encoded(image: np.ndarray) -> bytes:
    """An image, [channels, height, width], as JPEG."""
    file = io.BytesIO()
    Image.fromarray(np.moveaxis(image, 0, -1)).save(file, "JPEG", quality=90)
    return file.getvalue()


def prepare(folder: Path) -> None:
    """Writes the data in the formats of all peers."""
    features = arrays(folder)
    count = len(next(iter(features.values())))
    columns = {
        name: "int" if array.ndim == 1 else f"ndarray:{array.dtype}:{','.join(map(str, array.shape[1:]))}"
        for name, array in features.items()
    }
    jpegs = [encoded(image) for image in features["image"]] if "image" in features else []
    write_tars(folder / "tar", count, lambda k: {f"{name}.npy": array[k] for name, array in features.items()})
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=1 << 26) as writer:
        for k in range(count):
            writer.write({name: int(a[k]) if a.ndim == 1 else np.array(a[k]) for name, a in features.items()})
    if not jpegs:
        return
    labels = features["label"]
    write_tars(folder / "tar_jpeg", count, lambda k: {"jpg": jpegs[k], "cls": int(labels[k])})
    # Columns of bytes: the encoding "jpeg" would decode and encode again.
    with streaming.MDSWriter(
        out=str(folder / "mds_jpeg"), columns={"image": "bytes", "label": "int"}, size_limit=1 << 26
    ) as writer:
        for k in range(count):
            writer.write({"image": jpegs[k], "label": int(labels[k])})
    (folder / "jpeg").mkdir()
    for k, jpeg in enumerate(jpegs):
        (folder / "jpeg" / f"{int(labels[k]):06}.jpg").write_bytes(jpeg)


def write_tars(folder: Path, count: int, sample: Callable[[int], dict[str, Any]]) -> None:
    """Shards of WebDataset."""
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "%06d.tar"), maxcount=SHARD_SAMPLES, verbose=0) as writer:
        for k in range(count):
            writer.write({"__key__": f"{k:06}", **sample(k)})


# ------------------------------------------------------------------------------------------------------------- reading


def pixels(jpeg: Any) -> np.ndarray:
    """A decoded image, uint8 [channels, height, width]."""
    with Image.open(io.BytesIO(jpeg) if isinstance(jpeg, bytes) else jpeg) as image:
        return np.ascontiguousarray(np.moveaxis(np.asarray(image.convert("RGB")), -1, 0))


class Mapped(Dataset[Any]):
    """Samples of memory-mapped arrays, one at a time, as in most training scripts."""

    def __init__(self, folder: Path) -> None:
        self.features = arrays(folder)

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(array[k])) for name, array in self.features.items()}


class MappedBatches(Mapped):
    """The same, a batch in one call of numpy: a data set written for speed, whose collation has nothing to do."""

    def __getitems__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array[numbers]) for name, array in self.features.items()}


class Files(Dataset[Any]):
    """JPEG files, decoded one at a time."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted((folder / "jpeg").iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"image": torch.from_numpy(pixels(self.paths[k])), "label": int(self.paths[k].stem)}


class StreamedJpegs(streaming.StreamingDataset):
    """Of MosaicML streaming, decoded where a sample is read: in the workers."""

    def __getitem__(self, k: int) -> Any:
        sample = super().__getitem__(k)
        return {"image": pixels(sample["image"]), "label": sample["label"]}


def of_torch(kind: Callable[[Path], Dataset[Any]]) -> Callable[..., DataLoader[Any]]:
    def make(folder: Path, batch_size: int, workers: int) -> DataLoader[Any]:
        by_batch: dict[str, Any] = {"collate_fn": _as_is} if kind is MappedBatches else {}
        return DataLoader(
            kind(folder), batch_size, shuffle=True, num_workers=workers, drop_last=True,
            persistent_workers=workers > 0, **by_batch,
        )  # fmt: skip

    return make


def _as_is(batch: Any) -> Any:
    return batch


def of_webdataset(name: str) -> Callable[..., Any]:
    def make(folder: Path, batch_size: int, workers: int) -> Any:
        urls = sorted(map(str, (folder / name).glob("*.tar")))
        tars = webdataset.WebDataset(urls, shardshuffle=len(urls), workersplitter=webdataset.split_by_worker)
        decode = _decoded_jpeg if name == "tar_jpeg" else _decoded_arrays
        # Only the bytes go through the buffer that shuffles.
        samples = tars.shuffle(1000).map(decode).batched(batch_size, collation_fn=_stacked, partial=False)
        return webdataset.WebLoader(samples, batch_size=None, num_workers=workers, persistent_workers=workers > 0)

    return make


def _decoded_arrays(sample: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        name.removesuffix(".npy"): np.load(io.BytesIO(value)) for name, value in sample.items() if name.endswith("npy")
    }


def _decoded_jpeg(sample: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"image": pixels(sample["jpg"]), "label": np.array(int(sample["cls"]))}


def _stacked(samples: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    names = [name for name in samples[0] if not name.startswith("__")]
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in names}


def of_streaming(kind: type[streaming.StreamingDataset], name: str) -> Callable[..., DataLoader[Any]]:
    def make(folder: Path, batch_size: int, workers: int) -> DataLoader[Any]:
        streaming.base.util.clean_stale_shared_memory()
        samples = kind(local=str(folder / name), shuffle=True, batch_size=batch_size)
        return DataLoader(samples, batch_size, num_workers=workers, drop_last=True, persistent_workers=workers > 0)

    return make


READERS: dict[str, Callable[..., Any]] = {
    "torch DataLoader, memory-mapped": of_torch(Mapped),
    "torch DataLoader, memory-mapped, a batch a call": of_torch(MappedBatches),
    "WebDataset": of_webdataset("tar"),
    "MosaicML streaming": of_streaming(streaming.StreamingDataset, "mds"),
    "torch DataLoader, JPEG files": of_torch(Files),
    "WebDataset, JPEG": of_webdataset("tar_jpeg"),
    "MosaicML streaming, JPEG": of_streaming(StreamedJpegs, "mds_jpeg"),
}


def endless(loader: Any) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


def check(batch: dict[str, torch.Tensor], folder: Path, batch_size: int, is_exact: bool) -> None:
    """Whether a batch holds samples of the data, each by its number."""
    for name, array in arrays(folder).items():
        found = np.asarray(batch[name])
        numbers = np.asarray(batch["label"] if "label" in batch else batch["tokens"][:, 0])
        assert isinstance(batch[name], torch.Tensor)
        assert found.shape == (batch_size, *array.shape[1:]), found.shape
        worst = np.abs(found.astype(np.int64) - array[numbers].astype(np.int64)).mean()
        assert worst == 0 if is_exact else worst < 10, (name, worst)


def read(name: str, folder: Path, batch_size: int, workers: int, seconds: float) -> float:
    """Samples a second."""
    batches = endless(READERS[name](folder, batch_size, workers))
    check(next(batches), folder, batch_size, is_exact="JPEG" not in name)
    for _ in itertools.islice(batches, FIRST_BATCHES):
        pass
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        count += len(next(iter(next(batches).values())))
    return count / elapsed


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        if "prepare" in request:
            prepare(folder)
            answer = {}
        else:
            speed = read(request["read"], folder, request["batch_size"], request["workers"], request["seconds"])
            answer = {"samples_per_second": speed}
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
