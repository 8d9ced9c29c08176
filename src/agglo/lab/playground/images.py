"""Images of the page: examples that come with agglo, by name, and those that visitors send as data URLs."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from agglo.embedded import classifier as embedded
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.data.image_files import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 8 * 1024 * 1024
MOST_PIXELS = 24_000_000
MOST_ASPECT = 20  # the long side to the short one
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_LIMITS = f"at most {MOST_BYTES // 1024 // 1024} MB and {MOST_PIXELS // 1_000_000} million pixels are accepted"
_PREFIX = "example:"
# Number in the test set. Of the first 300 under a threshold of 0.1, this bag keeps fewest tokens and this shirt most.
_GARMENTS = {"bag": 105, "shirt": 135, "boot": 0, "pullover": 1, "trousers": 2, "dress": 13, "sandal": 82}
EASY, HARD, FIRST, PHOTO = (_PREFIX + name for name in ("bag", "shirt", "boot", "pagoda"))
_N_SCENES, _SCENE_SIDE = 4, 112


@dataclass(frozen=True)
class Example:
    """An image to choose."""

    name: str
    image: Image

    @property
    def value(self) -> str:
        """What a request holds instead of an image."""
        return _PREFIX + self.name


@cache
def garments() -> tuple[Example, ...]:
    """Return single garments and the photograph, for a classifier."""
    from PIL import Image

    images, _ = read_split(embedded.IMAGES, "val")
    found = [Example(name, Image.fromarray(images[number]).convert("RGB")) for name, number in _GARMENTS.items()]
    return (*found, Example("pagoda", open_image(embedded.PHOTO)))


@cache
def scenes() -> tuple[Example, ...]:
    """Return scenes of several garments and the photograph, for a detector."""
    from PIL import Image

    from agglo.lab.tasks.detection.data.scenes import make_scenes

    made = make_scenes(embedded.IMAGES, _N_SCENES, seed=0, split="val", size=_SCENE_SIDE)
    pixels = [made.scene(number).pixels for number in range(_N_SCENES)]
    found = [Example(f"scene {n}", Image.fromarray(each).convert("RGB")) for n, each in enumerate(pixels, start=1)]
    return (*found, Example("pagoda", open_image(embedded.PHOTO)))


def chosen_image(value: str) -> Image:
    """Return what a visitor chose: an example by its value, or the image in a data URL; ValueError if it is neither."""
    if not isinstance(value, str) or not value.startswith(_PREFIX):
        return decode_image(value if isinstance(value, str) else "")
    known = {example.value: example for example in (*garments(), *scenes())}
    if value not in known:
        names = ", ".join(example.name for example in known.values())
        raise ValueError(f"There is no example {value.removeprefix(_PREFIX)[:40]!r}; there are {names}.")
    return known[value].image


def decode_image(url: str) -> Image:
    """Return the image in a data URL, RGB and upright; its size is read before any of its pixels.

    Raises:
        ValueError: It is no image or too large. The message names nothing of the server.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    content = io.BytesIO(_bytes_of(url))
    # Decoders fail in many ways, and their messages may name things of the server.
    damaged = ValueError("The image cannot be read: the file is damaged or not complete.")
    try:
        image = Image.open(content, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"This is no image; accepted are files of {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError:
        raise ValueError(f"The image has too many pixels; {_LIMITS}.") from None
    except Exception:
        raise damaged from None
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"The image has {width} x {height} pixels; {_LIMITS}.")
    if max(image.size) > MOST_ASPECT * min(image.size):
        raise ValueError(f"The image has {width} x {height} pixels; at most {MOST_ASPECT} to 1 is accepted.")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:
        raise damaged from None


def _bytes_of(url: str) -> bytes:
    head, mark, body = url.partition(";base64,")
    if not head.startswith("data:") or not mark:
        raise ValueError("No image came with the request; choose one of the examples or a file.")
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise ValueError(f"The file is too large; {_LIMITS}.")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError:
        raise ValueError("The image did not arrive whole; send it again.") from None
