"""The search behind `agglo.tune`: a speed, an accuracy or GFLOPs in, a `ReductionConfig` out, without labels."""

from agglo.tuning.api import tune
from agglo.tuning.result import Tuned
from agglo.tuning.settings import TuneSettings, submodule_output

__all__ = ["TuneSettings", "Tuned", "submodule_output", "tune"]
