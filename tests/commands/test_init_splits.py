"""`onward init MODEL folder/` where the folder has `train` and `val`, of every kind of data: both are used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

import onward
from onward.cli import main
from onward.data.manifest import read_manifest
from onward.parameters import Parameters
from tests.commands.test_init import losses_of_run
from tests.commands.test_wizard import answering
from tests.proposal.kinds import KINDS, Kind, classifier_of_images, language_model, numbers, perceptron, pictures, table

ON_CPU = onward.Environment(execution_provider="CPU", threads=1)


def pictures_in(folder: Path, train: str, test: str) -> None:
    """Folders of classes; every fourth picture is for evaluation."""
    pictures(folder)
    for picture in sorted((folder / "pictures").rglob("*.png")):
        place = folder / "divided" / (test if int(picture.stem) % 4 == 0 else train) / picture.parent.name
        place.mkdir(parents=True, exist_ok=True)
        picture.rename(place / picture.name)
    shutil.rmtree(folder / "pictures")


def rows_in(form: str, in_folders: bool) -> Callable[[Path, str, str], None]:
    """A table, every fourth row of which is for evaluation."""

    def write(folder: Path, train: str, test: str) -> None:
        name = table(folder, form)
        suffix = name.partition(".")[2]
        for part, keep in ((train, lambda k: k % 4 != 0), (test, lambda k: k % 4 == 0)):
            place = (
                folder / "divided" / part / f"rows.{suffix}" if in_folders else folder / "divided" / f"{part}.{suffix}"
            )
            place.parent.mkdir(parents=True, exist_ok=True)
            if form == "parquet":
                from pyarrow import parquet

                whole = parquet.read_table(folder / name)
                parquet.write_table(whole.take([k for k in range(len(whole)) if keep(k)]), place)
            else:
                head, *lines = (folder / name).read_text().splitlines()
                place.write_text("\n".join([head, *(line for k, line in enumerate(lines) if keep(k))]) + "\n")

    return write


def shards_in(folder: Path, train: str, test: str) -> None:
    numbers(4, lambda x: x[:, :3].argmax(1))(folder)
    assert main(["pack", "numbers.npz", "shards", "--test-fraction", "0.25"]) == 0
    (folder / "divided").mkdir()
    (folder / "shards" / "train").rename(folder / "divided" / train)
    (folder / "shards" / "test").rename(folder / "divided" / test)


def text_in(folder: Path, train: str, test: str) -> None:
    (folder / "divided").mkdir()
    for name, count in ((train, 300), (test, 60)):
        (folder / "divided" / f"{name}.txt").write_text("The quick brown fox jumps over the lazy dog. " * count)


IMAGES, TREES, TEXT = classifier_of_images(), perceptron(4, 3), language_model(True)
CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path, str, str], None], str, str]] = {
    "pictures, train and val": (IMAGES, pictures_in, "train", "val"),
    "pictures, Train and Validation": (IMAGES, pictures_in, "Train", "Validation"),
    "CSV files in train and test": (TREES, rows_in("csv", True), "train", "test"),
    "train.csv and valid.csv": (TREES, rows_in("csv", False), "train", "valid"),
    "Parquet files in train and validation": (TREES, rows_in("parquet", True), "train", "validation"),
    "shards in train and val": (TREES, shards_in, "train", "val"),
    "shards in training and test": (TREES, shards_in, "training", "test"),
    "train.txt and valid.txt": (TEXT, text_in, "train", "valid"),
}


@pytest.mark.parametrize("name", CASES)
def test_both_parts_are_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of samples are those of the parts, the evaluated part is said, and a few updates lower its loss."""
    model, write, train, test = CASES[name]
    monkeypatch.chdir(tmp_path)
    model(tmp_path)
    write(tmp_path, train, test)
    assert main(["init", "net.onnx", "divided", "--no-trial"]) == 0
    parameters, written = Parameters.load("run.yaml"), Path("run.yaml").read_text()
    assert parameters.paths.train_data_dir is not None
    assert parameters.paths.test_data_dir is not None
    is_packed = name.startswith("shards")
    places = [Path("divided") / train, Path("divided") / test] if is_packed else [Path("data/train"), Path("data/test")]
    assert [parameters.paths.train_data_dir, parameters.paths.test_data_dir] == [tmp_path / one for one in places]
    counts = []
    for place in places:
        manifest = read_manifest(place)
        assert manifest is not None
        counts.append(manifest.sample_count)
    joined = " ".join(written.replace("#", " ").split())
    assert f"{counts[0]:,} training samples make" in joined
    assert f"The {counts[1]:,} test samples are evaluated" in joined
    if not is_packed:
        assert f"{test} is evaluated during training" in joined.replace(".csv", "").replace(".txt", "")
        assert not ("trees" in name and "row" in parameters.data.input_name_map)
    if "Parquet" in name or "csv" in name.lower():
        assert counts == [180, 60]
    if "pictures" in name:
        assert counts == [90, 30]
    before, after = losses_of_run(parameters)
    assert after < before


