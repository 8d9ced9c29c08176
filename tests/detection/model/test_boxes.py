from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.models.detection._utils import BoxCoder

from agglo.detection.model.boxes import LARGEST_LOG_SCALE, decode, encode
from tests.detection.model.references import difference, moved

DEVIATIONS = (0.1, 0.1, 0.2, 0.2)
corner, side = st.floats(-50, 50, width=32), st.floats(0.5, 100, width=32)
box = st.tuples(corner, corner, side, side).map(lambda b: [b[0], b[1], b[0] + b[2], b[1] + b[3]])


@settings(max_examples=60, deadline=None)
@given(box, box)
def test_a_difference_is_the_definition_and_leads_back(wanted: list[float], reference: list[float]) -> None:
    wanted_box, reference_box = torch.tensor([wanted]).double(), torch.tensor([reference]).double()
    coded = encode(wanted_box, reference_box, DEVIATIONS)
    expected = torch.tensor([difference(wanted_box[0].tolist(), reference_box[0].tolist(), DEVIATIONS)]).double()
    torch.testing.assert_close(coded, expected, rtol=1e-4, atol=1e-4)
    if coded[:, 2:].abs().max() * 0.2 <= LARGEST_LOG_SCALE:
        torch.testing.assert_close(decode(coded, reference_box, DEVIATIONS), wanted_box, rtol=1e-6, atol=1e-6)


def test_torchvisions_coder_agrees_within_the_limits() -> None:
    torch.manual_seed(0)
    start = torch.rand(50, 2) * 100
    references = torch.cat([start, start + torch.rand(50, 2) * 50 + 1], dim=1)
    coder = BoxCoder(weights=tuple(1 / d for d in DEVIATIONS))
    changes = torch.randn(50, 4)
    torch.testing.assert_close(decode(changes, references, DEVIATIONS), coder.decode_single(changes, references))
    wanted = references.roll(1, 0)
    torch.testing.assert_close(encode(wanted, references, DEVIATIONS), coder.encode_single(wanted, references))


@pytest.mark.parametrize("change", [[0.3, -0.2, 9.0, -9.0], [0.0, 0.0, -5.0, 5.0], [4.0, -4.0, 0.1, 0.2]])
def test_both_ends_of_the_scale_are_limited_and_the_box_ends_with_the_image(change: list[float]) -> None:
    reference = [10.0, 20.0, 26.0, 28.0]
    found = decode(torch.tensor([change]), torch.tensor([reference]), inside=(40, 60))
    torch.testing.assert_close(found[0], torch.tensor(moved(reference, change, (40, 60)), dtype=torch.float32))


def test_the_smallest_scale_is_limited_where_torchvisions_is_not() -> None:
    change, reference = torch.tensor([[0.0, 0.0, -9.0, -9.0]]), torch.tensor([[0.0, 0.0, 100.0, 100.0]])
    width = (lambda b: float(b[0, 2] - b[0, 0]))(decode(change, reference))
    assert width == pytest.approx(100 * 16 / 1000, rel=1e-4)
    theirs = BoxCoder((1.0, 1.0, 1.0, 1.0)).decode_single(change, reference)
    assert float(theirs[0, 2] - theirs[0, 0]) == pytest.approx(100 * math.exp(-9), rel=1e-2)
