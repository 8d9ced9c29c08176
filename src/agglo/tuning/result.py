"""What `agglo.tune` gives back: keyword arguments of `agglo.apply`, and everything that is known about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from agglo.experiments.files import write_json
from agglo.tuned import Source, read
from agglo.tuning.statistics import Drop, Quality, quality_from


class Tuned(Mapping[str, Any]):
    """The keyword arguments of `agglo.apply` that were found: `agglo.apply(model, **tuned)`.

    content: all that was measured, as the JSON file holds it (docs/tune.md describes it).

    >>> tuned = Tuned.load("deit_tiny_patch16_224-half")  # as agglo.tune gives it, or a file of it
    >>> tuned["method"], f"{tuned.gflops:.2f} of the dense model's GFLOPs"
    ('atc', "0.50 of the dense model's GFLOPs")
    >>> import timm
    >>> model = agglo.apply(timm.create_model("deit_tiny_patch16_224"), **tuned)
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        if content.get("apply") is None:
            raise ValueError("this search was stopped before it found anything: the same call or command goes on")
        self.content = dict(content)

    def __getitem__(self, name: str) -> Any:
        return self.content["apply"][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content["apply"])

    def __len__(self) -> int:
        return len(self.content["apply"])

    def __repr__(self) -> str:
        return f"Tuned({self.content['apply']!r})"

    @property
    def speedup(self) -> float:
        """Times as fast as the dense model, measured in turns with it: the median."""
        return float(self.content["chosen"]["speed"]["median"])

    @property
    def gflops(self) -> float:
        """As a fraction of the dense model's."""
        return float(self.content["chosen"]["gflops"])

    @property
    def quality(self) -> Quality:
        """On the images that the search did not see."""
        return quality_from(self.content["chosen"]["confirmation"])

    @property
    def drop(self) -> Drop | None:
        """Accuracy lost on those images, with its standard error; None without labels."""
        return self.quality.drop

    @property
    def points(self) -> list[dict[str, Any]]:
        """Every point that was tried: its arguments, its images, and sums over them."""
        steps = [step for step in self.content["steps"] if step["kind"] == "quality"]
        return [{**step["key"], **step["found"]} for step in steps]

    @property
    def front(self) -> list[dict[str, Any]]:
        """The points that were followed along the front, of every method."""
        return list(self.content["front"])

    def report(self) -> str:
        """In words: what was chosen, what it is worth, and what these images can show of it."""
        from agglo.tuning.report import text

        return text(self.content)

    def plot(self, path: str | PathLike[str]) -> None:
        """The front as a picture, by the ending of path (.png, .svg, .pdf); needs matplotlib."""
        from agglo.tuning.picture import draw

        draw(self.content, Path(path))

    def save(self, path: str | PathLike[str]) -> None:
        """As JSON, which `Tuned.load` and `agglo.apply(model, tuned=path)` read."""
        write_json(Path(path), self.content)

    @classmethod
    def load(cls, source: Source) -> Tuned:
        """From a file, or a ready-made one by its name."""
        return cls(source if isinstance(source, Mapping) else read(source))
