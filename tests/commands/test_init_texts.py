"""`onward init` on tables of texts with labels and models of token ids: single texts, pairs, places of tokenizers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from onward.cli import main
from onward.data.shard_format import read_samples
from onward.parameters import Parameters
from tests.commands.test_init import losses_of_run
from tests.graph.exported import export

pytest.importorskip("tokenizers")

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a film was it plot and good great bad awful dull lovely . ,".split()  # noqa: SIM905
GOOD, BAD = ("good", "great", "lovely"), ("bad", "awful", "dull")


class Texts(nn.Module):
    """A classifier of token ids with a mask, and with token types where there are any."""

    def __init__(self, classes: int, length: int = 64, rows: int = len(WORDS)) -> None:
        super().__init__()
        self.embed, self.place, self.kind = nn.Embedding(rows, 24), nn.Embedding(length, 24), nn.Embedding(2, 24)
        self.mix, self.head = nn.Linear(24, 24), nn.Linear(24, classes)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        x = x if types is None else x * self.kind(types)
        kept = mask[:, :, None].to(x.dtype)
        return self.head((self.mix(x).relu() * kept).sum(1) / kept.sum(1).clamp(min=1))


def model(folder: Path, classes: int = 2, types: bool = False, fixed: bool = False, rows: int = len(WORDS)) -> None:
    torch.manual_seed(0)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    example = (torch.randint(0, rows, (2, 12)), *[torch.ones(2, 12, dtype=torch.int64)] * (len(names) - 1))
    axes = {
        name: {0: "batch"} if fixed or name == "logits" else {0: "batch", 1: "sequence"} for name in [*names, "logits"]
    }
    folder.mkdir(parents=True, exist_ok=True)
    net = Texts(classes, rows=rows).eval()
    export(net, example, folder / "net.onnx", 17, False, input_names=names, output_names=["logits"], dynamic_axes=axes)


def vocabulary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")


def sentence(generator: np.random.Generator, words: tuple[str, ...]) -> str:
    end = " and it was " + generator.choice(words) if generator.random() < 0.5 else ""
    return f"A film, {generator.choice(('a plot', 'it'))} was {generator.choice(words)}{end}."


def reviews(folder: Path, form: str = "csv") -> str:
    """Texts with their mood as a word, and columns that are neither."""
    generator = np.random.default_rng(0)
    moods = ["good" if k % 2 else "bad" for k in range(240)]
    rows = [
        {
            "id": k,
            "review": sentence(generator, GOOD if mood == "good" else BAD),
            "stars": int(mood == "good"),
            "label": mood,
        }
        for k, mood in enumerate(moods)
    ]
    if form == "jsonl":
        (folder / "reviews.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        return "reviews.jsonl"
    with open(folder / "reviews.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return "reviews.csv"


def pairs(folder: Path) -> str:
    """The mood of the second sentence, whatever that of the first."""
    generator = np.random.default_rng(0)
    with open(folder / "pairs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence1", "sentence2", "label"])
        for k in range(240):
            first, second = (GOOD, BAD)[int(generator.integers(2))], (BAD, GOOD)[k % 2]
            writer.writerow([sentence(generator, first), sentence(generator, second), k % 2])
    return "pairs.csv"


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    vocabulary(folder)


CASES: dict[str, tuple[Callable[[Path], object], Callable[[Path], str], tuple[str, ...], str, list[str]]] = {
    "reviews": (
        model,
        reviews,
        (),
        "softmax_cross_entropy",
        ["is made of the text in 'review'", "vocab.txt is next to"],
    ),
    "reviews in JSONL": (model, lambda f: reviews(f, "jsonl"), (), "softmax_cross_entropy", ["99 % of the texts have"]),
    "reviews, a label of numbers": (
        model,
        reviews,
        ("--label", "stars"),
        "softmax_cross_entropy",
        ["label is 'stars'"],
    ),
    "reviews, one logit": (lambda f: model(f, 1), reviews, ("--label", "stars"), "binary_cross_entropy", []),
    "fixed length": (lambda f: model(f, fixed=True), reviews, (), "softmax_cross_entropy", ["is fixed to 12 tokens"]),
    "a length by hand": (
        model,
        reviews,
        ("--sequence-length", "10"),
        "softmax_cross_entropy",
        ["by --sequence-length"],
    ),
    "pairs": (
        lambda f: model(f, types=True),
        pairs,
        (),
        "softmax_cross_entropy",
        ["'sentence1' and 'sentence2', as pairs"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and the trained loss of a table of moods is far below that of guessing."""
    make, write, options, loss, words = CASES[name]
    prepare(tmp_path, monkeypatch)
    make(tmp_path)
    data = write(tmp_path)
    assert main(["init", "net.onnx", data, "--epochs", "9", "--learning-rate", "0.02", *options]) == 0
    written = Path("run.yaml").read_text()
    joined = " ".join(written.replace("#", " ").split())
    for one in words:
        assert one in joined
    assert yaml.safe_load(written)["loss"]["type"] == loss
    before, after = losses_of_run(Parameters.load("run.yaml"), 60)
    assert after < 0.6 * before, (before, after)
    sample = next(read_samples(next(Path("data/train").glob("*.pb"))))
    ids, mask = sample["input_ids"], sample["attention_mask"]
    assert ids[0] == WORDS.index("[CLS]")
    assert ids[mask == 1][-1] == WORDS.index("[SEP]")
    assert (ids[mask == 0] == 0).all()
    assert (WORDS.index("[UNK]") == ids).sum() == 0
    if name == "pairs":
        assert sorted(set(sample["token_type_ids"].tolist())) == [0, 1]


