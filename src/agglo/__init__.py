"""Faster vision transformers by exact agglomerative token clustering."""

from agglo.clustering import backends, cluster, cut, linkage
from agglo.grouping import Grouping
from agglo.hosts import UnsupportedModelError
from agglo.patching import Reduction, apply, reduction, remove, trace
from agglo.schedule import Constant, Geometric, Linear, PerBlock, Schedule, Stages
from agglo.study.drawing import draw

__version__ = "0.1.0"
__all__ = [
    "Constant",
    "Geometric",
    "Grouping",
    "Linear",
    "PerBlock",
    "Reduction",
    "Schedule",
    "Stages",
    "UnsupportedModelError",
    "apply",
    "backends",
    "cluster",
    "cut",
    "draw",
    "linkage",
    "reduction",
    "remove",
    "trace",
]
