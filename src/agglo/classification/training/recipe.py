"""The recipes for classifiers: `recipes/*.toml` beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agglo.classification.data.registry import dataset_named
from agglo.classification.training.settings import AUGMENTATION_SETTINGS, OF_METHOD, TrainingSettings
from agglo.experiments.training import recipes


def _weights(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A file of weights that a person names takes the place of whatever weights a recipe starts from."""
    return {} if chosen.get("checkpoint") is None else {"pretrained": False, "from_scratch": False}


def _augmentation(values: Mapping[str, Any]) -> dict[str, Any]:
    """What training does to the images of a data set, as settings."""
    own = dataset_named(values["dataset"]).augmentation
    return {name: getattr(own, name) for name in AUGMENTATION_SETTINGS}


Recipe = recipes.Recipe[TrainingSettings]
RECIPES = recipes.Recipes(
    TrainingSettings,
    "agglo.classification.training",
    start={**asdict(TrainingSettings(from_scratch=True)), "from_scratch": False},
    implied=_weights,
    of_data=_augmentation,
    of_method=OF_METHOD,
    beside_no_method=("patch_drop_rates",),
)
names, load, parse = RECIPES.names, RECIPES.load, RECIPES.parse
