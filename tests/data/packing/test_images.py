import numpy as np
import pytest
from PIL import Image

from onward.data import DataLoader
from onward.data.manifest import read_manifest
from onward.data.packing import ImageOptions, PackOptions, pack
from onward.errors import DataError, ParametersError

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path):
    """Images of one colour each, of several sizes and formats."""
    for name, color in COLORS.items():
        (tmp_path / "in" / name / "deeper").mkdir(parents=True)
        for k in range(4):
            where = tmp_path / "in" / name / ("deeper" if k == 3 else "") / f"{k}.{['png', 'bmp', 'jpg', 'gif'][k]}"
            Image.new("RGB", (30 + 10 * k, 40), color).save(where)
    return tmp_path / "in"


def pack_images(source, dest, **options):
    pack(source, dest, PackOptions(source=ImageOptions(**options), progress=False))
    (batch,) = DataLoader({}, dest).one_pass(1000)
    return batch.features["image"], batch.features["label"]


def test_folders_are_classes_in_order_of_name(folder, tmp_path):
    images, labels = pack_images(folder, tmp_path / "out", image_size=(8, 6))
    assert images.shape == (12, 3, 8, 6)
    assert images.dtype == np.float32
    assert sorted(labels.tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    assert labels.tolist() != sorted(labels.tolist())
    for image, label in zip(images, labels, strict=True):
        color = np.array(list(COLORS.values())[label]) / 255
        np.testing.assert_allclose(image, np.broadcast_to(color[:, None, None], image.shape), atol=0.02)
    details = read_manifest(tmp_path / "out").details
    assert details == {"classes": ["blue", "green", "red"], "images_per_class": {"blue": 4, "green": 4, "red": 4}}


def test_order_of_names_on_request(folder, tmp_path):
    _, labels = pack_images(folder, tmp_path / "out", image_size=(4, 4), shuffle_images=False)
    assert labels.tolist() == sorted(labels.tolist())


def test_normalization_and_grayscale(tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5
    (tmp_path / "in" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "in" / "a" / "x.png")
    images, _ = pack_images(
        tmp_path / "in", tmp_path / "rgb", image_size=(4, 4), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0)
    )
    expected = (pixels.astype(np.float64) / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.25, 2.0]
    np.testing.assert_allclose(images[0], expected.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)
    images, _ = pack_images(tmp_path / "in", tmp_path / "gray", image_size=(4, 4), image_mode="grayscale", mean=(0.5,))
    assert images.shape == (1, 1, 4, 4)
    luma = pixels @ np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, which pillow names for "L"
    np.testing.assert_allclose(images[0, 0], luma / 255 - 0.5, atol=1.01 / 255)


def as_file(folder, image, kind):
    (folder / "a").mkdir(parents=True)
    image.save(folder / "a" / f"x.{kind}")
    return folder


@pytest.mark.parametrize("mode", ["grayscale", "rgb"])
def test_16_bits_are_a_range_of_their_own(mode, tmp_path):
    """X-rays, depth maps: pillow's conversion takes all above 255 for white."""
    pixels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    source = as_file(tmp_path / "in", Image.fromarray(pixels), "png")
    images, _ = pack_images(source, tmp_path / "out", image_size=(8, 8), image_mode=mode)
    assert images.shape[1] == (1 if mode == "grayscale" else 3)
    np.testing.assert_allclose(images, np.broadcast_to(pixels / 65535, images.shape), rtol=0, atol=1e-6)
    half, _ = pack_images(source, tmp_path / "half", image_size=(4, 4), image_mode=mode)
    assert half.mean() == pytest.approx((pixels / 65535).mean(), abs=1e-3)


KINDS = {
    "1": np.array([[0, 1], [1, 0]]),
    "L": np.array([[0, 100], [200, 255]]) / 255,
    "I;16": np.array([[0, 0.5], [0.7, 1]]),
}


@pytest.mark.parametrize("mode", KINDS)
def test_every_depth_of_gray_is_between_0_and_1(mode, tmp_path):
    wanted = KINDS[mode]
    kinds = {"1": lambda: Image.fromarray(wanted > 0), "L": lambda: Image.fromarray((wanted * 255).astype(np.uint8))}
    image = kinds.get(mode, lambda: Image.fromarray((wanted * 65535).astype(np.uint16)))()
    assert image.mode == mode
    source = as_file(tmp_path / "in", image, "png")
    images, _ = pack_images(source, tmp_path / "out", image_size=(2, 2), image_mode="grayscale")
    np.testing.assert_allclose(images[0, 0], wanted, atol=0.5 / 255)


@pytest.mark.parametrize(("dtype", "what"), [(np.float32, "floating-point numbers"), (np.int32, "32-bit integers")])
def test_numbers_without_a_range_are_refused(dtype, what, tmp_path):
    source = as_file(tmp_path / "in", Image.fromarray(np.ones((4, 4), dtype)), "tiff")
    words = rf"x\.tiff' cannot be decoded: its pixels are {what}, whose range the file does not say; save it in 8 or 16"
    with pytest.raises(DataError, match=words):
        pack_images(source, tmp_path / "out", image_size=(4, 4), image_mode="grayscale")


def test_crop_keeps_proportions_and_stretch_does_not(tmp_path):
    """Left half black, right half white, twice as wide as high."""
    pixels = np.zeros((10, 40), np.uint8)
    pixels[:, 30:] = 255
    (tmp_path / "in" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "in" / "a" / "x.png")
    options = {"image_size": (10, 10), "image_mode": "grayscale"}
    cropped, _ = pack_images(tmp_path / "in", tmp_path / "crop", **options)
    stretched, _ = pack_images(tmp_path / "in", tmp_path / "stretch", resize="stretch", **options)
    assert cropped.max() == 0
    np.testing.assert_allclose(stretched[0, 0, 5, [0, 5, 9]], [0, 0, 1], atol=0.01)


def test_a_camera_turned_on_its_side(tmp_path):
    pixels = np.zeros((8, 8), np.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the scene is on the right: turn clockwise
    (tmp_path / "in" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "in" / "a" / "x.png", exif=exif)
    images, _ = pack_images(tmp_path / "in", tmp_path / "out", image_size=(8, 8), image_mode="grayscale")
    np.testing.assert_array_equal(images[0, 0], np.tile([0, 0, 0, 0, 1, 1, 1, 1], (8, 1)))


def test_broken_images_are_named_or_left_out(folder, tmp_path):
    (folder / "red" / "broken.png").write_bytes(b"\x89PNG but no more")
    with pytest.raises(DataError, match=r"broken\.png' cannot be decoded: .*--unreadable skip"):
        pack_images(folder, tmp_path / "out")
    images, _ = pack_images(folder, tmp_path / "out", image_size=(4, 4), unreadable="skip")
    assert len(images) == 12
    details = read_manifest(tmp_path / "out").details
    assert details["images_skipped"] == [str(folder / "red" / "broken.png")]
    assert details["images_per_class"] == {"blue": 4, "green": 4, "red": 4}, "what is packed"


def test_images_in_no_class_folder_are_refused(folder, tmp_path):
    Image.new("RGB", (4, 4)).save(folder / "stray.png")
    with pytest.raises(DataError, match=r"stray\.png' is in no class folder; expected '.*CLASS/stray\.png'"):
        pack_images(folder, tmp_path / "out")


def test_bad_options_are_refused():
    with pytest.raises(ParametersError, match=r"mean has 2 numbers; expected 1 or 3 \(rgb\)"):
        ImageOptions(mean=(1.0, 2.0))
    with pytest.raises(ParametersError, match="must be above 0"):
        ImageOptions(std=(0.0,))
