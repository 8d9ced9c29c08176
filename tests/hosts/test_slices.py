"""A few images at a time gives what the whole batch gives, and nobody who watches notices."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import agglo
from agglo.hosts.common import blocks

TOKENS_OF_TWO = 2 * 17 * 192 * 4 * 4


@pytest.fixture
def model() -> torch.nn.Module:
    """Proved once, since the first of its kind in a process is also run for the proof, which `pieces` would count."""
    torch.manual_seed(0)
    built = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, num_classes=5).eval()
    return agglo.remove(agglo.apply(built, keep_rate=0.5))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> list[int]:
    """Images that the MLP of the first block is given at a time, two where slices are allowed to form."""
    seen: list[int] = []
    monkeypatch.setattr(blocks, "_HIDDEN_BYTES", TOKENS_OF_TWO)
    mlp = model.blocks[0].mlp
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: (seen.append(len(x)), forward(x))[1])
    return seen


def test_slices_give_what_the_batch_gives(model: torch.nn.Module, pieces: list[int]) -> None:
    images = torch.randn(5, 3, 64, 64)
    agglo.apply(model, keep_rate=0.5, blocks=(1, 2))
    with torch.no_grad():
        sliced = model(images)
        assert pieces == [2, 2, 1]
        alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(sliced, alone, rtol=1e-4, atol=1e-5)


def test_gradients_and_hooks_get_the_whole_batch(model: torch.nn.Module, pieces: list[int]) -> None:
    images = torch.randn(5, 3, 64, 64)
    agglo.apply(model, keep_rate=0.5, blocks=(1, 2))
    model(images).sum().backward()
    assert pieces == [5]
    pieces.clear()
    shapes: list[torch.Size] = []
    hook = model.blocks[0].mlp.fc1.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    with torch.no_grad():
        model(images)
        assert pieces == [5] and [tuple(shape) for shape in shapes] == [(5, 17, 768)]
        hook.remove()
        model(images)
    assert pieces == [5, 2, 2, 1]


class Wrapped(Tensor):
    """Weights as quantising libraries make them: a tensor class that has a matrix product of its own."""


@torch.no_grad()
def test_weights_of_another_class_get_the_whole_batch(model: nn.Module, pieces: list[int]) -> None:
    agglo.apply(model, keep_rate=0.5, blocks=(1, 2))
    fc2 = model.blocks[0].mlp.fc2  # type: ignore[union-attr]
    fc2.weight = nn.Parameter(fc2.weight.data.as_subclass(Wrapped))
    model(torch.randn(5, 3, 64, 64))
    assert pieces == [5]
