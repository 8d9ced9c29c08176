"""Every number of the heads; the defaults are those of MMDetection 2.x's Mask R-CNN, as the study trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from agglo.checks import choice


@dataclass(frozen=True)
class Assignment:
    """Which candidate boxes stand for an object, which for background, and how many of each a loss sees.

    Attributes:
        positive: A candidate stands for the object it overlaps most, from this IoU on.
        negative: It is background below this IoU. In between it counts as neither.
        minimum: The candidates that overlap an object most stand for it in any case, from this IoU on.
        samples: Candidates per image that the loss sees.
        positive_share: At most this share of them are positive.
    """

    positive: float
    negative: float
    minimum: float
    samples: int
    positive_share: float


@dataclass(frozen=True)
class ProposalSettings:
    """Best boxes of each pyramid level before suppression, boxes kept per image after it, and its IoU threshold."""

    per_level: int
    kept: int
    iou: float = 0.7


@dataclass(frozen=True)
class HeadSettings:
    """The pyramid, the proposals, the box head and the mask head.

    Attributes:
        width: Channels of the pyramid and of the convolutions in the heads; box_width is of the box head's two layers.
        anchor_scale: Side of the square anchor, in strides of its level.
        anchor_ratios: height / width.
        finest_scale: Boxes with sqrt(area) below twice this are read from the finest level, below four times from the
            second, and so on.
        box_pool: Side of the pooled features, as mask_pool is; masks have twice that side.
    """

    width: int = 256
    anchor_scale: float = 8
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    proposal_assignment: Assignment = Assignment(0.7, 0.3, 0.3, samples=256, positive_share=0.5)
    training_proposals: ProposalSettings = ProposalSettings(per_level=2000, kept=1000)
    test_proposals: ProposalSettings = ProposalSettings(per_level=1000, kept=1000)
    finest_scale: float = 56
    box_pool: int = 7
    mask_pool: int = 14
    box_width: int = 1024
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
