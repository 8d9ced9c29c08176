"""The generator's training: windows of tokens, the loss, and a run that goes on to the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agglo.embedded import generator
from agglo.lab.tasks.synthesis.training.trainer import (
    Generation,
    GeneratorSettings,
    cut,
    random_windows,
    taking,
    train_generator,
)
from agglo.lab.training.batches import Share
from agglo.utils import files
from tests.support.fashion import log, write_fashion

SMALL = {"num_layers": 2, "num_attention_heads": 1, "attention_head_dim": 16}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "SHAPE", {**generator.SHAPE, **SMALL})


def quick(**changes: Any) -> GeneratorSettings:
    values = {"epochs": 3, "window_epochs": 1, "batch_size": 16, "lr_batch": 16, "warmup_epochs": 0.5}
    return GeneratorSettings(**{**values, "validation_images": 7, "checkpoint_minutes": 0.0, **changes})


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(2, 9), st.data())
def test_windows_are_squares_of_the_image(count: int, grid: int, data: st.DataObject) -> None:
    side = data.draw(st.integers(1, grid))
    patch = data.draw(st.integers(1, 3))
    tokens = random_windows(count, grid, side, torch.device("cpu"))
    images = torch.randn(count, 2, grid * patch, grid * patch)
    windows = cut(images, tokens, patch)
    for image, window, numbers in zip(images, windows, tokens, strict=True):
        row, column = divmod(int(numbers[0]), grid)
        expected = image[:, row * patch : (row + side) * patch, column * patch : (column + side) * patch]
        assert torch.equal(window, expected)


def test_the_model_goes_on_with_the_tokens_of_the_window(small: None) -> None:
    model = generator.untrained().eval()
    images, steps, classes = torch.randn(2, 1, 32, 32), torch.tensor([10, 900]), torch.tensor([1, 10])
    tokens = random_windows(2, 16, 8, torch.device("cpu"))
    seen = []
    hook = model.transformer_blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))  # type: ignore[index,union-attr]
    whole = model.pos_embed(images)  # type: ignore[operator]
    with taking(model.pos_embed, tokens):  # type: ignore[arg-type]
        predicted = model(images, steps, classes).sample
    hook.remove()
    expected = torch.stack([embedded[numbers] for embedded, numbers in zip(whole, tokens, strict=True)])
    assert torch.equal(seen[0], expected)
    assert predicted.shape == (2, 1, 16, 16)
    assert model(images, steps, classes).sample.shape == images.shape


def test_the_loss_is_that_of_the_velocity(small: None, tmp_path: Path) -> None:
    task = Generation(quick(), write_fashion(tmp_path / "data"), Share(16))
    clean, noise = torch.randn(3, 1, 32, 32), torch.randn(3, 1, 32, 32)
    steps, classes = torch.tensor([0, 500, 999]), torch.tensor([1, 2, 10])
    # An untrained model predicts 0: its error is the mean square of the velocity, sqrt(a) noise - sqrt(1 - a) image.
    kept = task.noise.alphas_cumprod[steps].view(-1, 1, 1, 1)
    velocity = kept.sqrt() * noise - (1 - kept).sqrt() * clean
    found = task.error(task.model, clean, classes, steps, noise)
    torch.testing.assert_close(found, velocity.square().mean(dim=(1, 2, 3)), rtol=1e-4, atol=1e-5)


def test_classes_are_hidden_from_all_blocks_at_once(small: None, tmp_path: Path) -> None:
    task = Generation(quick(class_dropout=1.0), write_fashion(tmp_path / "data"), Share(16))
    seen = []
    for block in task.model.transformer_blocks:  # type: ignore[union-attr]
        embedder = block.norm1.emb.class_embedder  # type: ignore[union-attr]
        embedder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))  # type: ignore[union-attr,operator]
    task.model.train()
    images, classes = next(task.data.batches(0, 0, 1))
    task.loss(task.model, images, classes)
    assert seen and all((labels == generator.ANY_CLASS).all() for labels in seen)


def test_training_learns_and_a_stopped_run_ends_with_the_same_weights(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_fashion(tmp_path / "data")
    how = quick(epochs=4, lr=1e-2, evaluate_first=True)
    best = train_generator(how, data, tmp_path / "whole")
    losses = [float(row["loss"]) for row in log(tmp_path / "whole")]
    assert losses[-1] < 0.85 * losses[0]
    model = generator.trained(tmp_path / "whole" / "best" / "model.safetensors")
    assert generator.sample(model, [0, 1], [0, 1], steps=2).shape == (2, 1, 28, 28)
    calls = iter(range(100))
    loss = Generation.loss

    def stopping(self: Generation, *arguments: Any) -> Any:
        if next(calls) == 4:  # in the second epoch, the first one without windows
            raise KeyboardInterrupt
        return loss(self, *arguments)

    monkeypatch.setattr(Generation, "loss", stopping)
    with pytest.raises(KeyboardInterrupt):
        train_generator(how, data, tmp_path / "stopped")
    assert train_generator(how, data, tmp_path / "stopped") == best
    one, other = (files.load_state(tmp_path / name / "last" / "state.pt") for name in ("whole", "stopped"))
    assert one is not None and other is not None
    for part in ("model", "average"):
        assert all(torch.equal(value, other[part][name]) for name, value in one[part].items())
    with pytest.raises(ValueError, match="class_dropout: "):
        train_generator(replace(how, class_dropout=0.5), data, tmp_path / "stopped")
