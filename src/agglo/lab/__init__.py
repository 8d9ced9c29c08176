"""The laboratory: tasks, training, evaluation, benchmarks, the paper, and the command line.

The library imports none of it. What scripts call is here: `agglo.lab.evaluate`, `agglo.lab.finetune`,
`agglo.lab.zero_shot` and `agglo.lab.detection`.
"""

from agglo.lab.tasks import detection
from agglo.lab.tasks.classification.api import evaluate, finetune
from agglo.models.zero_shot import zero_shot

__all__ = ["detection", "evaluate", "finetune", "zero_shot"]
