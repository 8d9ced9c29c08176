"""A generator that is made in a moment, and whose blocks do something, unlike those of an untrained one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from agglo.embedded import generator


def random_weights(path: Path) -> Path:
    """A file of weights for the embedded generator, all drawn."""
    torch.manual_seed(0)
    model = generator.untrained()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embedding_table" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.08)
    save_file(model.state_dict(), path)
    return path
