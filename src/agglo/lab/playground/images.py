"""Images of the page: examples that come with agglo, by name, and those that visitors send as data URLs."""

from __future__ import annotations

import base64
import io
from functools import cache

from PIL import Image as pil
from PIL import ImageOps
from PIL.Image import Image

from agglo.checks import choice
from agglo.embedded import classifier as embedded
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.data.image_files import open_image

MOST_BYTES = 8 * 1024 * 1024
MOST_PIXELS = 24_000_000
MOST_ASPECT = 20  # the long side to the short one
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LIMITS = (
    f"accepted are {', '.join(FORMATS)} of at most {MOST_BYTES // 1024 // 1024} MB, {MOST_PIXELS // 1_000_000} million "
    f"pixels and {MOST_ASPECT} to 1"
)
PREFIX = "example:"  # of a request that names an example
# Number in the test set. Of the first 300 under a threshold of 0.1, this bag keeps fewest tokens and this shirt most.
_GARMENTS = {"bag": 105, "shirt": 135, "boot": 0, "pullover": 1, "trousers": 2, "dress": 13, "sandal": 82}
EASY, HARD, FIRST, PHOTO = (PREFIX + name for name in ("bag", "shirt", "boot", "pagoda"))
_N_SCENES, _SCENE_SIDE = 4, 112


@cache
def garments() -> dict[str, Image]:
    """Return single garments and the photograph by name, for a classifier."""
    images, _ = read_split(embedded.IMAGES, "val")
    found = {name: pil.fromarray(images[number]).convert("RGB") for name, number in _GARMENTS.items()}
    return {**found, "pagoda": open_image(embedded.PHOTO)}


@cache
def scenes() -> dict[str, Image]:
    """Return scenes of several garments and the photograph by name, for a detector."""
    from agglo.lab.tasks.detection.data.scenes import make_scenes

    made = make_scenes(embedded.IMAGES, _N_SCENES, seed=0, split="val", size=_SCENE_SIDE)
    found = {f"scene {n + 1}": pil.fromarray(made.scene(n).pixels).convert("RGB") for n in range(_N_SCENES)}
    return {**found, "pagoda": open_image(embedded.PHOTO)}


def chosen_image(value: str) -> Image:
    """Return what a visitor chose: an example such as "example:boot", or the image in a data URL, RGB and upright.

    Raises:
        ValueError: It is neither, or the image is too large. The message names nothing of the server.
    """
    if value.startswith(PREFIX):
        known = {**scenes(), **garments()}
        return known[choice("example", value.removeprefix(PREFIX), known)]
    head, mark, body = value.partition(";base64,")
    if not head.startswith("data:") or not mark:
        raise ValueError("No image came with the request; choose one of the examples or a file.")
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise ValueError(f"The file is too large; {LIMITS}.")
    try:
        image = pil.open(io.BytesIO(base64.b64decode(body, validate=True)), formats=FORMATS)
    except Exception:  # decoders fail in many ways, and their messages may name things of the server
        raise ValueError(f"This is no image, or too large a one; {LIMITS}.") from None
    width, height = image.size  # which is known before any of its pixels are read
    if width * height > MOST_PIXELS or max(image.size) > MOST_ASPECT * min(image.size):
        raise ValueError(f"The image has {width} x {height} pixels; {LIMITS}.")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:
        raise ValueError("The image cannot be read: the file is damaged or not complete.") from None
