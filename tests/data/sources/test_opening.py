"""Data of every kind become the same batches; what cannot be read is refused with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, TensorDataset

from onward.data.batches import Batch, BatchSource, DataCursor
from onward.data.in_memory import InMemoryDataLoader
from onward.data.sources.naming import FeatureNames
from onward.data.sources.opening import ReadingOptions, open_data
from onward.errors import DataError, UserError
from tests.mlp import data, write_shards

ARRAYS = {name: array for name, array in data(22).items() if name != "target"}
X, LABEL = ARRAYS["x"], ARRAYS["label"]
NAMES = FeatureNames({"x": 2})


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in ARRAYS.items()}


def samples() -> list[dict[str, Any]]:
    return [{"x": X[i], "label": LABEL[i]} for i in range(len(X))]


def batches_of(size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[i : i + size], LABEL[i : i + size]) for i in range(0, len(X), size)]


class Again:
    """An iterable that begins anew."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(X[index]), int(LABEL[index])


def pandas_frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({**{f"x{i}": X[:, i] for i in range(6)}, "label": LABEL})


def polars_frame() -> Any:
    polars = pytest.importorskip("polars")
    return polars.DataFrame({**{f"x{i}": X[:, i] for i in range(6)}, "label": LABEL})


def arrow_table() -> Any:
    arrow = pytest.importorskip("pyarrow")
    return arrow.table({**{f"x{i}": X[:, i] for i in range(6)}, "label": LABEL})


def frame_of_lists() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"x": list(X), "label": LABEL})


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X.tolist(), "label": LABEL.tolist()}).cast_column(
        "x", datasets.Sequence(datasets.Value("float32"))
    )


CONTENTS: dict[str, Callable[[], Any]] = {
    "dictionary": lambda: ARRAYS,
    "tensors": tensors,
    "lists": lambda: {"x": X.tolist(), "label": LABEL.tolist()},
    "tuple": lambda: (X, LABEL),
    "tuple of tensors": lambda: tuple(tensors().values()),
    "pandas": pandas_frame,
    "pandas and labels": lambda: (pandas_frame().drop(columns="label"), LABEL),
    "polars": polars_frame,
    "Arrow": arrow_table,
    "frame of lists": frame_of_lists,
    "Hugging Face": hugging_face,
    "torch data set": Squares,
    "tensor data set": lambda: TensorDataset(*tensors().values()),
    "list of samples": samples,
    "list of tuples": lambda: list(zip(X, LABEL, strict=True)),
    "loader": lambda: TorchLoader(Squares(), batch_size=4),
    "loader of dictionaries": lambda: TorchLoader(samples(), batch_size=4),  # type: ignore[arg-type]
    "loader of samples": lambda: TorchLoader(Squares(), batch_size=None),
    "list of batches": lambda: batches_of(4),
    "iterable of batches": lambda: Again(lambda: iter(batches_of(4))),
    "iterable of samples": lambda: Again(lambda: iter(samples())),
    "generator": lambda: (batch for batch in batches_of(4)),
    "onward": lambda: InMemoryDataLoader(ARRAYS),
}


def same(batch: Batch, expected: dict[str, np.ndarray]) -> bool:
    return all(np.allclose(batch.features[name], array, atol=1e-7) for name, array in expected.items())


@pytest.mark.parametrize("kind", CONTENTS)
def test_every_kind_gives_the_same_evaluation(kind: str) -> None:
    """Batches of 4 of 22 samples, each once, in order; specs as the arrays have them."""
    source = open_data(CONTENTS[kind](), NAMES)
    specs = source.feature_specs()
    assert {name: spec.shape for name, spec in specs.items()} == {"x": (6,), "label": ()}
    assert specs["x"].dtype.kind == "f"
    assert specs["label"].dtype.kind == "i"
    found = list(source.one_pass(4))
    assert [batch.sample_count for batch in found] == [4, 4, 4, 4, 4, 2]
    for batch, (x, label) in zip(found, batches_of(4), strict=True):
        assert same(batch, {"x": x, "label": label})


