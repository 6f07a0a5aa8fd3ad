"""`onward init` on tiny models and data of every kind: what it writes trains, and what it refuses it explains."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import soundfile
import yaml

from onward.cli import main
from onward.commands import initialization
from onward.commands.loaders import training_loader
from onward.data.loader import DataLoader
from onward.data.manifest import read_manifest
from onward.data.packing import AudioOptions, PackOptions
from onward.data.shard_files import find_shard_files
from onward.errors import DataError
from onward.parameters import Checkpoint, EarlyStopping, Parameters
from onward.parameters.limits import DEFAULT_LIMITS
from onward.proposal.proposal import Packing
from onward.report.phases import Phases
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD
from tests.proposal.kinds import KINDS, Kind, classifier_of_images, numbers, perceptron, pictures, table, text
from tests.proposal.prepared import prepare

UPDATES = 30


def losses_of_run(parameters: Parameters, updates: int = UPDATES) -> tuple[float, float]:
    """The loss on the test data before and after a few updates of the run."""
    steps = updates * parameters.training.gradient_accumulation_steps
    short = dataclasses.replace(parameters.training, num_train_steps=steps, num_epochs=None)
    paths = dataclasses.replace(parameters.paths, output_dir=None)
    alone = dataclasses.replace(
        parameters, training=short, paths=paths, checkpoint=Checkpoint(), early_stopping=EarlyStopping()
    )
    runner = TrainingRunner(alone, ON_ONE_THREAD, progress=False)
    loader = training_loader(parameters)
    assert parameters.paths.test_data_dir is not None
    test = DataLoader(parameters.data.input_name_map, parameters.paths.test_data_dir, 2, 0, 1)
    try:
        runner.initialize(loader.feature_specs())
        before = runner.evaluate(test).metrics["loss"]
        runner.run(loader)
        return before, runner.evaluate(test).metrics["loss"]
    finally:
        loader.close()
        test.close()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    data = prepare(kind, tmp_path, monkeypatch)
    assert main(["init", "net.onnx", data, *kind.options]) == 0
    written = Path("run.yaml").read_text()
    plain = yaml.safe_load(written)
    for field, value in kind.expected.items():
        section, _, key = field.partition(".")
        assert plain.get(section, {}).get(key, {} if value == {} else None) == value, field
    comments = " ".join(line.strip(" #") for line in written.splitlines() if line.strip().startswith("#"))
    for words in kind.says:
        assert words.lower() in comments.lower(), f"{words!r} is not in the comments: {comments}"
    check_counts(written)
    before, after = losses_of_run(Parameters.load("run.yaml"))
    assert after < before, f"{name}: the test loss went from {before:.4f} to {after:.4f} in {UPDATES} updates"


def check_counts(written: str) -> None:
    """The numbers in the comments are those of the data that were packed."""
    manifests = [read_manifest(Path("data") / part) for part in ("train", "test")]
    assert all(manifest is not None for manifest in manifests)
    train, test = (manifest.sample_count for manifest in manifests if manifest is not None)
    plain = yaml.safe_load(written)
    training = plain["training"]
    size, epochs = training["batch_size"] * training.get("gradient_accumulation_steps", 1), training["num_epochs"]
    updates = -(-train // size)
    joined = " ".join(written.split()).replace(" # ", " ")
    said = f"{train:,} training samples make {updates:,} updates per epoch, {updates * epochs:,} in total"
    assert said in joined, joined
    assert f"the {test:,} test samples are evaluated" in joined.lower()


@pytest.mark.parametrize("name", ["table", "images as bytes", "masked text", "images in folders"])
def test_the_packing_command_in_the_file_gives_the_same_shards(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = prepare(KINDS[name], tmp_path, monkeypatch)
    assert main(["init", "net.onnx", data, "--no-trial"]) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("packing: "))
    command = said.removeprefix("packing: ")
    joined = " ".join(line.lstrip("# ") for line in Path("run.yaml").read_text().splitlines() if line.startswith("#"))
    assert command in joined
    words = shlex.split(command)
    assert words[:2] == ["onward", "pack"]
    assert words[3] == "data"
    assert main(["pack", words[2], "again", *words[4:]]) == 0
    for shard in Path("data").rglob("*.pb"):
        assert (Path("again") / shard.relative_to("data")).read_bytes() == shard.read_bytes()


def test_data_that_are_packed_already_are_used_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    perceptron(5, 1)(tmp_path)
    numbers(5, lambda x: x.sum(1))(tmp_path)
    assert main(["pack", "numbers.npz", "shards", "--test-fraction", "0.2"]) == 0
    assert main(["init", "net.onnx", "shards", "-o", "runs/one.yaml"]) == 0
    parameters = Parameters.load("runs/one.yaml")
    assert parameters.paths.train_data_dir is not None
    assert parameters.paths.train_data_dir.resolve() == tmp_path / "shards" / "train"
    assert not (tmp_path / "runs" / "data").exists()
    before, after = losses_of_run(parameters)
    assert after < before


def test_the_same_command_again_packs_nothing_and_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    perceptron(5, 1)(tmp_path)
    numbers(5, lambda x: x.sum(1))(tmp_path)
    assert main(["init", "net.onnx", "numbers.npz", "--no-trial"]) == 0
    shard = next((tmp_path / "data" / "train").glob("*.pb"))
    written = shard.stat().st_mtime_ns
    assert main(["init", "net.onnx", "numbers.npz", "--no-trial"]) == 2
    assert "'run.yaml' already exists. Pass --force to overwrite it, or -o to write another file." in (
        capsys.readouterr().err
    )
    assert main(["init", "net.onnx", "numbers.npz", "--no-trial", "-o", "other.yaml"]) == 0
    assert "data already holds these data, packed with the same options." in capsys.readouterr().out
    assert shard.stat().st_mtime_ns == written
    again = ["init", "net.onnx", "numbers.npz", "--no-trial", "-o", "third.yaml", "--test-fraction", "0.4"]
    assert main(again) == 2
    assert "'data' holds shards of other data, or packed with other options. Pass --force" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    assert main(["init", "net.onnx", "numbers.npz", "--no-trial", "--force"]) == 0


def test_without_data_the_file_says_which_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """... and with data of that form it trains as it is."""
    monkeypatch.chdir(tmp_path)
    perceptron(5, 3)(tmp_path)
    assert main(["init", "net.onnx"]) == 0
    written = Path("run.yaml").read_text()
    assert "- x: float32 [5]" in written
    assert "- label: int64 [], the number of the class, 0 to 2" in written
    numbers(5, lambda x: x[:, :3].argmax(1), "label")(tmp_path)
    assert main(["pack", "numbers.npz", "data", "--test-fraction", "0.1"]) == 0
    before, after = losses_of_run(Parameters.load("run.yaml"))
    assert after < before


def test_what_is_said_on_the_command_line_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    perceptron(3, 1)(tmp_path)
    table(tmp_path)
    words = (
        "init net.onnx trees.csv --label weight --inputs length,width,height --loss l1 --epochs 7 --batch-size 12 "
        "--learning-rate 0.02 --weights 0.*,2.bias --output-dir there --test-fraction 0.3"
    )
    assert main(words.split()) == 0
    parameters = Parameters.load("run.yaml")
    assert (parameters.loss.type, parameters.loss.label) == ("l1", "weight")
    assert (parameters.training.num_epochs, parameters.training.batch_size) == (7, 12)
    assert parameters.learning_rate.initial_lr == 0.02
    assert parameters.training.weights_to_train == ("0.*", "2.bias")
    assert parameters.paths.output_dir == tmp_path / "there"
    manifest = read_manifest(Path("data/test"))
    assert manifest is not None
    assert 0.2 < manifest.sample_count / 240 < 0.4
    assert "--columns x=length,width,height --columns weight=weight" in capsys.readouterr().out


@pytest.mark.parametrize("classes", [2, 7])
def test_words_that_are_other_classes_than_the_models_get_a_new_last_layer(
    classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    perceptron(4, classes)(tmp_path)
    table(tmp_path)
    assert main(["init", "net.onnx", "trees.csv"]) == 0
    assert Parameters.load("run.yaml").head.num_classes == 3
    assert (
        f"# The labels have 3 classes, the model has {classes}: its last layer is replaced"
        in Path("run.yaml").read_text()
    )
    assert main(["train", "run.yaml", "--training.num_epochs", "1"]) == 0
    assert f"had {classes} outputs; a new one with 3 replaces it" in capsys.readouterr().out
    model = onnx.load("trained/net_trained.onnx")
    assert model.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 3


@pytest.mark.parametrize(
    ("model", "data", "options", "words"),
    [
        (perceptron(6, 3), table, [], ["input 'x' float32 [batch, 6] needs 6 columns, and 'trees.csv' has 5 numeric "
                                       "ones besides the label: 'row', 'length', 'width', 'height', 'weight'",
                                       "Add the columns that are missing."]),
        (perceptron(2, 3), table, [], ["needs 2 columns", "Name the columns with --inputs COLUMN,..."]),
        (perceptron(4, 3), table, ["--label", "leaf"], ["has no column 'leaf'; it has 'row', 'length'"]),
        (perceptron(4, 3), table, ["--prediction", "y"], ["--prediction is 'y'; the outputs of the model are 'out'"]),
        (perceptron(4, 1), table, [], ["it has 1 number per sample, the label 3 classes"]),
        (perceptron(5, 3), numbers(5, lambda x: x.sum(1)), [],
         ["and numbers from", "A regression needs an output of shape [batch, 1] or [batch]."]),
        (perceptron(7, 1), numbers(5, lambda x: x.sum(1)), [],
         ["the model 'net.onnx' reads 'x' float32 [7] per sample, and no feature of the data has that shape",
          "the data hold 'x' float32 [5]; 'y' float32 []"]),
        (perceptron(5, 3), numbers(5, lambda x: x[:, :3].argmax(1) - 1), [],
         ["the smallest label is -1; classes start at 0. Use -100 for labels to ignore."]),
        (perceptron(4, 3), pictures, [],
         ["'pictures' is a folder of images, and 'net.onnx' reads 'x' float32 [batch, 4]: expected one input of "
          "images ([batch, channels, height, width])."]),
        (classifier_of_images(), text, [],
         ["is text without labels, and 'net.onnx' has no input of token ids ([batch, sequence], integers)"]),
        (classifier_of_images(), table, [], ["is a table, and 'net.onnx' reads 'image' float32 [batch, 3, 16, 16]"]),
        (perceptron(4, 3), lambda folder: "nowhere", [], ["source 'nowhere' does not exist"]),
        (perceptron(4, 3), lambda folder: "nowhere", ["-o", "new/run.yaml"], ["source 'nowhere' does not exist"]),
        (perceptron(4, 3), table, ["--epochs", "0"], ["--epochs is 0; expected at least 1."]),
        (perceptron(4, 3), table, ["--learning-rate", "-1"], ["--learning-rate is -1; expected a number above 0."]),
        (perceptron(4, 3), table, ["--test-fraction", "1"], ["--test-fraction is 1; expected a fraction from 0"]),
        (perceptron(4, 3), table, ["--sample-rate", "0"], ["--sample-rate is 0; expected at least 1."]),
        (perceptron(4, 3), table, ["--sample-rate", "8000", "--tokenizer", "bytes"],
         ["--tokenizer and --sample-rate would change nothing for this model, since the data are of kind 'table' "
          "('trees.csv'). Leave it out."]),
        (classifier_of_images(), pictures, ["--inputs", "a,b"], ["--inputs would change nothing", "kind 'images'"]),
        (perceptron(4, 3), table, ["-o", "."], ["--output '.' is a folder; pass a file"]),
    ],
)  # fmt: skip
def test_refusals(
    model, data, options, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = prepare(Kind(model, data, {}), tmp_path, monkeypatch)
    assert main(["init", "net.onnx", source, *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("onward init: ")
    for part in words:
        assert part in said, said
    assert not any(Path(name).exists() for name in ("run.yaml", "data", "new"))


def test_a_table_of_numbers_that_are_not_finite_is_found_by_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def label(x: np.ndarray) -> np.ndarray:
        x[:] = np.nan
        return np.zeros(len(x), np.float32)

    prepare(Kind(perceptron(5, 1), numbers(5, label), {}), tmp_path, monkeypatch)
    assert main(["init", "net.onnx", "numbers.npz", "--loss", "mean_squared_error"]) == 2
    assert "the trial step failed: all 1 weight updates of this round were skipped" in capsys.readouterr().err


def test_fewer_classes_than_outputs_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Kind(perceptron(5, 7), numbers(5, lambda x: x[:, :3].argmax(1)), {}), tmp_path, monkeypatch)
    assert main(["init", "net.onnx", "numbers.npz", "--no-trial"]) == 0
    said = " ".join(re.sub(r"^#", "", line) for line in Path("run.yaml").read_text().splitlines())
    assert "the labels seen have 3 classes, the model's output 'out' has 7" in " ".join(said.split())


@pytest.mark.parametrize(
    ("texts", "options", "command"),
    [(1, [], "pictures data --samples"), (100, ["--kind", "images"], "pictures data --kind images --samples")],
)
def test_files_of_another_kind_in_a_folder(
    texts, options, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Kind(classifier_of_images(), pictures, {}), tmp_path, monkeypatch)
    for number in range(texts):
        Path(f"pictures/readme_{number}.txt").write_text("about")
    if options:
        assert main(["init", "net.onnx", "pictures"]) == 2
        assert f"holds 220 files: 100 of text, 120 of images. Pass {options[0]} text" in capsys.readouterr().err
    assert main(["init", "net.onnx", "pictures", "--no-trial", *options]) == 0
    said = capsys.readouterr().out
    assert f"packing: onward pack {command}" in said
    assert ("not read: 1 of other kinds than images: 'readme_0.txt'." in said) == (not options)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, ["`onward init net.onnx [DATA]` would propose:", "loss: softmax_cross_entropy",
                "data that it needs (shapes of one sample):", "x: float32 [4]"]),
        ("trees.csv", ["`onward init net.onnx trees.csv` would propose:", "from output 'out'",
                       "packing: onward pack trees.csv data", "--test-fraction 0.2"]),
        ("nowhere", ["`onward init net.onnx nowhere` would refuse: source 'nowhere' does not exist"]),
    ],
)  # fmt: skip
def test_inspect_says_what_init_would_do(
    data: str | None,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(Kind(perceptron(4, 3), table, {}), tmp_path, monkeypatch)
    assert main(["inspect", "net.onnx", *([data] if data else [])]) == 0
    said = capsys.readouterr().out
    for part in words:
        assert part in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "trees.csv"]


@pytest.mark.parametrize("name", ["table", "images in folders", "regression [N]"])
def test_what_is_packed_trains_in_several_processes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many shards as most machines have GPUs, of few samples; fewer than processes are refused with what to do."""
    kind = KINDS[name]
    data = prepare(kind, tmp_path, monkeypatch)
    assert main(["init", "net.onnx", data, *kind.options, "--no-trial"]) == 0
    manifest = read_manifest(Path("data/train"))
    assert manifest is not None
    assert 6 <= len(manifest.shards) <= 10
    assert "so that as many processes can train on them" in Path("run.yaml").read_text()
    assert main(["init", "net.onnx", data, *kind.options, "--no-trial", "-o", "run2.yaml"]) == 0
    assert "already holds these data" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"holds (\d+) \.pb files for 30 data-parallel ranks; every rank reads its own"):
        find_shard_files(Path("data/train"), 0, 30)


def test_a_broken_recording_names_the_commands_that_work(tmp_path: Path) -> None:
    """`onward init` takes no --unreadable."""
    source = tmp_path / "clips"
    options = PackOptions(source=AudioOptions(sample_rate=8000, audio_length=8), test_fraction=0.5)
    for name in ("a/1.wav", "a/2.wav", "b/1.wav", "b/2.wav"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(source / name, np.ones(8, np.float32) / 2, 8000)
    (source / "b" / "3.wav").write_bytes(b"RIFF")
    data = tmp_path / "data"
    packing = Packing(source=source, folder=data, options=options, reasons=())
    words = (
        rf"3\.wav' cannot be decoded: .* To start without them: (onward pack {source} {data} --test-fraction 0\.5 "
        rf"--sample-rate 8000 --audio-length 8 --unreadable skip), then onward init MODEL {data}\.$"
    )
    with pytest.raises(DataError, match=words) as error:
        initialization._pack(SimpleNamespace(packing=packing), False, DEFAULT_LIMITS, Phases(lambda *_: None))
    command = re.search(words, str(error.value))
    assert command is not None
    main(shlex.split(command[1])[1:])
    assert (data / "train").is_dir()
