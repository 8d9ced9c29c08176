"""Speeds in turns: who runs when, what is counted, and what the model is afterwards."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agglo.patch import apply, remove, report
from agglo.utils import timing
from agglo.utils.timing import speeds_in_turns

timm = pytest.importorskip("timm")

WAYS: list[str | None] = [None, "tome", "atc"]


def applied(model: nn.Module, keep_rate: float = 0.5) -> Callable[[str | None], Any]:
    return lambda method: remove(model) if method is None else apply(model, method, keep_rate=keep_rate)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    built: nn.Module = timm.create_model("test_vit", num_classes=3)
    return built.train()


def test_every_variant_runs_each_batch_before_the_next_one(model: nn.Module) -> None:
    ran: list[tuple[str, int]] = []

    def note(module: Any, inputs: tuple[Tensor, ...]) -> None:
        assert not module.training and not torch.is_grad_enabled()
        found = report(module)
        ran.append(("dense" if found is None else found.config.method, len(inputs[0])))

    model.register_forward_pre_hook(note)
    batches = [torch.rand(n, 3, 160, 160) for n in (3, 2)]
    found = speeds_in_turns(model, WAYS, batches, 2, applied(model))
    there = ["dense", "tome", "atc"]
    assert ran == [(name, size) for size in (3, 2) for name in [*there, *there, *reversed(there)]]
    assert report(model) is None and model.training
    assert len(found) == 3 and all(speed["images_per_second"] > 0 and speed["spread"] is not None for speed in found)


def test_the_median_and_the_spread_are_of_each_variants_own_passes(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds in the order of the passes: one uncounted pass each, then there and back.
    left = iter([100.0, 100.0, 1.0, 2.0, 4.0, 2.0, 0.5, 8.0])
    monkeypatch.setattr(timing, "timed_pass", lambda model, inputs: (next(left), inputs))
    dense, tome = speeds_in_turns(model, WAYS[:2], [torch.rand(4, 3, 160, 160)], 3, applied(model))
    for found, own in ((dense, [1.0, 2.0, 0.5]), (tome, [2.0, 4.0, 8.0])):
        speeds = [4 / value for value in own]
        assert found["images_per_second"] == pytest.approx(median(speeds))
        assert found["spread"] == pytest.approx(np.subtract(*np.quantile(speeds, [0.75, 0.25])))


def test_the_model_is_put_back_when_a_variant_cannot_run(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="tome"):
        speeds_in_turns(model, WAYS, [torch.rand(1, 3, 160, 160)], 1, applied(model, keep_rate=0.25))
    assert report(model) is None and model.training
