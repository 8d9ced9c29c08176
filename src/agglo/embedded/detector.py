"""The embedded detector: garments in scenes made from Fashion-MNIST, boxes and masks; 1.5 million parameters.

Its weights are part of the package in half precision, trained by `make mini-detection`. What detector they are of
stands in the file; `agglo.lab.tasks.detection` builds it: `open_detector("embedded")`.
"""

from __future__ import annotations

from pathlib import Path

NAME = "embedded"
WEIGHTS = Path(__file__).with_name("agglo_fashion_detector.safetensors")


def required() -> Path:
    """The file of weights; ValueError says how to make it where it is not there."""
    if not WEIGHTS.is_file():
        raise ValueError(
            f"model={NAME!r}: its weights, {WEIGHTS.name}, are not in this copy of agglo; train it with "
            "`agglo detect train miniature --set class_token=true --data FASHION_MNIST --output runs/detector`, and "
            "put it there with `python -m tools.embed detector --run runs/detector`"
        )
    return WEIGHTS
