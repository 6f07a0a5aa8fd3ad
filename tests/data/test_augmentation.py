"""Images varied during training: what each operation computes, and that the same sample is always varied alike."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
import yaml

from onward.cli import main
from onward.data.augmentation import augmented, vary
from onward.data.batches import Batch, DataCursor
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import DataError, ParametersError
from onward.parameters import Augmentation
from tests.mlp import write_shards
from tests.plan.staged_models import Sketch

IMAGES = np.random.default_rng(0).random((12, 3, 6, 8), dtype=np.float32)


def batch(images: np.ndarray = IMAGES, epoch: int = 0, **others: np.ndarray) -> Batch:
    features = {"x": images, **others}
    origin = (("memory", range(len(images))),)
    return Batch(features=features, cursor=DataCursor(), sample_count=len(images), epoch=epoch, origin=origin)


def varied(given: Batch | None = None, labels: tuple[str, ...] = (), seed: int = 0, **asked: Any) -> np.ndarray:
    return vary(given or batch(), Augmentation(feature="x", **asked), labels, seed).features["x"]


def test_nothing_asked_changes_nothing() -> None:
    assert np.array_equal(varied(), IMAGES)
    source = iter([batch()])
    assert next(augmented(source, Augmentation(), (), 0)).features["x"] is IMAGES


@pytest.mark.parametrize(("field", "axis"), [("horizontal_flip", 2), ("vertical_flip", 1)])
def test_images_are_mirrored_by_share(field: str, axis: int) -> None:
    assert np.array_equal(varied(**{field: 1.0}), np.flip(IMAGES, axis + 1))
    flipped = [not np.array_equal(one, own) for one, own in zip(varied(**{field: 0.5}), IMAGES, strict=True)]
    assert 0 < sum(flipped) < len(IMAGES)


def test_crops_are_parts_of_the_padded_image() -> None:
    """Padded with black, which is -mean / std of a normalized image; not all at the same place."""
    normalized = (IMAGES - 0.5) / 0.25
    places = set()
    for one, own in zip(varied(batch(normalized), crop_padding=2, mean=(0.5,), std=(0.25,)), normalized, strict=True):
        padded = np.pad(own, ((0, 0), (2, 2), (2, 2)), constant_values=-2)
        found = [
            (top, left) for top in range(5) for left in range(5)
            if np.allclose(padded[:, top : top + 6, left : left + 8], one, atol=1e-5)
        ]  # fmt: skip
        assert len(found) == 1
        places.update(found)
    assert len(places) > 5


def test_enlarged_parts_are_what_torch_interpolates() -> None:
    """Of a ramp, whose interpolation is a ramp: its slope is the part's share of a side, its area as asked."""
    ramp = np.stack([np.broadcast_to(np.arange(64.0)[:, None], (64, 64)), np.broadcast_to(np.arange(64.0), (64, 64))])
    images = np.broadcast_to(np.concatenate([ramp, ramp[:1]]).astype(np.float32), (12, 3, 64, 64))
    areas = []
    for one in varied(batch(images), smallest_crop=0.3):
        down, right = np.diff(one[0, 2:-2, 32]), np.diff(one[1, 32, 2:-2])
        inner = [side[(side > 1e-3)] for side in (down, right)]
        shares = [float(np.median(side)) for side in inner]
        np.testing.assert_allclose(inner[0], shares[0], atol=1e-3)
        areas.append(shares[0] * shares[1])
        assert 0.74 < shares[0] / shares[1] < 1.35 or max(shares) > 0.99
    assert 0.25 < min(areas) < 0.7 < max(areas) <= 1.0
    whole = torch.from_numpy(IMAGES)
    same = F.interpolate(whole, size=(6, 8), mode="bilinear", align_corners=False).numpy()
    np.testing.assert_allclose(varied(smallest_crop=1.0), same, atol=1e-6)


def test_colors_change_within_their_bounds() -> None:
    gray = np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), IMAGES, (0, 1))[:, None]
    brightness = varied(brightness=0.4) / IMAGES
    factors = brightness.reshape(12, -1).mean(1)
    np.testing.assert_allclose(brightness, np.broadcast_to(factors[:, None, None, None], brightness.shape), rtol=1e-4)
    assert 0.6 <= factors.min() < 0.9 < 1.1 < factors.max() <= 1.4
    means = gray.mean((1, 2, 3), keepdims=True)
    contrast = (varied(contrast=0.4) - means) / (IMAGES - means)
    assert 0.6 <= np.median(contrast) <= 1.4
    np.testing.assert_allclose(np.ptp(contrast.reshape(12, -1), axis=1), 0, atol=2e-2)
    saturated = varied(saturation=0.4)
    found = np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), saturated, (0, 1))[:, None]
    np.testing.assert_allclose(found, gray, atol=1e-5)
    assert not np.allclose(saturated, IMAGES)
    assert np.allclose(varied(batch(IMAGES[:, :1]), saturation=0.4), IMAGES[:, :1])


