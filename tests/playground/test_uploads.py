"""Whatever a visitor sends is a picture of a sane size, or refused with a sentence."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from agglo.playground import uploads
from agglo.playground.examples import picture, scenes, single_things
from agglo.playground.uploads import MOST_BYTES, decoded


def sent(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 37, height: int = 23) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def bomb(width: int, height: int) -> bytes:
    """A PNG of black pixels: a few kilobytes that would become gigabytes."""
    rows = zlib.compress(bytes(height * (1 + (width + 7) // 8)), 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP"])
def test_pixels_arrive_as_they_are(kind: str) -> None:
    assert np.array_equal(decoded(sent(file_of(noise(), kind))), noise())


def test_grey_transparent_and_small_pictures_become_rgb() -> None:
    for mode in ("L", "RGBA", "P", "1", "I;16"):
        source = noise(5, 3).convert("L").convert("I;16") if mode == "I;16" else noise(5, 3).convert(mode)
        found = decoded(sent(file_of(source, "PNG")))
        assert (found.mode, found.size) == ("RGB", (5, 3))


def test_a_photograph_is_turned_the_right_way_up() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert decoded(sent(file_of(noise(40, 20), "JPEG", exif=exif))).size == (20, 40)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "This is no picture"),
        (b"MZ not a picture at all", "This is no picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "This is no picture"),
        (file_of(noise(), "TIFF"), "This is no picture; accepted are files of PNG, JPEG"),
        (file_of(noise(400, 400), "PNG")[:-2000], "damaged or not complete"),
        (file_of(noise(400, 400), "JPEG")[:300], "cannot be read"),
        (bomb(6000, 6000), "6000 x 6000 pixels; at most 24 million in all"),
        (bomb(30000, 30000), "more than 24 million pixels"),
        (bomb(4000, 10), "4000 x 10 pixels, which is too long and narrow"),
    ],
    ids=["empty", "program", "svg", "tiff", "cut png", "cut jpeg", "large", "bomb", "narrow"],
)
def test_what_is_no_picture_or_too_large_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        decoded(sent(content))
    assert says in str(refused.value) and str(refused.value).endswith(".")


def test_a_bomb_is_refused_before_its_pixels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("pixels were read")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", read)
    with pytest.raises(ValueError, match="6000 x 6000"):
        decoded(sent(bomb(6000, 6000)))


def test_text_that_is_no_data_url_is_refused() -> None:
    for text, says in [
        ("", "No picture came"),
        ("/etc/passwd", "No picture came"),
        ("http://example.org/cat.png", "No picture came"),
        ("data:image/png;base64,???", "did not arrive whole"),
        ("data:image/png;base64," + "A" * (MOST_BYTES * 4 // 3 + 8), "too large"),
    ]:
        with pytest.raises(ValueError, match=says):
            decoded(text)
    with pytest.raises(ValueError, match=r"8\.0 MB"):
        uploads.opened(bytes(MOST_BYTES + 1))


def test_examples_are_found_by_name_and_others_are_not() -> None:
    for example in (*single_things(), *scenes()):
        assert picture(example.value).size == example.image.size
    for wrong in ("example:../../etc/passwd", "example:", "example:nobody"):
        with pytest.raises(ValueError, match="There is no example"):
            picture(wrong)
    with pytest.raises(ValueError, match="No picture came"):
        picture(None)  # type: ignore[arg-type]