@pytest.mark.parametrize("kind", [kind for kind in CONTENTS if kind != "generator"])
@pytest.mark.parametrize("taken", [1, 5, 6, 9])
def test_a_cursor_resumes_exactly(kind: str, taken: int) -> None:
    """What follows the cursor of any batch is what would have followed it, over the ends of epochs."""
    source = open_data(CONTENTS[kind](), NAMES)
    endless = source.batches(4)
    expected = [next(endless) for _ in range(taken + 8)]
    resumed = source.batches(4, expected[taken - 1].cursor)
    for batch in expected[taken:]:
        again = next(resumed)
        assert same(again, batch.features)
        assert (again.cursor.epoch, again.cursor.sample) == (batch.cursor.epoch, batch.cursor.sample)
        assert again.epoch == batch.epoch


@pytest.mark.parametrize("kind", ["dictionary", "torch data set", "Hugging Face"])
def test_shuffling_is_drawn_by_the_seed_and_resumes(kind: str) -> None:
    def read(seed: int, cursor: DataCursor = DataCursor(), count: int = 12) -> list[np.ndarray]:  # noqa: B008
        batches = open_data(CONTENTS[kind](), NAMES, ReadingOptions(shuffle=True, seed=seed)).batches(4, cursor)
        return [next(batches).features["label"] for _ in range(count)]

    one, again, other = read(1), read(1), read(2)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert sorted(np.concatenate(one[:11])[:22]) == sorted(LABEL)
    batches = open_data(CONTENTS[kind](), NAMES, ReadingOptions(shuffle=True, seed=1)).batches(4)
    cursor = [next(batches) for _ in range(7)][-1].cursor
    assert all(np.array_equal(a, b) for a, b in zip(read(1, cursor, 5), one[7:], strict=True))


@pytest.mark.parametrize("kind", ["dictionary", "pandas", "torch data set", "Hugging Face"])
def test_each_process_reads_its_part(kind: str) -> None:
    parts = [open_data(CONTENTS[kind](), NAMES, ReadingOptions(rank=rank, size=3)) for rank in range(3)]
    read = [np.concatenate([batch.features["label"] for batch in part.one_pass(4)]) for part in parts]
    assert [len(part) for part in read] == [8, 7, 7]
    for rank, part in enumerate(read):
        assert np.array_equal(part, LABEL[rank::3])


@pytest.mark.parametrize("kind", ["dictionary", "torch data set"])
def test_a_share_is_held_out(kind: str) -> None:
    source: Any = open_data(CONTENTS[kind](), NAMES)
    train, held = source.split(0.25, 3)
    read: list[list[np.ndarray]] = [[], []]
    for rows, part in zip(read, (train, held), strict=True):
        rows += [row for batch in part.one_pass(4) for row in batch.features["x"]]
    assert [len(rows) for rows in read] == [16, 6]
    assert sorted(map(tuple, [*read[0], *read[1]])) == sorted(map(tuple, X))
    for fraction in (0.0, 1.0, -0.5):
        with pytest.raises(UserError, match=r"validation_fraction is .*expected a number above 0 and below 1"):
            source.split(fraction, 0)
    with pytest.raises(DataError, match=r"0.01, which of 22 samples leaves 22 for training and 0 for evaluation"):
        source.split(0.01, 0)


def test_folders_and_files(tmp_path: Path) -> None:
    """Shards as they are; arrays packed into a temporary folder, which is gone afterwards."""
    write_shards(tmp_path / "shards", ARRAYS)
    np.savez(tmp_path / "arrays.npz", **ARRAYS)
    for path in (tmp_path / "shards", tmp_path / "arrays.npz"):
        source = open_data(str(path), NAMES)
        labels = np.concatenate([batch.features["label"] for batch in source.one_pass(4)])
        assert sorted(labels) == sorted(LABEL)
        source.close()
    packed: Any = open_data(tmp_path / "arrays.npz", NAMES)
    folder = packed._folder.path
    assert any(folder.glob("*.pb"))
    assert "was packed for this run: 22 samples" in packed.messages[-1]
    packed.close()
    assert not folder.exists()


def test_names_are_changed_and_left_out() -> None:
    names = FeatureNames({"x": 2}, renamed={"pixels": "x", "class": "label", "id": ""})
    source = open_data({"pixels": X, "class": LABEL, "id": LABEL}, names)
    assert set(source.feature_specs()) == {"x", "label"}


def test_what_holds_no_numbers_is_left_out_and_said() -> None:
    source: Any = open_data({**ARRAYS, "file": [f"{i}.png" for i in range(22)]}, NAMES)
    assert set(source.feature_specs()) == {"x", "label"}
    assert source.messages == ["features without numbers are left out: file."]