def test_mixed_samples_are_mixed_with_their_labels() -> None:
    labels = np.eye(12, dtype=np.float32)
    found = vary(batch(y=labels), Augmentation(feature="x", mixup_alpha=0.4), ("y",), 0).features
    np.testing.assert_allclose(found["y"].sum(1), 1, atol=1e-6)
    assert ((found["y"] > 0).sum(1) <= 2).all()
    assert ((found["y"] > 0.01).sum(1) == 2).any()
    np.testing.assert_allclose(found["x"], np.tensordot(found["y"], IMAGES, 1), atol=1e-5)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_are_of_a_beta_distribution(alpha: float) -> None:
    """Mean 1/2 and variance 1 / (4 (2 alpha + 1)), within five standard errors of 4,000 draws."""
    count = 4000
    images = np.zeros((count, 1, 1), np.float32)
    labels = np.eye(count, dtype=np.float32)
    shares = vary(batch(images, y=labels), Augmentation(feature="x", mixup_alpha=alpha), ("y",), 1).features["y"]
    own = np.diag(shares)
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(own.mean() - 0.5) < 5 * np.sqrt(variance / count)
    assert abs(own.var() / variance - 1) < 0.15


EVERYTHING: dict[str, Any] = {
    "horizontal_flip": 0.5, "vertical_flip": 0.5, "crop_padding": 2, "smallest_crop": 0.5, "brightness": 0.2,
    "contrast": 0.2, "saturation": 0.2, "mean": (0.4,), "std": (0.3,),
}  # fmt: skip


def test_a_sample_is_varied_alike_wherever_it_is_read() -> None:
    """By seed, epoch and its own number: not by its place in the batch; another epoch or seed gives another image."""
    found = varied(**EVERYTHING)
    rows = np.array([7, 2, 9])
    picked = Batch(
        features={"x": IMAGES[rows]}, cursor=DataCursor(), sample_count=3, epoch=0, origin=(("memory", rows),)
    )
    assert np.array_equal(varied(picked, **EVERYTHING), found[rows])
    assert not np.array_equal(varied(batch(epoch=1), **EVERYTHING), found)
    assert not np.array_equal(varied(seed=1, **EVERYTHING), found)


@pytest.mark.parametrize("size", [6, 300])
def test_batches_continue_from_a_cursor(size: int) -> None:
    """Of small images, and of large ones, which another thread varies."""
    images = np.random.default_rng(1).random((10, 3, size, size), dtype=np.float32)
    loader = InMemoryDataLoader({"x": images, "y": np.eye(10, dtype=np.float32)}, shuffle=True, seed=3)
    asked = Augmentation(feature="x", mixup_alpha=0.3, **EVERYTHING)

    def read(count: int, cursor: DataCursor) -> list[Batch]:
        stream = augmented(loader.batches(4, cursor), asked, ("y",), 5)
        found = [next(stream) for _ in range(count)]
        stream.close()
        return found

    whole = read(6, DataCursor())
    again = read(3, whole[2].cursor)
    for one, other in zip(whole[3:], again, strict=True):
        assert np.array_equal(one.features["x"], other.features["x"])
        assert np.array_equal(one.features["y"], other.features["y"])


@pytest.mark.parametrize("asked", [{"smallest_crop": 0.5, "contrast": 0.4}, {"mixup_alpha": 0.4, "crop_padding": 2}])
def test_threads_vary_images_as_one_does(asked: dict[str, Any]) -> None:
    images = np.random.default_rng(1).random((40, 3, 64, 64), dtype=np.float32)
    labels = np.random.default_rng(2).random((40, 5), dtype=np.float32)
    of_threads = []
    for threads in (1, 3):
        before = threading.active_count()
        found = augmented(
            (batch(images, epoch, y=labels) for epoch in range(3)),
            Augmentation(feature="x", **asked),
            ("y",),
            3,
            threads,
        )
        of_threads.append([next(found) for _ in range(3)])
        assert threads == 1 or any(thread.name.startswith("onward-images") for thread in threading.enumerate())
        assert list(found) == []
        assert threading.active_count() == before
    for one, several in zip(*of_threads, strict=True):
        assert not np.array_equal(one.features["x"], images)
        for name, array in one.features.items():
            assert array.tobytes() == several.features[name].tobytes()


