"""`onward create`: arguments become options, options a file; a large model goes to disk weight by weight."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onward.errors import ParametersError, StorageError
from onward.graph.writing import model_saving
from onward.models import create, create_model
from onward.models.create import save_model


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    create.add_arguments(parser)
    return parser.parse_args(arguments)


def test_every_kind_of_option_reaches_the_model(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.onnx"
    arguments = ["--size", "tiny", "--vocab-size", "99", "--dropout", "0.25", "--no-tied-embedding", "--position-ids"]
    text = create.run(parse("gpt2", "-o", str(path), "--opset", "20", *arguments))
    model = ir.load(path)
    assert model.opset_imports[""] == 20
    assert [value.name for value in model.graph.inputs] == ["input_ids", "position_ids"]
    assert model.graph.outputs[0].shape == ("batch", "sequence", 99)
    assert "lm_head.weight" in model.graph.initializers
    assert "number_0p25" in model.graph.initializers
    assert text.endswith("inputs input_ids int64[batch,sequence], position_ids int64[batch,sequence]; "
                         "outputs logits float[batch,sequence,99]")  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "bert", "squeezenet", "mnist"])
def test_help_shows_defaults(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(name, "--help")
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "version of the ONNX operator set, 13 to 23 (default: 18)" in text
    assert "--dropout FLOAT" in text


def test_files_are_the_same_for_the_same_options(tmp_path: Path) -> None:
    for path in (tmp_path / "a.onnx", tmp_path / "b.onnx"):
        create.run(parse("mnist", "-o", str(path), "--seed", "7"))
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_large_models_have_their_weights_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_saving, "EXTERNAL_ABOVE_BYTES", 100_000)
    path = tmp_path / "large.onnx"
    save_model(create_model("gpt2", size="tiny"), path)
    assert path.stat().st_size < 100_000
    assert (tmp_path / "large.onnx.data").stat().st_size > 3_000_000
    onnx.checker.check_model(str(path), full_check=True)
    read, made = ir.load(path), create_model("gpt2", size="tiny")
    for name, value in made.graph.initializers.items():
        assert value.const_value is not None
        there = read.graph.initializers[name].const_value
        assert there is not None
        assert (there.numpy() == value.const_value.numpy()).all()


@pytest.mark.slow
def test_building_xl_needs_no_memory_for_its_weights() -> None:
    """1,557,611,200 numbers are 6.2 GB; the graph is made with less than 0.2 GB more than before it."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = create_model("gpt2", size="xl")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = [v.const_value for v in model.graph.initializers.values() if v.const_value and "." in str(v.name)]
    assert sum(tensor.size for tensor in weights) == 1_557_611_200
    assert (after - before) * 1024 < 200_000_000


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    model = create_model("mnist")
    with pytest.raises(ParametersError, match="is a directory; give the name of a file"):
        save_model(model, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written: (File exists|Not a directory).*Choose another path"):
        save_model(model, tmp_path / "file" / "model.onnx")
