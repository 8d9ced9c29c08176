"""Faster vision transformers by exact agglomerative token clustering."""

from agglo.clustering import backends, cluster, cut, linkage
from agglo.grouping import Grouping
from agglo.hosts import UnsupportedModelError
from agglo.methods import LearnedMethod, Method, MethodInfo, Outcome, Setting, View, infos, register
from agglo.patching import Reduction, apply, reduction, remove, trace
from agglo.schedule import Constant, Geometric, Linear, PerBlock, Schedule, Stages
from agglo.study.drawing import draw


def methods() -> list[MethodInfo]:
    """Every method that `agglo.apply` knows by name: what it does, whether it learns, what it needs and can reach.

    >>> [info.kind for info in methods() if info.name == "atc"]
    ['merges hard']
    """
    # In place of the package's own attribute of that name; `from agglo.methods import ...` finds the package as ever.
    return infos()


__version__ = "0.1.0"
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
    "apply",
    "backends",
    "cluster",
    "cut",
    "draw",
    "linkage",
    "methods",
    "reduction",
    "register",
    "remove",
    "trace",
]
