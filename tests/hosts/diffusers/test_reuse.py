"""Groupings that are shared by blocks, or kept for later steps of the same generation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import agglo
from agglo.hosts.diffusers.state import drift
from agglo.methods import ATC, Outcome, View
from tests.support.diffusion import dit, run, unet


class Counting(ATC):
    """ATC that counts how often it is asked, by the number of tokens."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[int] = Counter()

    def reduce(self, view: View) -> Outcome:
        self.asked[view.tokens.shape[1]] += 1
        return super().reduce(view)


def counted(model: Any, inputs: dict[str, Any], timesteps: list[Any], **options: Any) -> dict[int, int]:
    method = Counting()
    agglo.apply(model, method, keep_rate=0.5, **options)
    with agglo.hosts.diffusers.generation():
        for timestep in timesteps:
            run(model, inputs, timestep=torch.as_tensor(timestep))
    return dict(method.asked)


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"max_downsample": 2}, {64: 21, 16: 28}),
        ({"max_downsample": 2, "share": "resolution"}, {64: 7, 16: 7}),
        ({"every": 3}, {64: 9}),
        ({"every": 2, "share": "resolution", "max_downsample": 2}, {64: 4, 16: 4}),
    ],
)
def test_groupings_are_shared_by_blocks_and_kept_for_steps(options: dict[str, Any], times: dict[int, int]) -> None:
    model, inputs = unet()
    assert counted(model, inputs, [90, 80, 70, 60, 50, 40, 30], **options) == times


def test_calls_with_one_timestep_are_one_step() -> None:
    """Prompted and unprompted images one after the other: each has groupings of its own."""
    model, inputs = unet()
    assert counted(model, inputs, [9, 9, 7, 7, 5, 5, 3, 3], every=2) == {64: 3 * 2 * 2}
    other = {**inputs, "sample": inputs["sample"].flip(-1) * 2}
    agglo.apply(model, keep_rate=0.5, every=2)

    def steps(*calls: Any) -> list[Any]:
        with agglo.hosts.diffusers.generation():
            return [run(model, given, timestep=torch.tensor(t)) for t in (9, 7) for given in calls]

    mixed = steps(inputs, other)
    for results, given in ((mixed[::2], inputs), (mixed[1::2], other)):
        assert all(torch.equal(result, alone) for result, alone in zip(results, steps(given), strict=True))


def test_drift_is_measured_since_the_grouping_was_made() -> None:
    """Steps of 0.06 add up: the second is beyond 0.1, the third again within."""
    before = torch.randn(2, 9, 4)
    assert drift(before, before * 1.06) == pytest.approx(0.06, rel=1e-4)
    one_moved = before.clone()
    one_moved[1] *= 1.5
    assert drift(before, one_moved) == pytest.approx(0.5, rel=1e-4)

    class Scaled(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.features = "tokens"

    model, inputs = dit()
    model.pos_embed.pos_embed.zero_()
    model.pos_embed.proj.bias.data.zero_()
    method = Scaled()
    agglo.apply(model, method, keep_rate=0.5, drift=0.1, share="resolution")  # decided in the first block
    asked = []
    with agglo.hosts.diffusers.generation():
        for step, scale in enumerate((1.0, 1.06, 1.12, 1.18, 1.24)):
            moved = {**inputs, "hidden_states": inputs["hidden_states"] * scale}
            run(model, moved, timestep=torch.tensor([500 - step] * 2))
            asked.append(method.asked[64])
    assert asked == [1, 1, 2, 2, 3]


def test_another_batch_or_another_apply_begins_anew() -> None:
    model, inputs = unet()
    one = {key: value[:1] if value.dim() else value for key, value in inputs.items()}
    second = torch.tensor(499)
    with agglo.hosts.diffusers.generation():
        run(agglo.apply(model, keep_rate=0.5, every=5), inputs)
        smaller = run(model, one, timestep=second)
        run(agglo.apply(model, keep_rate=0.7, every=5), inputs)
        again = run(agglo.apply(model, keep_rate=0.5, every=5), one, timestep=second)
    with agglo.hosts.diffusers.generation():
        expected = run(model, one, timestep=second)
    assert torch.equal(smaller, expected)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("options", [{"every": 2}, {"drift": 0.1}])
def test_outside_of_a_generation_nothing_is_kept_by_guessing(options: dict[str, Any]) -> None:
    model, inputs = unet()
    agglo.apply(model, keep_rate=0.5, **options)
    with pytest.raises(RuntimeError, match=r"generation"):
        run(model, inputs)
    with agglo.hosts.diffusers.generation(), pytest.raises(ValueError, match="timestep"):
        run(model, inputs, timestep=None)
