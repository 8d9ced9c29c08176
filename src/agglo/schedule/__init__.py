"""How many patch tokens are left after each block. Prefix tokens are never counted.

A schedule is a value: two of the same kind with the same numbers are equal, hash alike, and have three forms that give
the same schedule back: `repr` as Python, `str` as the text that commands and recipes take (`parse_schedule`), and
`as_dict` for JSON and TOML (`schedule_from_dict`).

All arithmetic is on integers: a rate is a ratio of two, so that 0.7 of 100 tokens twice is 49, not the 48 that
floating point makes of it, and torch.compile can follow.
"""

from agglo.schedule.base import Rates, Schedule, default_blocks
from agglo.schedule.kinds import Constant, Counts, Geometric, Linear, PerBlock, Stages
from agglo.schedule.text import as_schedule, parse_schedule, schedule_from_dict

__all__ = [
    "Constant",
    "Counts",
    "Geometric",
    "Linear",
    "PerBlock",
    "Rates",
    "Schedule",
    "Stages",
    "as_schedule",
    "default_blocks",
    "parse_schedule",
    "schedule_from_dict",
]