def test_several_inputs_in_a_tuple() -> None:
    names = FeatureNames({"a": 2, "b": 1})
    for given in [(X, LABEL, LABEL), ((X, LABEL), LABEL), ({"a": X, "b": LABEL}, LABEL)]:
        assert list(open_data(given, names).feature_specs()) == ["a", "b", "label"]


def test_bfloat16_tensors() -> None:
    source = open_data({"x": torch.from_numpy(X).bfloat16(), "label": LABEL}, NAMES)
    assert source.feature_specs()["x"].dtype.name == "bfloat16"


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from zip(X, LABEL, strict=True)


def test_an_endless_data_set() -> None:
    source: Any = open_data(TorchLoader(Endless(), batch_size=4), NAMES)
    assert (source.sample_count, source.item_count, source.batch_size) == (None, None, 4)
    batches = source.batches(4)
    assert [next(batches).sample_count for _ in range(9)] == [4] * 9


def test_a_generator_that_ends() -> None:
    source = open_data((batch for batch in batches_of(4)), NAMES)
    with pytest.raises(DataError, match=r"training data ended after 6 batches: generator can be read only once. Pass"):
        list(source.batches(4))


RAGGED = [np.zeros(3, np.float32), np.zeros(4, np.float32)]


def read(source: BatchSource) -> None:
    source.feature_specs()
    list(source.one_pass(4))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: 3, r"data of type int are not supported; pass a dictionary of arrays, a tuple \(x, y\)"),
        (lambda: {"x": X, "label": LABEL[:5]}, r"sample counts \{'x': 22, 'label': 5\}; expected .* the same number"),
        (lambda: {"x": [f"{i}" for i in range(22)], "label": LABEL}, r"feature 'x' holds text, not numbers; convert"),
        (lambda: {"x": RAGGED, "label": LABEL[:2]}, r"feature 'x' holds rows of unequal lengths.*collate_fn"),
        (lambda: [{"x": row, "label": 0} for row in RAGGED], r"feature 'x' have shapes \[3\] and \[4\]; pad"),
        (lambda: [{"x": X[0]}, {"y": X[0]}], r"samples hold different features: x and, 1 later, y"),
        (lambda: [], r"the data \(list\) are empty; pass at least one sample"),
        (lambda: iter(()), r"the data \(tuple_iterator\) are empty\. Pass at least one"),
        (lambda: (X, LABEL, LABEL), r"the data have 3 parts, but names for 2: 'x', 'label'.*Pass dictionaries"),
        (lambda: iter([{"x": X[None]}]), r"hold 'x' of rank 3; the model reads 'x' of rank 2, batch axis included"),
        (lambda: iter([{"z": X}]), r"items of the data hold 'z'; the model reads 'x' of rank 2. Pass input_name_map="),
        (lambda: iter([(X, LABEL[:3])]), r"a batch holds \{'x': 22, 'label': 3\} samples; expected the same number"),
        (lambda: {"x": [1.0, None], "label": [0, 1]}, r"feature 'x' has 1 missing values of 2; fill them in or leave"),
        (lambda: Path("nowhere"), r"source 'nowhere' does not exist"),
    ],
)
def test_what_cannot_be_read(given: Callable[[], Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(open_data(given(), NAMES))


def test_a_column_of_words_in_a_table() -> None:
    frame = pandas_frame().assign(colour="red")
    with pytest.raises(
        DataError, match=r"columns 'colour' hold no numbers and cannot be part of the input 'x'.*input_name_map="
    ):
        open_data(frame, NAMES)
    source: Any = open_data(frame, FeatureNames({"x": 2}, renamed={"colour": ""}))
    assert source.messages == ["columns x0, x1, x2, x3, x4, x5 form the input 'x', in this order."]


def test_too_few_samples_for_the_processes() -> None:
    with pytest.raises(DataError, match=r"the data hold \{'x': 2\} samples, too few for 3 processes"):
        open_data({"x": X[:2]}, NAMES, ReadingOptions(rank=2, size=3))
    with pytest.raises(DataError, match=r"the data hold 2 samples, too few for 3 processes"):
        open_data(TensorDataset(torch.zeros(2, 6)), NAMES, ReadingOptions(rank=2, size=3))
