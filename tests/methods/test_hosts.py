"""Every method on every host: shapes stay, learned parameters are found, dropped tokens come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import agglo

NAMES = [info.name for info in agglo.methods()]


def timm_eva() -> nn.Module:
    """With rotary positions and a class token."""
    eva = pytest.importorskip("timm.models.eva")
    model: nn.Module = eva.Eva(
        img_size=32, patch_size=4, embed_dim=32, depth=4, num_heads=4, num_classes=5, use_rot_pos_emb=True
    )
    return model


def torchvision_vit() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    model: nn.Module = models.VisionTransformer(32, 4, 4, 4, 32, 64, num_classes=5)
    return model


def open_clip_vit() -> nn.Module:
    transformer = pytest.importorskip("open_clip.transformer")
    model: nn.Module = transformer.VisionTransformer(32, 4, 32, 4, 4, 2.0, output_dim=5)
    return model


def transformers_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=4
    )
    model: nn.Module = transformers.ViTModel(config)
    return model


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: Any = model(x)
    return output if isinstance(output, torch.Tensor) else output.last_hidden_state


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("host", [timm_eva, torchvision_vit, open_clip_vit, transformers_vit])
def test_every_method_runs_on_every_host(host: Any, name: str) -> None:
    torch.manual_seed(0)
    model, x = host().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for parameter in model.parameters():  # torchvision's head starts as zeros
            parameter.add_(torch.randn(parameter.shape) * 0.05)
        dense = run(model, x)
    keys = list(model.state_dict())
    agglo.apply(model, name, keep_rate=0.6)
    new = len(model.state_dict()) - len(keys)
    assert (new > 0) == next(info.learns for info in agglo.methods() if info.name == name)
    with agglo.trace(model) as trace:
        reduced = run(model, x)
    assert reduced.shape == dense.shape
    assert reduced.isfinite().all()
    counts = [step.total.n_groups - 1 for step in trace.steps]
    report = agglo.reduction(model)
    assert report is not None
    assert report.counts is not None
    for step, count in zip(trace.steps, counts, strict=True):
        assert report.varies == "about" or count <= report.counts[step.block]
        assert report.varies != "no" or count == report.counts[step.block]
    assert not torch.equal(reduced, dense)
    model.train()
    run(model, x).pow(2).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    agglo.remove(model).eval()
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(run(model, x), dense)


def open_clip_wide() -> nn.Module:
    transformer = pytest.importorskip("open_clip.transformer")
    model: nn.Module = transformer.VisionTransformer((16, 64), 4, 32, 4, 4, 2.0, output_dim=5)
    return model


def transformers_wide(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    vision = {"CLIP": "CLIPVision", "Siglip": "SiglipVision"}.get(family, family)
    config = getattr(transformers, f"{vision}Config")(**sizes, image_size=32, patch_size=4)
    return getattr(transformers, f"{vision}Model")(config)


class Interpolating(nn.Module):
    """A transformers model at another size than its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x, interpolate_pos_encoding=True)


@pytest.mark.parametrize("host", ["timm", "open_clip", "ViT", "DeiT", "CLIP", "Siglip"])
@pytest.mark.parametrize("name", ["l1", "linf", "pool"])
@torch.no_grad()
def test_patches_are_where_the_host_says(host: str, name: str) -> None:
    """4 x 16 patches are as many as 8 x 8, and lie elsewhere."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    if host == "timm":
        model: nn.Module = timm.VisionTransformer(img_size=(16, 64), patch_size=4, embed_dim=32, depth=4, num_heads=4)
    else:
        model = open_clip_wide() if host == "open_clip" else Interpolating(transformers_wide(host))
    agglo.apply(model.eval(), name, keep_rate=0.5, blocks=(1,))
    with agglo.trace(model) as trace:
        run(model, torch.randn(1, 3, 16, 64))
    labels = trace.steps[0].total.labels[0, -64:].reshape(4, 16)
    assert torch.equal(labels >= 0, (labels >= 0).flip(0).flip(1))
    if name == "pool":
        assert all(group[-1] - group[0] < 16 * 2 for group in _members(labels))  # of two rows at most
        assert all(max(p % 16 for p in group) - min(p % 16 for p in group) <= 1 for group in _members(labels))
    else:
        y = (torch.arange(4) - 1.5).abs()[:, None].expand(4, 16) * 4 / 3
        x = (torch.arange(16) - 7.5).abs()[None].expand(4, 16) * 16 / 15
        distance = y + x if name == "l1" else torch.maximum(y, x)
        assert distance[labels >= 0].max() <= distance[labels < 0].min() + 1e-5
        assert 20 < int((labels >= 0).sum()) < 44


def _members(labels: torch.Tensor) -> list[list[int]]:
    flat = labels.flatten().tolist()
    return [[p for p, label in enumerate(flat) if label == group] for group in sorted(set(flat))]


def test_shuffled_patches_have_no_grid() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=4
    )
    model = transformers.ViTMAEModel(config)
    for name in ("l2", "pool"):
        with pytest.raises(ValueError, match=f"{name} needs a grid of patches: these 16 are in no order"):
            agglo.apply(model, name, keep_rate=0.5)
    agglo.apply(model, "atc", keep_rate=0.5)


@torch.no_grad()
def test_skipped_tokens_keep_their_rotary_places() -> None:
    """A model with rotary positions: all processed is the dense model, and images of a batch do not meet."""
    torch.manual_seed(0)
    model, x = timm_eva().eval(), torch.randn(3, 3, 32, 32)
    dense = model(x)
    agglo.apply(model, "svit", keep_rate=0.6)
    together = model(x)
    for index in range(3):
        torch.testing.assert_close(together[index : index + 1], model(x[index : index + 1]), rtol=0, atol=1e-5)
    for gate in model.agglo_method.gates:  # type: ignore[union-attr]
        gate.decide[2].bias.copy_(torch.tensor([100.0, -100.0]))
    torch.testing.assert_close(model(x), dense, rtol=0, atol=1e-5)
