"""The recipes for detectors: `recipes/*.toml` beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agglo.detection.training.settings import DetectionSettings
from agglo.experiments.training.recipes import Recipes


def _weights(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A file of weights that a person names takes the place of starting without."""
    return {} if chosen.get("checkpoint") is None else {"from_scratch": False}


RECIPES = Recipes(
    DetectionSettings,
    "agglo.detection.training",
    start={**asdict(DetectionSettings(from_scratch=True)), "from_scratch": False},
    implied=_weights,
)
