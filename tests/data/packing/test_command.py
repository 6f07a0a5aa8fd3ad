import argparse

import numpy as np
import pytest

from onward.data import DataLoader
from onward.data.packing import add_arguments, run
from onward.data.packing.options import KINDS, PackOptions
from onward.errors import ParametersError


def parse(*words):
    parser = argparse.ArgumentParser(prog="onward pack")
    add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_every_option_has_help_and_says_its_default(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for options_type in (PackOptions, *KINDS.values()):
        for name, field in options_type.__dataclass_fields__.items():
            if name not in ("source", "limits"):
                assert "--" + name.replace("_", "-") in text
                assert field.metadata["help"]
    assert "tokens of a sample (of conversations 1024) (default: 256)" in text


def test_words_become_typed_options(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(20), y=np.arange(20), z=np.zeros(3))
    arguments = parse(
        tmp_path / "a.npz", tmp_path / "out", "--arrays", "x", "--arrays", "y", "--samples-per-file", "8",
        "--no-progress", "--cast", "x=float32", "--cast", "y=int32",
    )  # fmt: skip
    assert run(arguments).sample_count == 20
    loader = DataLoader({}, tmp_path / "out")
    assert len(loader.files) == 3
    assert {name: str(spec.dtype) for name, spec in loader.feature_specs().items()} == {"x": "float32", "y": "int32"}


def test_text_from_the_command_line(tmp_path):
    (tmp_path / "a.log").write_text("hello world")
    arguments = parse(
        tmp_path / "a.log",
        tmp_path / "out",
        "--kind",
        "text",
        "--sequence-length",
        "5",
        "--position-ids",
        "--no-progress",
    )
    assert run(arguments).sample_count == 2
    assert set(DataLoader({}, tmp_path / "out").feature_specs()) == {"tokens", "labels", "position_ids"}


def test_an_option_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello world")
    with pytest.raises(ParametersError, match=r"--image-size is an option for images, but .* is packed as text"):
        run(parse(tmp_path / "a.txt", tmp_path / "out", "--image-size", "8"))


def test_words_that_cannot_be_read_are_named(tmp_path, capsys):
    for words, message in (
        (("--image-size", "axb"), "argument --image-size: invalid literal for int"),
        (("--columns", "x"), "argument --columns: 'x' is not NAME=VALUE"),
        (("--samples-per-file", "many"), "argument --samples-per-file: invalid literal"),
        (("--objective", "next"), "argument --objective: invalid choice: 'next'"),
    ):
        with pytest.raises(SystemExit):
            parse(tmp_path, tmp_path / "out", *words)
        assert message in capsys.readouterr().err


def test_sizes_and_numbers(tmp_path):
    arguments = parse(tmp_path, tmp_path, "--image-size", "24x32", "--mean", "0.5,0.25,0", "--columns", "x=a,b*")
    assert arguments.image_size == (24, 32)
    assert arguments.mean == (0.5, 0.25, 0)
    assert arguments.columns == [("x", "a,b*")]
    assert parse(tmp_path, tmp_path, "--image-size", "28").image_size == (28, 28)
