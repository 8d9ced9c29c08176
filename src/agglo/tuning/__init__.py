"""Name a speed or an accuracy, get the schedule: a search over schedules and options of a method, without labels."""

from agglo.tuning.api import tune
from agglo.tuning.outputs import submodule_output
from agglo.tuning.result import Tuned

__all__ = ["Tuned", "submodule_output", "tune"]
