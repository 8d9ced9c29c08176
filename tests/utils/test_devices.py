"""Where a model runs unless told."""

from __future__ import annotations

import pytest
import torch

from agglo.utils.devices import best_device, new_accelerator


def test_an_accelerator_goes_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert best_device().type == "mps"


def test_one_process_evaluates_and_trains_in_several_precisions() -> None:
    """Accelerate itself refuses another precision than its first."""
    pytest.importorskip("accelerate")
    evaluating = new_accelerator(cpu=True, mixed_precision="no")
    training = new_accelerator(cpu=True, mixed_precision="bf16")
    product = torch.nn.Linear(4, 4)
    with training.autocast():
        assert product(torch.ones(1, 4)).dtype == torch.bfloat16
    with evaluating.autocast():
        assert product(torch.ones(1, 4)).dtype == torch.float32, "the earlier one stays in its own"
