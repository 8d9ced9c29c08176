"""Sweeps: every combination of some settings, one folder each, ranked; a stopped sweep can be resumed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agglo.lab.tasks.classification.training.settings import TrainingSettings
from agglo.lab.tasks.classification.training.trainer import finetune
from agglo.lab.training.loop import BEST, NonFiniteLossError
from agglo.lab.training.recipes import Recipe
from agglo.utils.files import write_json
from agglo.utils.tables import Column, Table

# Those of the paper's search that it selected somewhere: warm-up, backbone rate, frozen epochs.
PAPER: dict[str, list[Any]] = {"warmup_epochs": [5, 20], "backbone_lr_scale": [0.01, 1.0], "frozen_epochs": [0, 5]}


def cells(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination, the last setting changing fastest.

    >>> cells({"lr": [0.1, 0.2], "frozen_epochs": [0]})
    [{'lr': 0.1, 'frozen_epochs': 0}, {'lr': 0.2, 'frozen_epochs': 0}]
    """
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def sweep(
    recipe: Recipe[TrainingSettings],
    choices: Mapping[str, Any],
    over: Mapping[str, Sequence[Any]],
    data: Path,
    output: Path,
) -> list[dict[str, Any]]:
    """Run every cell that is not done yet, and return the cells from best to worst, as sweep.json holds them.

    A cell whose loss stops being a number is ranked last; anything else that goes wrong stops the sweep.

    Args:
        recipe: The recipe of all runs.
        choices: Settings for all cells.
        over: The values to try, by setting.
        data: Folder of the data set.
        output: Folder of the sweep.
    """
    from accelerate import PartialState

    if len(set(over.get("precision", []))) > 1:
        raise ValueError(f"precision={list(over['precision'])}: one process has one precision; sweep each by itself")
    # All of them are resolved first, so that a bad value raises before any run.
    planned = [(cell, recipe.resolve({**choices, **cell})[0]) for cell in cells(over)]
    rows = []
    for cell, settings in planned:
        folder = output / cell_name(cell)
        try:
            # A run that is done returns at once, after a look at whether it was this one.
            best = finetune(settings, data, folder)
            found = {name: best[name] for name in (BEST, "epoch")}
        except NonFiniteLossError as error:
            found = {BEST: None, "epoch": None, "note": str(error)}
        rows.append({**cell, **found, "folder": folder.name})
        ranked = sorted(rows, key=lambda row: (row[BEST] is not None, row[BEST]), reverse=True)
        if PartialState().is_main_process:
            write_json(output / "sweep.json", {"over": dict(over), "cells": len(planned), "ranked": ranked})
    return ranked


def cell_name(cell: Mapping[str, Any]) -> str:
    """Return the name of a cell's folder: its settings, without characters that some file systems refuse.

    >>> cell_name({"warmup_epochs": 5, "checkpoint": "w1/m.safetensors"})
    'warmup_epochs=5,checkpoint=w1_m.safetensors'
    """
    return re.sub(r"[^A-Za-z0-9_.,=+\[\]-]", "_", ",".join(f"{name}={value}" for name, value in cell.items()))


def table(ranked: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one line per cell, best first."""
    names = [name for name in ranked[0] if name not in ("folder", "note")]
    rows = [["diverged" if row[name] is None else row[name] for name in names] for row in ranked]
    return Table([Column(name) for name in names], rows).text()
