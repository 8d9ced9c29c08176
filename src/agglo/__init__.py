"""Faster vision transformers by exact agglomerative token clustering."""

from typing import TYPE_CHECKING

from agglo.clustering import backends, cluster, cut, linkage
from agglo.drawing.groups import draw
from agglo.grouping import Grouping
from agglo.hosts import UnsupportedModelError
from agglo.hosts.diffusion import generation
from agglo.methods import LearnedMethod, Method, MethodInfo, Outcome, Setting, View, register
from agglo.patching import Reduction, apply, reduction, remove, trace
from agglo.schedule import Constant, Geometric, Linear, PerBlock, Schedule, Stages
from agglo.version import __version__

if TYPE_CHECKING:

    def methods() -> list[MethodInfo]:
        """Every method that `agglo.apply` knows by name. At run time the package of that name, which can be called."""
        ...


__all__ = [
    "Constant",
    "Geometric",
    "Grouping",
    "LearnedMethod",
    "Linear",
    "Method",
    "MethodInfo",
    "Outcome",
    "PerBlock",
    "Reduction",
    "Schedule",
    "Setting",
    "Stages",
    "UnsupportedModelError",
    "View",
    "__version__",
    "apply",
    "backends",
    "cluster",
    "cut",
    "draw",
    "generation",
    "linkage",
    "methods",
    "reduction",
    "register",
    "remove",
    "trace",
]
