"""All items, in the order of the paper. A new one is listed in its module's ITEMS, and the module here."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module

from agglo.reproduce.item import Item

MODULES: tuple[str, ...] = (
    "fine_tuned",
    "ranking",
    "hyper_parameters",
    "off_the_shelf",
    "per_block",
    "diffusion_fid",
    "diffusion_samples",
    "detection",
    "clusters",
    "throughput",
    "beyond",
    "places",
    "diffusion_options",
    "terrain",
    "padding",
    "real_detection",
)


@cache
def items() -> dict[str, Item]:
    """By name."""
    found = [item for module in MODULES for item in import_module(f"agglo.reproduce.items.{module}").ITEMS]
    return {item.name: item for item in found}


def item_named(name: str) -> Item:
    known = items()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"close to it: {', '.join(close)}" if close else f"accepted: {', '.join(known)}"
        raise ValueError(f"item={name!r} is not one of the paper's; {hint}")
    return known[name]
