"""Every number of the heads; the defaults are those of MMDetection 2.x's Mask R-CNN, as the study trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from agglo.checks import choice


@dataclass(frozen=True)
class Assignment:
    """Which candidate boxes stand for an object, which for background, and how many of each a loss sees."""

    positive: float  # a candidate stands for the object it overlaps most, from this IoU on
    negative: float  # it is background below this IoU, and neither in between
    minimum: float  # the candidates that overlap an object most stand for it in any case, from this IoU on
    samples: int  # candidates per image that the loss sees
    positive_share: float  # of them, at most


@dataclass(frozen=True)
class ProposalSettings:
    """Best boxes of each pyramid level before suppression, boxes kept per image after it, and its IoU threshold."""

    per_level: int
    kept: int
    iou: float = 0.7


@dataclass(frozen=True)
class HeadSettings:
    """The pyramid, the proposals, the box head and the mask head."""

    width: int = 256  # channels of the pyramid and of the convolutions in the heads
    anchor_scale: float = 8  # side of the square anchor, in strides of its level
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)  # height / width
    proposal_assignment: Assignment = Assignment(0.7, 0.3, 0.3, samples=256, positive_share=0.5)
    training_proposals: ProposalSettings = ProposalSettings(per_level=2000, kept=1000)
    test_proposals: ProposalSettings = ProposalSettings(per_level=1000, kept=1000)
    finest_scale: float = 56  # sqrt(area) below twice this reads the finest level, below four times the second, ...
    box_pool: int = 7  # side of the pooled features
    mask_pool: int = 14  # masks have twice this side
    box_width: int = 1024  # of the box head's two layers
    box_deviations: tuple[float, float, float, float] = (0.1, 0.1, 0.2, 0.2)
    box_assignment: Assignment = Assignment(0.5, 0.5, 0.5, samples=512, positive_share=0.25)
    mask_convolutions: int = 4
    score_threshold: float = 0.05
    suppression_iou: float = 0.5
    detections: int = 100
    mask_threshold: float = 0.5


def head_settings(options: Mapping[str, Any]) -> HeadSettings:
    """Return the usual settings of the heads with some of them changed; a table changes some of a group.

    >>> head_settings({"width": 64, "test_proposals": {"kept": 100}}).test_proposals
    ProposalSettings(per_level=1000, kept=100, iou=0.7)
    """
    values: dict[str, Any] = {}
    for name, value in options.items():
        choice("head_options", name, [each.name for each in fields(HeadSettings)])
        if isinstance(value, Mapping):
            value = replace(getattr(HeadSettings, name), **value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return HeadSettings(**values)
