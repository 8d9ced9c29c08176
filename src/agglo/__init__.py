"""Faster vision transformers by exact agglomerative token clustering."""

from agglo import detection
from agglo.classification.api import evaluate, finetune
from agglo.clustering import backends, cluster, cut, linkage
from agglo.drawing.groups import draw
from agglo.experiments.zero_shot import zero_shot
from agglo.grouping import Grouping
from agglo.hosts import UnsupportedModelError
from agglo.hosts.diffusion import generation
from agglo.hosts.registry import register_host
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
from agglo.patching import Reduction, adapt_processor, apply, image_tokens, reduction, remove, trace
from agglo.schedule import Constant, Counts, Geometric, Linear, PerBlock, Schedule, Stages, parse_schedule
from agglo.tuning import Tuned, tune
from agglo.version import __version__

__all__ = [
    "Constant",
    "Counts",
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
    "Tuned",
    "UnsupportedModelError",
    "View",
    "__version__",
    "adapt_processor",
    "apply",
    "backends",
    "cluster",
    "cut",
    "detection",
    "draw",
    "evaluate",
    "finetune",
    "generation",
    "image_tokens",
    "linkage",
    "list_methods",
    "parse_method",
    "parse_schedule",
    "reduction",
    "register",
    "register_host",
    "remove",
    "trace",
    "tune",
    "zero_shot",
]
