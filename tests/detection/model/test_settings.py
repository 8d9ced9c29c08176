"""The numbers of the released detectors, written out once more."""

from __future__ import annotations

import pytest

from agglo.detection.model.settings import Assignment, HeadSettings, ProposalSettings


def test_the_defaults_are_the_released_settings() -> None:
    settings = HeadSettings()
    assert (settings.width, settings.anchor_scale, settings.anchor_ratios) == (256, 8, (0.5, 1.0, 2.0))
    assert settings.proposal_assignment == Assignment(
        positive=0.7, negative=0.3, minimum=0.3, samples=256, positive_share=0.5
    )
    assert settings.proposal_assignment.most_positive == 128
    assert settings.training_proposals == ProposalSettings(per_level=2000, kept=1000, iou=0.7)
    assert settings.test_proposals == ProposalSettings(per_level=1000, kept=1000, iou=0.7)
    assert (settings.finest_scale, settings.box_pool, settings.mask_pool, settings.box_width) == (56, 7, 14, 1024)
    assert settings.box_deviations == (0.1, 0.1, 0.2, 0.2)
    assert settings.box_assignment == Assignment(
        positive=0.5, negative=0.5, minimum=0.5, samples=512, positive_share=0.25
    )
    assert settings.box_assignment.most_positive == 128
    assert settings.mask_convolutions == 4
    assert (settings.score_threshold, settings.suppression_iou, settings.detections) == (0.05, 0.5, 100)
    assert settings.mask_threshold == 0.5


@pytest.mark.parametrize("wrong", [{"width": 0}, {"detections": 0}, {"anchor_ratios": ()}, {"anchor_scale": -1.0}])
def test_a_number_that_cannot_be_is_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HeadSettings(**wrong)
