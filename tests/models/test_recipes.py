"""The recipes: their RUN.yaml files are complete, and their scripts do what they say."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onward.data import ShardWriter
from onward.models import create_model
from onward.parameters import Parameters

RECIPES = Path(__file__).parents[2] / "recipes"


def load_script(name: str) -> ModuleType:
    path = RECIPES / name
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"size": "tiny"}),
        ("bert", {"size": "tiny"}),
        ("squeezenet", {"image_size": 8, "channels": 1, "classes": 10, "batch_norm": True}),
        ("mnist", {"variant": "conv", "image_size": 8}),
    ],
)
def test_every_recipe_fits_its_model(name: str, options: dict[str, object]) -> None:
    """Every input of the model gets a feature, the loss reads its outputs, and no weight without decay is forgotten."""
    parameters = Parameters.load(RECIPES / name / "run.yaml")
    graph = create_model(name, **options).graph
    outputs = {value.name for value in graph.outputs}
    if parameters.loss.type == "bert":
        assert outputs == {parameters.loss.masked_lm_prediction, parameters.loss.next_sentence_prediction}
    else:
        assert outputs == {parameters.loss.prediction}
    fed = set(parameters.data.input_name_map.values()) or {"images", "labels"}
    assert {value.name for value in graph.inputs} < fed
    assert parameters.paths.model_path.name == f"{name}.onnx"
    for later in (parameters, *parameters.next_rounds):
        assert later.paths.train_data_dir != later.paths.test_data_dir


def test_digits_are_written_and_split(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    digits = load_script("digits.py")
    assert digits.write_digits(tmp_path) == {"digits_test.npz": 360, "digits_train.npz": 1437}
    seen = 0
    for name in ("digits_test.npz", "digits_train.npz"):
        with np.load(tmp_path / name) as archive:
            images, labels = archive["images"], archive["labels"]
        assert images.dtype == np.float32
        assert images.shape[1:] == (1, 8, 8)
        assert images.min() == 0
        assert images.max() == 1
        assert labels.dtype == np.int64
        assert set(labels.tolist()) == set(range(10))
        seen += len(images)
    assert seen == 1797


def test_unigram_entropy_of_known_tokens(tmp_path: Path) -> None:
    """Half zeros, a quarter ones, a quarter threes: 1.5 bits."""
    for number in range(2):
        with ShardWriter(tmp_path / f"shard-{number}.pb") as writer:
            writer.write({"labels": np.array([0, 0, 1, 3], dtype=np.int64)})
            writer.write({"labels": np.array([3, 1, 0, 0], dtype=np.int64)})
    entropy, count = load_script("gpt2/unigram_entropy.py").unigram_entropy(tmp_path, "labels")
    assert entropy == pytest.approx(1.5 * math.log(2), rel=1e-12)
    assert count == 16


def test_drawing_follows_temperature_and_top_k() -> None:
    draw = load_script("gpt2/sample.py").draw
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
    generator = np.random.default_rng(0)
    assert draw(logits, 0.0, 0, generator) == 3
    counts = np.bincount([draw(logits, 1.0, 0, generator) for _ in range(20_000)], minlength=4) / 20_000
    assert counts == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.015)
    counts = np.bincount([draw(logits, 0.5, 2, generator) for _ in range(20_000)], minlength=4) / 20_000
    assert counts == pytest.approx([0, 0, 0.36, 0.64], abs=0.015)


def test_a_text_grows_past_the_context(tmp_path: Path) -> None:
    """The same seed draws the same text; the model never sees more than its context."""
    model = create_model("gpt2", size="tiny", layers=1, width=16, heads=2, vocab_size=20, context_length=6)
    ir.save(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    continue_text = load_script("gpt2/sample.py").continue_text
    texts = [list(continue_text(session, [3, 4], 15, 1.0, 0, seed)) for seed in (7, 7, 8)]
    assert len(texts[0]) == 15
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("script", ["digits.py", "accuracy.py", "gpt2/sample.py", "gpt2/unigram_entropy.py"])
def test_scripts_explain_themselves(script: str) -> None:
    done = subprocess.run([sys.executable, RECIPES / script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
