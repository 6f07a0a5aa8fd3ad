"""Operations on features while they are packed, against numpy and pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onward.data.packing import ArrayOptions, PackOptions, TextOptions, pack
from onward.data.packing.transforms import IGNORED_LABEL, OPERATIONS, make_transforms
from onward.data.shard_format import read_samples
from onward.errors import DataError, ParametersError

IMAGE = np.random.default_rng(0).integers(0, 256, (6, 5, 3)).astype(np.uint8)


def apply(array: np.ndarray, *operations: str) -> dict[str, np.ndarray]:
    return make_transforms([("x", operation) for operation in operations])({"x": array})


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        (("transpose:2,0,1",), IMAGE.transpose(2, 0, 1)),
        (("reshape:90",), IMAGE.reshape(90)),
        (("reshape:",), None),
        (("scale:0.5",), IMAGE * np.float32(0.5)),
        (("shift:-1",), IMAGE.astype(np.int64) - 1),
        (("shift:0.5",), IMAGE + np.float32(0.5)),
        (("transpose:2,0,1", "normalize:1,2,3/4,5,6"),
         (IMAGE.transpose(2, 0, 1) - np.float32([1, 2, 3])[:, None, None]) / np.float32([4, 5, 6])[:, None, None]),
        (("reshape:1x90", "repeat:3"), np.repeat(IMAGE.reshape(1, 90), 3, axis=0)),
    ],
)  # fmt: skip
def test_operations_do_what_numpy_does(operations: tuple[str, ...], expected: np.ndarray | None) -> None:
    if expected is None:
        found = apply(np.array([[7]]), *operations)["x"]
        assert found.shape == ()
        return
    found = apply(IMAGE, *operations)["x"]
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


def test_images_are_resized_as_pillow_does_and_labels_keep_their_numbers() -> None:
    planes = IMAGE.transpose(2, 0, 1)
    found = apply(planes, "resize:3x4")["x"]
    wanted = [np.asarray(Image.fromarray(one).resize((4, 3), Image.Resampling.BILINEAR)) for one in planes]
    assert found.dtype == np.uint8
    assert np.abs(found.astype(int) - np.stack(wanted).astype(int)).max() <= 1  # pillow rounds uint8 twice
    labels = np.array([[0, 9], [9, 0]], np.int64)
    assert set(np.unique(apply(labels, "resize:7x5")["x"])) == {0, 9}


def test_features_made_from_tokens() -> None:
    tokens = np.array([5, 6, 7], np.int64)
    found = apply(tokens, "next-token:labels", "ones:mask", "zeros:types", "positions:places")
    assert found["labels"].tolist() == [6, 7, IGNORED_LABEL]
    assert (found["mask"].tolist(), found["types"].tolist(), found["places"].tolist()) == ([1] * 3, [0] * 3, [0, 1, 2])
    assert found["x"].tolist() == [5, 6, 7]


def test_one_hot() -> None:
    assert apply(np.array([0, 2]), "one-hot:3")["x"].tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(DataError, match=r"one-hot:2: impossible for shape \[2\]: class 2 is not among 0 to 1"):
        apply(np.array([0, 2]), "one-hot:2")


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("rotate:90", "there is no operation 'rotate'; expected one of transpose, reshape"),
        ("transpose:0,0", r"the order of the axes \(transpose:2,0,1\) expected after the colon"),
        ("resize:8", r"height and width \(resize:224x224\) expected"),
        ("scale:two", r"a factor \(scale:0.5\) expected"),
        ("next-token", r"the name of the feature to add \(next-token:labels\) expected"),
        ("normalize:1,2/1", "means and deviations"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_read(operation: str, message: str) -> None:
    with pytest.raises(ParametersError, match=message):
        make_transforms([("x", operation)])


def test_every_operation_says_what_it_expects() -> None:
    from onward.data.packing.transforms import EXPECTED

    assert OPERATIONS.keys() == EXPECTED.keys()


def test_a_shape_that_does_not_fit_and_a_feature_that_is_not_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 6), np.float32))
    with pytest.raises(DataError, match=r"--transform x=reshape:7: impossible for shape \[6\]"):
        pack(tmp_path / "a.npz", tmp_path / "d", PackOptions(source=ArrayOptions(), transform=(("x", "reshape:7"),)))
    with pytest.raises(ParametersError, match="--transform names 'z'; the samples hold 'x'"):
        pack(tmp_path / "a.npz", tmp_path / "d", PackOptions(source=ArrayOptions(), transform=(("z", "reshape:6"),)))


def test_masked_text_keeps_the_tokens_and_labels_only_what_is_masked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a word or two " * 400)
    options = PackOptions(source=TextOptions(objective="masked", sequence_length=40), progress=False)
    pack(tmp_path / "a.txt", tmp_path / "masked", options)
    pack(tmp_path / "a.txt", tmp_path / "again", options)
    samples = list(read_samples(next((tmp_path / "masked").glob("*.pb"))))
    again = list(read_samples(next((tmp_path / "again").glob("*.pb"))))
    text = ("a word or two " * 400).encode()
    masked = replaced = kept = 0
    for number, sample in enumerate(samples):
        np.testing.assert_array_equal(sample["tokens"], again[number]["tokens"])
        original = np.frombuffer(text[number * 40 : number * 40 + 40], np.uint8).astype(np.int64) + 5
        labelled = sample["labels"] != IGNORED_LABEL
        assert labelled.sum() == 6  # 15 % of 40
        np.testing.assert_array_equal(sample["labels"][labelled], original[labelled])
        np.testing.assert_array_equal(sample["tokens"][~labelled], original[~labelled])
        masked += int((sample["tokens"][labelled] == 4).sum())
        kept += int((sample["tokens"][labelled] == original[labelled]).sum())
        replaced += int(((sample["tokens"] != original) & (sample["tokens"] != 4)).sum())
    total = 6 * len(samples)
    assert abs(masked / total - 0.8) < 0.06
    assert abs(kept / total - 0.1) < 0.05
    assert abs(replaced / total - 0.1) < 0.05