def test_what_fails_in_a_thread_is_raised() -> None:
    images = np.zeros((40, 3, 64, 64), np.float32)
    several = iter([batch(images), batch(np.zeros((40, 2, 64, 64), np.float32))])
    found = augmented(
        several, Augmentation(feature="x", channels="first", horizontal_flip=0.5, mean=(0, 0, 0)), (), 0, 3
    )
    next(found)
    with pytest.raises(ParametersError, match="the images have 2 channels"):
        next(found)


def test_layouts_and_types_of_images() -> None:
    """Channels last, one channel without an axis, and bytes, whose rounding is the only difference."""
    found = varied(**EVERYTHING)
    last = varied(batch(np.ascontiguousarray(np.moveaxis(IMAGES, 1, -1))), **EVERYTHING)
    assert np.array_equal(np.moveaxis(last, -1, 1), found)
    flat = varied(batch(IMAGES[:, 0]), **EVERYTHING)
    assert flat.shape == (12, 6, 8)
    assert np.array_equal(flat[:, None], varied(batch(IMAGES[:, :1]), **EVERYTHING))
    pixels = np.rint(IMAGES * 255).astype(np.uint8)
    plain = {**EVERYTHING, "mean": (0.0,), "std": (1.0,)}
    as_bytes, as_floats = varied(batch(pixels), **plain), varied(batch(pixels.astype(np.float32)), **plain)
    assert as_bytes.dtype == np.uint8
    assert np.abs(as_bytes - np.clip(as_floats, 0, 255)).max() <= 0.501


def model() -> ir.Model:
    sketch = Sketch(seed=1)
    value = sketch.input("x", ["batch", 3, 6, 8])
    value = sketch.node("Flatten", "flat", value)
    return sketch.model(sketch.node("MatMul", "logits", value, sketch.weight("weight", 144, 4)))


def test_a_run_that_is_resumed_has_the_same_bits(tmp_path: Path) -> None:
    """And evaluates images as they are; without augmentation its weights would be others."""
    data = {"x": IMAGES, "label": np.eye(4, dtype=np.float32)[np.arange(12) % 4]}
    ir.save(model(), tmp_path / "model.onnx")
    write_shards(tmp_path / "train", data)
    run = {
        "paths": {"model_path": "model.onnx", "train_data_dir": "train", "output_dir": "out"},
        "loss": {
            "type": "softmax_cross_entropy", "prediction": "logits", "label": "label", "dense_labels": True,
        },
        "training": {"batch_size": 4, "num_train_steps": 8, "seed": 3},
        "learning_rate": {"initial_lr": 0.1},
        "data": {"shuffle_data": True},
        "augmentation": {"feature": "x", "mixup_alpha": 0.3, **{k: v for k, v in EVERYTHING.items() if k not in (
            "mean", "std")}},
    }  # fmt: skip

    def trained(name: str, steps: int, **changes: Any) -> np.ndarray:
        paths = {**run["paths"], "output_dir": f"{name}_out"}
        training = {**run["training"], "num_train_steps": steps}
        checkpoint = {"checkpoints_dir": f"{name}_checkpoints"}
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump({**run, "paths": paths, "training": training, "checkpoint": checkpoint, **changes})
        )
        assert main(["train", str(path)]) == 0
        loaded = ir.load(tmp_path / f"{name}_out" / "model_trained.onnx")
        found: np.ndarray = loaded.graph.initializers["weight"].const_value.numpy()
        return found

    whole = trained("whole", 8)
    trained("parts", 4)
    assert np.array_equal(trained("parts", 8), whole)
    assert not np.allclose(trained("plain", 8, augmentation={}), whole, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "asked", "words"),
    [
        (batch(), {"feature": "y"}, r"augmentation.feature is 'y'; the data hold 'x'. Name one of them"),
        (batch(IMAGES[:, :, 0, 0]), {}, r"'x', whose samples are \[3\]; expected \[channels, height, width\]"),
        (
            batch(np.zeros((2, 3, 5, 3))),
            {},
            r"\[3, 5, 3\]; either axis may hold its channels: set augmentation.channels",
        ),
        (batch(np.zeros((2, 7, 5, 6))), {}, r"\[7, 5, 6\]; expected .* or set augmentation.channels"),
        (batch(), {"mean": (0.1, 0.2)}, r"augmentation.mean has 2 numbers, and the images have 3 channels; give one"),
        (
            batch(y=np.arange(12)),
            {"mixup_alpha": 1.0},
            r"label 'y' is int64; expected floats. .* y=one-hot:CLASSES and",
        ),
        (batch(), {"mixup_alpha": 1.0}, r"the label 'y' is missing; expected floats"),
    ],
)
def test_what_does_not_fit_is_refused(given: Batch, asked: dict[str, Any], words: str) -> None:
    with pytest.raises((DataError, ParametersError), match=words):
        vary(given, Augmentation(**{"feature": "x", **asked}), ("y",), 0)
