"""Image files of any data set, and errors that name the unreadable ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image as pil
from PIL import ImageOps, UnidentifiedImageError
from PIL.Image import Image

from agglo.utils.files import require_output

_SHOWN = 5
_WRITABLE = (".gif", ".jpeg", ".jpg", ".png", ".webp")


class BadImageError(ValueError):
    """A file that cannot be decoded; the message names it."""

    def __init__(self, message: str) -> None:
        # A DataLoader's worker re-raises errors with its traceback in front; its last line is the message.
        super().__init__(message.strip().rpartition(f"{type(self).__name__}: ")[2])


@dataclass(frozen=True)
class Files:
    """Image files, as RGB, by index; their names and stored bytes are the same on every machine."""

    root: Path
    paths: Sequence[str]  # relative to it, with forward slashes

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> Image:
        path = self.root / self.paths[index]
        try:
            with pil.open(path) as image:
                return image.convert("RGB")
        except Exception as error:  # decoders fail in many ways on bytes that are no image
            raise BadImageError(f"image {str(path)!r} cannot be read: {error}") from None

    def name(self, index: int) -> str:
        return self.paths[index]

    def size(self, index: int) -> int:
        return (self.root / self.paths[index]).stat().st_size

    def content(self, index: int) -> bytes:
        return (self.root / self.paths[index]).read_bytes()


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
    if not path.is_file():
        raise ValueError(f"image={str(path)!r} is not a file")
    try:
        with pil.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"image={str(path)!r} cannot be read as an image: {error}") from error


def require_image_name(path: Path) -> Path:
    """Return the path if an image can be written there; to be called before any work is done."""
    if path.suffix.lower() not in _WRITABLE:
        raise ValueError(f"output={str(path)!r} is no image file; accepted: {', '.join(_WRITABLE)}")
    return require_output(path)