@pytest.mark.parametrize("place", ["beside", "above onnx", "option, file", "option, folder", "tokenizer.json"])
def test_every_place_of_a_tokenizer(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are the same from each."""
    monkeypatch.chdir(tmp_path)
    reviews(tmp_path)
    folder = tmp_path / ("hub/onnx" if place == "above onnx" else "hub")
    model(folder)
    vocabulary(tmp_path / "hub" if place in ("beside", "above onnx", "tokenizer.json") else tmp_path / "elsewhere")
    if place == "tokenizer.json":
        from onward.data.packing.tokenizer_files import load_tokenizer

        load_tokenizer(tmp_path / "hub" / "vocab.txt").save("hub/tokenizer.json")
        Path("hub/vocab.txt").write_text("not this one")
    options = {"option, file": ["--tokenizer", "elsewhere/vocab.txt"], "option, folder": ["--tokenizer", "elsewhere"]}
    path = folder.relative_to(tmp_path) / "net.onnx"
    assert main(["init", str(path), "reviews.csv", "--no-trial", *options.get(place, [])]) == 0
    sample = next(read_samples(next(Path("data/train").glob("*.pb"))))
    kept = sample["input_ids"][sample["attention_mask"] == 1].tolist()
    assert [WORDS[number] for number in kept][:4] == ["[CLS]", "a", "film", ","]


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (model, [], ["has text in column 'review' for input 'input_ids' int64 [batch, sequence]",
                     "there is no tokenizer next to the model. Put the tokenizer of the model there (tokenizer.json",
                     "or pass --tokenizer PATH"]),
        (lambda f: model(f, rows=7), ["--tokenizer", "there"],
         [f"tokenizer 'there' has {len(WORDS)} tokens, and the embedding of input 'input_ids' has 7 rows: it is the"]),
        (lambda f: model(f, 3), ["--tokenizer", "there", "--loss", "l1", "--prediction", "nothing"],
         ["--prediction is 'nothing'; the outputs of the model are 'logits'"]),
        (model, ["--tokenizer", "nowhere"], ["tokenizer 'nowhere' does not exist; pass a tokenizer.json, a vocab.txt"]),
    ],
)  # fmt: skip
def test_refusals(
    make: Callable[[Path], object],
    options: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    reviews(tmp_path)
    vocabulary(tmp_path / "there")
    assert main(["init", "net.onnx", "reviews.csv", "--no-trial", *options]) == 2
    said = capsys.readouterr().err
    for one in words:
        assert one in said, said
    assert not Path("run.yaml").exists()


def test_a_transformer_of_the_transformers_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny BERT as its folder is written, with the text's column among others, trained to fit."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    vocabulary(tmp_path / "bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=40, num_labels=2, **sizes)
    net = transformers.BertForSequenceClassification(config).eval()
    net.config.return_dict = False
    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = tuple(torch.ones(2, 12, dtype=torch.int64) for _ in names)
    axes = {name: {0: "batch", 1: "sequence"} for name in names} | {"logits": {0: "batch"}}
    target = tmp_path / "bert" / "model.onnx"
    export(net, example, target, 17, False, input_names=names, output_names=["logits"], dynamic_axes=axes)
    reviews(tmp_path)
    assert main(["init", "bert/model.onnx", "reviews.csv", "--learning-rate", "0.01"]) == 0
    before, after = losses_of_run(Parameters.load("run.yaml"), 60)
    assert after < 0.6 * before
