"""Whatever a visitor sends is an image of a sane size, or refused with a sentence."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from agglo.lab.playground.images import MOST_BYTES, PREFIX, chosen_image, garments, scenes


def sent(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 37, height: int = 23) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def bomb(width: int, height: int) -> bytes:
    """A PNG of black pixels: a few kilobytes that would become gigabytes."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    rows = zlib.compress(bytes(height * (1 + (width + 7) // 8)), 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_pixels_arrive_as_they_are_upright_and_in_rgb() -> None:
    assert np.array_equal(chosen_image(sent(file_of(noise(), "PNG"))), noise())
    grey = chosen_image(sent(file_of(noise(5, 3).convert("L").convert("I;16"), "PNG")))
    assert (grey.mode, grey.size) == ("RGB", (5, 3))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert chosen_image(sent(file_of(noise(40, 20), "JPEG", exif=exif))).size == (20, 40)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"MZ not an image at all", "no image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        (file_of(noise(400, 400), "PNG")[:-2000], "damaged"),
        (bomb(30000, 30000), "too large"),
        (bomb(4000, 10), "4000 x 10"),
    ],
    ids=["program", "svg", "cut", "bomb", "narrow"],
)
def test_what_is_no_image_or_too_large_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chosen_image(sent(content))


def test_a_bomb_is_refused_before_its_pixels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("pixels were read")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", read)
    with pytest.raises(ValueError, match="6000 x 6000"):
        chosen_image(sent(bomb(6000, 6000)))


@pytest.mark.parametrize("text", ["", "/etc/passwd", "http://example.org/cat.png", sent(bytes(MOST_BYTES + 8))])
def test_text_that_is_no_data_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"No image|too large"):
        chosen_image(text)


def test_examples_are_found_by_name_and_others_are_not() -> None:
    for name, image in (*garments().items(), *scenes().items()):
        assert chosen_image(PREFIX + name).size == image.size
    with pytest.raises(ValueError, match="example"):
        chosen_image("example:../../etc/passwd")
