"""Every combination of some settings, each in a folder of its own, ranked. Goes on where it was, as each run does."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agglo.classification.training.recipe import Recipe
from agglo.classification.training.settings import TrainingSettings
from agglo.classification.training.trainer import finetune
from agglo.experiments.files import write_json
from agglo.experiments.tables import Column, Table
from agglo.experiments.training.loop import BEST, NonFiniteLossError

_LONGEST_NAME = 120  # characters; file systems take 255 bytes
_NOT_SAFE = re.compile(r"[^A-Za-z0-9_.,=+\[\]-]")
# Those of the paper's search that it selected somewhere: warm-up, backbone rate, frozen epochs.
PAPER: dict[str, list[Any]] = {"warmup_epochs": [5, 20], "backbone_lr_scale": [0.01, 1.0], "frozen_epochs": [0, 5]}


def cells(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination, the last setting changing fastest.

    >>> cells({"lr": [0.1, 0.2], "frozen_epochs": [0]})
    [{'lr': 0.1, 'frozen_epochs': 0}, {'lr': 0.2, 'frozen_epochs': 0}]
    """
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def sweep(
    recipe: Recipe, choices: Mapping[str, Any], over: Mapping[str, Sequence[Any]], data: Path, output: Path
) -> list[dict[str, Any]]:
    """Run every cell that is not done yet; the cells from best to worst, which sweep.json in `output` holds too.

    choices: of a person, for all cells. over: settings and the values to try.
    A cell whose loss stops being a number is ranked last; anything else that goes wrong stops the sweep.
    """
    if len(set(over.get("precision", []))) > 1:
        raise ValueError(f"precision={list(over['precision'])}: one process has one precision; sweep each by itself")
    planned: list[tuple[dict[str, Any], TrainingSettings]] = []
    for cell in cells(over):
        settings, _ = recipe.resolve({**choices, **cell})  # all of them, so that a bad value raises before any run
        planned.append((cell, settings))
    rows = []
    for cell, settings in planned:
        folder = output / cell_name(cell)
        rows.append({**cell, **_outcome(settings, data, folder), "folder": folder.name})
        ranked = sorted(rows, key=lambda row: (row[BEST] is not None, row[BEST]), reverse=True)
        if _is_main():
            write_json(output / "sweep.json", {"over": dict(over), "cells": len(planned), "ranked": ranked})
    return ranked


def _outcome(settings: TrainingSettings, data: Path, folder: Path) -> dict[str, Any]:
    try:
        # A run that is done returns at once, after a look at whether it was this one.
        best = finetune(settings, data, folder)
    except NonFiniteLossError as error:
        return {BEST: None, "epoch": None, "note": str(error)}
    return {name: best[name] for name in (BEST, "epoch")}


def cell_name(cell: Mapping[str, Any]) -> str:
    """A folder's name: what distinguishes the cell. Where that is long or has letters that are not for every file
    system, such as the slashes of a path, they are replaced and a few digits distinguish it.

    >>> cell_name({"warmup_epochs": 5, "backbone_lr_scale": 0.01})
    'warmup_epochs=5,backbone_lr_scale=0.01'
    >>> cell_name({"checkpoint": "w1/m.safetensors"})
    'checkpoint=w1_m.safetensors-64152ee5'
    """
    whole = ",".join(f"{name}={_written(value)}" for name, value in cell.items())
    safe = _NOT_SAFE.sub("_", whole)
    if safe == whole and len(safe) <= _LONGEST_NAME:
        return whole
    return f"{safe[:_LONGEST_NAME]}-{hashlib.sha256(whole.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _written(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list | dict) else str(value)


def table(ranked: Sequence[Mapping[str, Any]]) -> str:
    """One line per cell, best first."""
    names = [name for name in ranked[0] if name not in ("folder", "note")]
    rows = [["diverged" if row[name] is None else row[name] for name in names] for row in ranked]
    return Table([Column(name) for name in names], rows).text()


def _is_main() -> bool:
    from accelerate import PartialState

    return bool(PartialState().is_main_process)
