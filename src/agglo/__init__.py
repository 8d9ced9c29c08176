"""Faster vision transformers by exact agglomerative token clustering."""

from agglo.clustering import backends, cluster, cut, linkage
from agglo.grouping import Grouping
from agglo.hosts import UnsupportedModelError
from agglo.methods import (
    LearnedMethod,
    Method,
    MethodInfo,
    ModelShape,
    Outcome,
    RememberingMethod,
    View,
    list_methods,
    parse_method,
    register,
)
from agglo.patching import Reduction, apply, reduction, remove, trace
from agglo.schedule import Constant, Geometric, Linear, PerBlock, Schedule, Stages
from agglo.study.drawing import draw

__version__ = "0.1.0"
__all__ = [
    "Constant",
    "Geometric",
    "Grouping",
    "LearnedMethod",
    "Linear",
    "Method",
    "MethodInfo",
    "ModelShape",
    "Outcome",
    "PerBlock",
    "Reduction",
    "RememberingMethod",
    "Schedule",
    "Stages",
    "UnsupportedModelError",
    "View",
    "apply",
    "backends",
    "cluster",
    "cut",
    "draw",
    "linkage",
    "list_methods",
    "parse_method",
    "reduction",
    "register",
    "remove",
    "trace",
]
