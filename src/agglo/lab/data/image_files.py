"""Image files of any data set, and errors that name the unreadable ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agglo.utils.files import require_output

if TYPE_CHECKING:
    from PIL.Image import Image

_SHOWN = 5


class BadImageError(ValueError):
    """A file that cannot be decoded; the message names it."""

    def __init__(self, message: str) -> None:
        # A loader's worker hands errors on with its traceback in front; its last line is the message.
        super().__init__(message.strip().rpartition(f"{type(self).__name__}: ")[2])


class Images(Protocol):
    """Images by index."""

    def __len__(self) -> int: ...

    def open(self, index: int) -> Any:
        """Return a decoded PIL image; BadImageError if it cannot be decoded."""

    def name(self, index: int) -> str:
        """Return a name for messages and fingerprints, the same on every machine."""

    def size(self, index: int) -> int:
        """Return the size of the stored image in bytes; 0 if it is known only after decoding."""

    def content(self, index: int) -> bytes:
        """Return the stored bytes of an image, or its pixels."""


@dataclass(frozen=True)
class Files:
    """Image files, as RGB. paths: relative to root, with forward slashes."""

    root: Path
    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> Any:
        from PIL import Image

        path = self.root / self.paths[index]
        try:
            with Image.open(path) as image:
                return image.convert("RGB")
        # A decoder meets whatever bytes there are, and fails in as many ways.
        except Exception as error:
            raise BadImageError(f"image {str(path)!r} cannot be read: {error}") from None

    def name(self, index: int) -> str:
        return self.paths[index]

    def size(self, index: int) -> int:
        return (self.root / self.paths[index]).stat().st_size

    def content(self, index: int) -> bytes:
        return (self.root / self.paths[index]).read_bytes()


def unreadable(count: int, open_image: Callable[[int], Any]) -> list[str | None]:
    """Decode all images, on several threads; return the error message of each, None where it can be read."""

    def complaint(index: int) -> str | None:
        try:
            open_image(index)
        except BadImageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(complaint, range(count)))


def listed(problems: Sequence[str]) -> str:
    """Join the first few problems, and say how many more there are."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def require_file(path: Path) -> Path:
    """Return the path if it is a file; ValueError otherwise."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is missing")
    return path


def open_image(path: Path) -> Image:
    """Open an image file as RGB, rotated as its EXIF data says."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not path.is_file():
        raise ValueError(f"image={str(path)!r} is not a file")
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"image={str(path)!r} cannot be read as an image: {error}") from error


def require_image_name(path: Path) -> Path:
    """Return the path if an image can be written there; to be called before any work is done."""
    from PIL import Image

    writable = sorted(
        suffix for suffix, kind in Image.registered_extensions().items() if kind in ("GIF", "PNG", "JPEG", "WEBP")
    )
    if path.suffix.lower() not in writable:
        raise ValueError(f"output={str(path)!r} is no image file; accepted: {', '.join(writable)}")
    return require_output(path)
