"""Faster vision transformers by exact agglomerative token clustering."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agglo.clustering import cluster, linkage
from agglo.config import ReductionConfig
from agglo.methods import Method, list_methods, register
from agglo.schedule import Constant, Counts, Geometric, Linear, PerBlock, Schedule, Stages
from agglo.version import __version__

if TYPE_CHECKING:
    from agglo.drawing.groups import draw
    from agglo.healing import heal
    from agglo.hosts import UnsupportedModelError
    from agglo.hosts.registry import register_host
    from agglo.patch import adapt_processor, apply, image_tokens, recipe, remove, report, trace
    from agglo.tuning import tune

# Imported when they are first asked for: clustering needs no host, and running a model no drawing, tuning or healing.
_LAZY = {
    "UnsupportedModelError": "agglo.hosts",
    "draw": "agglo.drawing.groups",
    "heal": "agglo.healing",
    "register_host": "agglo.hosts.registry",
    "tune": "agglo.tuning",
    **dict.fromkeys(("adapt_processor", "apply", "image_tokens", "recipe", "remove", "report", "trace"), "agglo.patch"),
}

__all__ = [
    "Constant",
    "Counts",
    "Geometric",
    "Linear",
    "Method",
    "PerBlock",
    "ReductionConfig",
    "Schedule",
    "Stages",
    "UnsupportedModelError",
    "__version__",
    "adapt_processor",
    "apply",
    "cluster",
    "draw",
    "heal",
    "image_tokens",
    "linkage",
    "list_methods",
    "recipe",
    "register",
    "register_host",
    "remove",
    "report",
    "trace",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value
    if name in ("healing", "hosts", "lab", "patch", "tuning"):
        return import_module(f"agglo.{name}")
    raise AttributeError(f"module 'agglo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "lab"]
