"""Whatever a visitor sends is an image of a sane size, or refused with a sentence."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from agglo.lab.playground.images import MOST_BYTES, chosen_image, decode_image, garments, scenes


def sent(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


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


@pytest.mark.parametrize("kind", ["PNG", "BMP"])
def test_pixels_arrive_as_they_are(kind: str) -> None:
    assert np.array_equal(decode_image(sent(file_of(noise(), kind))), noise())


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16"])
def test_grey_and_transparent_images_become_rgb(mode: str) -> None:
    source = noise(5, 3).convert("L").convert("I;16") if mode == "I;16" else noise(5, 3).convert(mode)
    found = decode_image(sent(file_of(source, "PNG")))
    assert (found.mode, found.size) == ("RGB", (5, 3))


def test_a_photograph_is_turned_the_right_way_up() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert decode_image(sent(file_of(noise(40, 20), "JPEG", exif=exif))).size == (20, 40)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no image"),
        (b"MZ not an image at all", "no image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        (file_of(noise(), "TIFF"), "no image"),
        (file_of(noise(400, 400), "PNG")[:-2000], "damaged"),
        (file_of(noise(400, 400), "JPEG")[:300], "damaged"),
        (bomb(6000, 6000), "6000 x 6000"),
        (bomb(30000, 30000), "too many pixels"),
        (bomb(4000, 10), "4000 x 10"),
    ],
    ids=["empty", "program", "svg", "tiff", "cut png", "cut jpeg", "large", "bomb", "narrow"],
)
def test_what_is_no_image_or_too_large_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode_image(sent(content))


def test_a_bomb_is_refused_before_its_pixels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("pixels were read")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", read)
    with pytest.raises(ValueError, match="6000 x 6000"):
        decode_image(sent(bomb(6000, 6000)))


@pytest.mark.parametrize(
    "text",
    ["", "/etc/passwd", "http://example.org/cat.png", sent(b"")[:-1] + "???", sent(bytes(MOST_BYTES + 8)), None],
    ids=["nothing", "path", "address", "no base64", "too large", "none"],
)
def test_text_that_is_no_data_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"No image|whole|too large"):
        chosen_image(text)


def test_examples_are_found_by_name_and_others_are_not() -> None:
    for example in (*garments(), *scenes()):
        assert chosen_image(example.value).size == example.image.size
    for wrong in ("example:../../etc/passwd", "example:", "example:nobody"):
        with pytest.raises(ValueError, match="no example"):
            chosen_image(wrong)
