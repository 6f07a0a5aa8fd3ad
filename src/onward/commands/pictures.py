"""Pictures that a command writes: rectangles and texts as .svg, or as .png where pillow is installed."""

from __future__ import annotations

from pathlib import Path

from onward.errors import ParametersError, StorageError
from onward.exclusive.lock import writing_to
from onward.exclusive.temporary import replacing
from onward.plan.report.drawing import WIDTH, Shape, text_corner, to_svg

IMAGE_TYPES = (".svg", ".png")


def checked_image(path: Path) -> Path:
    """The same path.

    Raises:
        ParametersError: pictures of this type are not written.
    """
    if path.suffix.lower() not in IMAGE_TYPES:
        raise ParametersError(f"--image {str(path)!r}: expected a file that ends in {' or '.join(IMAGE_TYPES)}.")
    return path


def write_image(path: Path, shapes: list[Shape], height: int) -> None:
    """Writes a picture.

    Raises:
        StorageError: the file cannot be written.
        ParametersError: a .png needs pillow, which is not installed.
    """
    try:
        with writing_to(files=[path]), replacing(path) as unfinished:
            if path.suffix.lower() == ".svg":
                unfinished.write_text(to_svg(shapes, height), encoding="utf-8")
            else:
                _write_png(unfinished, shapes, height, str(path))
    except OSError as error:
        raise StorageError(f"--image {str(path)!r} cannot be written: {error.strerror}. Name another file.") from error


def _write_png(path: Path, shapes: list[Shape], height: int, name: str) -> None:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ParametersError(
            f"--image {name!r}: writing PNG needs pillow. Run pip install pillow, or write an .svg file."
        ) from error
    scale = 2
    canvas = Image.new("RGB", (WIDTH * scale, height * scale), "#ffffff")
    pen = ImageDraw.Draw(canvas)
    for shape in shapes:
        if shape.width:
            x, y = shape.x * scale, shape.y * scale
            pen.rectangle((x, y, x + max(shape.width * scale - 1, 0), y + shape.height * scale - 1), fill=shape.color)
        if shape.text:
            x, y = text_corner(shape)
            font = ImageFont.load_default(shape.size * scale)
            pen.text((x * scale, y * scale), shape.text, fill="#222222" if shape.width else shape.color, font=font)
    canvas.save(path, format="PNG")
