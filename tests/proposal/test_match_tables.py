"""`onward init` on tables as people have them: cells without a value, words among numbers, other orders of classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.cli import main
from onward.data.manifest import read_manifest
from onward.data.shard import load_shard
from tests.proposal.kinds import perceptron

skl2onnx = pytest.importorskip("skl2onnx")

HEADER = "id,width,height,depth,kind"


def rows(count: int = 40) -> list[list[str]]:
    drawn = np.random.default_rng(0).random((count, 3)).round(3)
    kinds = np.random.default_rng(1).choice(["bolt", "nut", "screw"], count)
    return [[str(k), *map(str, row), kind] for k, (row, kind) in enumerate(zip(drawn, kinds, strict=True))]


def write(folder: Path, cells: dict[tuple[int, int], str], header: str = HEADER) -> None:
    table = rows()
    for (row, column), value in cells.items():
        table[row][column] = value
    (folder / "parts.csv").write_text("\n".join([header, *(",".join(row) for row in table)]) + "\n")


def init(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    perceptron(3, 3)(folder)
    code = main(["init", "net.onnx", "parts.csv", "--no-trial", *options])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("word", ["", "NA", "nan", "N/A", "null", "?", " None "])
def test_a_cell_without_a_number_leaves_its_row_out(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {(7, 1): word, (30, 3): word})
    code, said = init(tmp_path, monkeypatch, capsys)
    assert code == 0, said
    assert "rows skipped: 2" in said
    assert "missing values: {'width': 1, 'depth': 1}" in said
    packed = np.concatenate([load_shard(shard, {}).features["x"] for shard in sorted(Path("data").rglob("*.pb"))])
    expected = np.array([row[1:4] for k, row in enumerate(rows()) if k not in (7, 30)], np.float32)
    np.testing.assert_array_equal(np.sort(packed, axis=0), np.sort(expected, axis=0))


@pytest.mark.parametrize(
    ("cells", "header", "words"),
    [
        ({(7, 1): "0,5"}, HEADER, ["'parts.csv', line 9: 6 values for 5 columns"]),
        ({(7, 1): "0.5m", (9, 1): "n.b."}, HEADER,
         ["column 'width' of 'parts.csv' holds numbers, but also '0.5m' (line 9), 'n.b.' (line 11). Fix these cells, "
          "or empty them to leave their rows out. If the column is not needed, name those that are with --inputs."]),
        ({(5, 4): "Bolt"}, HEADER,
         ["it has 3 classes, the labels have 4. 'Bolt' and 'bolt' differ only in capital letters or spaces: spell them "
          "alike.", "leave out the samples of 1 class."]),
        ({}, "0,0.25,0.5,0.75,bolt",
         ["the first line of 'parts.csv' should name the columns, but it holds numbers: '0.25', '0.5', '0.75'. Insert "
          "a line with the names of the 5 columns, or pack the file with onward pack --no-header"]),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_their_place(
    cells: dict[tuple[int, int], str],
    header: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path, cells, header)
    code, said = init(tmp_path, monkeypatch, capsys)
    assert code == 2
    for part in words:
        assert part in said, said


def test_a_column_with_words_that_is_not_needed_may_be_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {(7, 0): "7b"})
    assert init(tmp_path, monkeypatch, capsys, "--inputs", "width,height,depth", "--label", "kind")[0] == 0


def test_a_misspelt_column_gets_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {})
    code, said = init(tmp_path, monkeypatch, capsys, "--label", "kin")
    assert code == 2
    assert "has no column 'kin'; it has 'id', 'width', 'height', 'depth', 'kind'. Did you mean 'kind'?" in said


def test_samples_that_are_not_finite_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    perceptron(3, 3)(tmp_path)
    x = np.ones((40, 3), np.float32)
    x[[3, 5], 1] = np.nan, np.inf
    np.savez("parts.npz", x=x, label=np.arange(40) % 3)
    assert main(["init", "net.onnx", "parts.npz", "--no-trial"]) == 0
    assert (
        "note: feature 'x' holds NaN or infinite numbers in 2 of 40 samples; every update with such a sample is "
        "skipped. Fix or leave out these samples." in capsys.readouterr().out
    )


# ------------------------------------------------------------------------------------------------ the model's own names


def write_classifier(zipmap: bool, perceptron: bool, names: list) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    drawn = np.random.default_rng(0).random((60, 3)).astype(np.float32)
    labels = np.array(names)[np.arange(60) % len(names)]
    model = MLPClassifier((4,), max_iter=5) if perceptron else LogisticRegression()
    model.fit(drawn, labels)
    options = {id(model): {"zipmap": zipmap}}
    Path("net.onnx").write_bytes(skl2onnx.to_onnx(model, drawn[:1], options=options).SerializeToString())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipmap", [True, False])
@pytest.mark.parametrize("perceptron", [True, False])
@pytest.mark.parametrize(
    ("names", "seen"), [(["bolt", "nut", "screw"], ["bolt", "screw"]), ([3, 5, 9], [9, 5]), ([0, 1, 2], [0, 2])]
)
def test_labels_are_numbered_as_the_model_numbers_its_classes(
    zipmap: bool, perceptron: bool, names: list, seen: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table without one of the classes, or with numbers that are not 0, 1, 2, must not train other classes."""
    monkeypatch.chdir(tmp_path)
    write_classifier(zipmap, perceptron, names)
    table = [",".join([*row[1:4], str(seen[k % 2])]) for k, row in enumerate(rows())]
    Path("parts.csv").write_text("\n".join(["width,height,depth,kind", *table]))
    assert main(["init", "net.onnx", "parts.csv", "--test-fraction", "0"]) == 0
    shards = sorted(Path("data").rglob("*.pb"))
    packed = np.concatenate([load_shard(shard, {}).features["kind"].reshape(-1) for shard in shards])
    np.testing.assert_array_equal(np.unique(packed), sorted(names.index(one) for one in seen))
    manifest = read_manifest(shards[0].parent)
    assert manifest is not None
    if names != [0, 1, 2]:
        assert manifest.details["categories"] == {"kind": list(map(str, names))}