def test_a_part_that_is_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    TREES(tmp_path)
    rows_in("csv", True)(tmp_path, "train", "val")
    shutil.copytree("divided/val", "divided/test")
    assert main(["init", "net.onnx", "divided", "--no-trial"]) == 0
    assert "val is evaluated during training; test is left for a final evaluation" in Path("run.yaml").read_text()
    out = capsys.readouterr().out
    assert "packing: onward pack divided/train data --samples-per-file 23 --test-source divided/val" in out
    again = ["init", "net.onnx", "divided", "--no-trial", "-o", "other.yaml"]
    assert main(again) == 0
    assert "already holds these data, packed with the same options." in capsys.readouterr().out
    assert main([*again, "--force", "--test-fraction", "0.1"]) == 2
    assert (
        "--test-fraction is 0.1, but 'divided' has test data, 'val'. Leave it out, or pass 'divided/train' alone."
        in (capsys.readouterr().err)
    )


def test_the_wizard_does_not_ask_what_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TREES(tmp_path)
    rows_in("csv", True)(tmp_path, "train", "val")
    asked = answering([""] * 20, monkeypatch)
    assert main(["init", "net.onnx", "divided", "--no-trial", "--wizard"]) == 0
    assert not [prompt for prompt in asked if "held out" in prompt]


def test_words_that_only_the_evaluation_data_have_count_as_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two classes in training, a third in evaluation: a model with two outputs gets a last layer of three."""
    monkeypatch.chdir(tmp_path)
    perceptron(4, 2)(tmp_path)
    rows_in("csv", True)(tmp_path, "train", "val")
    rows = Path("divided/train/rows.csv").read_text().splitlines()
    Path("divided/train/rows.csv").write_text("\n".join(row for row in rows if "fir" not in row) + "\n")
    assert main(["init", "net.onnx", "divided", "--no-trial"]) == 0
    assert Parameters.load("run.yaml").head.num_classes == 3


@pytest.mark.parametrize(
    ("name", "has_loss"),
    [
        ("pictures, train and val", False),
        ("shards in train and val", False),
        ("shards in train and val", True),
        ("CSV files in train and test", True),
    ],
)
def test_fit_evaluates_the_part_for_it(
    name: str, has_loss: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, write, train, test = CASES[name]
    monkeypatch.chdir(tmp_path)
    model(tmp_path)
    write(tmp_path, train, test)
    options = {"loss": "softmax_cross_entropy", "label": "y"} if has_loss else {}
    if has_loss and "CSV" in name:
        _as_features(Path("divided"))
    result = onward.fit("net.onnx", "divided", epochs=2, environment=ON_CPU, progress=False, **options)
    assert len(result.history.evaluations["loss"]) == 2
    assert result.metrics["loss"] < result.history.evaluations["loss"][0] + 0.1


def _as_features(folder: Path) -> None:
    """Rows as JSON lines with the names of the model's features, as packing without options takes them."""
    words = ("elm", "fir", "oak")
    for path in folder.rglob("rows.csv"):
        _, *lines = path.read_text().splitlines()
        rows = [line.split(",") for line in lines]
        samples = [{"x": [float(one) for one in row[1:5]], "y": words.index(row[5])} for row in rows]
        path.with_suffix(".jsonl").write_text("\n".join(json.dumps(one) for one in samples))
        path.unlink()


def test_a_table_of_the_kinds_is_the_same_divided_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proposed in addition to the numbers of samples does not depend on where the evaluation data come from."""
    monkeypatch.chdir(tmp_path)
    kind: Kind = KINDS["table"]
    kind.model(tmp_path)
    kind.data(tmp_path)
    rows_in("csv", True)(tmp_path, "train", "val")
    assert main(["init", "net.onnx", "trees.csv", "--no-trial", "-o", "a/run.yaml"]) == 0
    assert main(["init", "net.onnx", "divided", "--no-trial", "-o", "b/run.yaml"]) == 0
    one, other = (yaml.safe_load(Path(f"{folder}/run.yaml").read_text()) for folder in "ab")
    assert one["loss"] == other["loss"]
    assert one["optimizer"] == other["optimizer"]
    assert np.isclose(one["learning_rate"]["initial_lr"], other["learning_rate"]["initial_lr"])
