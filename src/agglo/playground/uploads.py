"""Pictures that visitors send, as text: a data URL. Whatever is wrong with one is said in a sentence."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 8 * 1024 * 1024
MOST_PIXELS = 24_000_000
MOST_TO_ONE = 20  # the long side to the short one
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HEAD = "data:"
_MARK = ";base64,"


def decoded(text: str) -> Image:
    """The picture in a data URL, RGB and the right way up; ValueError for anything that is none or is too large."""
    return opened(_bytes_of(text))


def opened(content: bytes) -> Image:
    """The picture that a file holds. Its size is read before any of its pixels."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(content) > MOST_BYTES:
        raise ValueError(f"The file has {_megabytes(len(content))}; at most {_megabytes(MOST_BYTES)} are accepted.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            _require_size(image.size)
            return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"The picture has more than {_millions(MOST_PIXELS)} pixels, which is too many.") from None
    except UnidentifiedImageError:
        raise ValueError(f"This is no picture; accepted are files of {', '.join(FORMATS)}.") from None
    except _RefusedError as refused:
        raise ValueError(str(refused)) from None
    # A decoder meets whatever bytes there are, and fails in as many ways; what it says may name things of the server.
    except Exception:
        raise ValueError("The picture cannot be read: the file is damaged or not complete.") from None


class _RefusedError(Exception):
    """What is wrong with a picture's size."""


def _require_size(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise _RefusedError(
            f"The picture has {width} x {height} pixels; at most {_millions(MOST_PIXELS)} in all are accepted."
        )
    if max(size) > MOST_TO_ONE * min(size):
        raise _RefusedError(
            f"The picture has {width} x {height} pixels, which is too long and narrow: at most {MOST_TO_ONE} to 1."
        )


def _bytes_of(text: str) -> bytes:
    head, mark, body = text.partition(_MARK)
    if not head.startswith(_HEAD) or not mark:
        raise ValueError("No picture came with the request; choose one of the examples or a file.")
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise ValueError(f"The file is too large; at most {_megabytes(MOST_BYTES)} are accepted.")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("The picture did not arrive whole; send it again.") from None


def _megabytes(count: int) -> str:
    return f"{count / 1024 / 1024:.1f} MB"


def _millions(count: int) -> str:
    return f"{count / 1e6:g} million"
