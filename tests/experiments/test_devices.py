"""Where a model runs unless told."""

from __future__ import annotations

import pytest
import torch

from agglo.experiments.devices import best_device, require_device


def test_the_best_device_is_there() -> None:
    assert require_device(str(best_device())) == best_device()
    if not torch.accelerator.is_available():
        assert best_device() == torch.device("cpu")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_an_accelerator_goes_before_the_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert best_device().type == kind
