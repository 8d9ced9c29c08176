"""Methods on every host: shapes stay, learned parameters are found, dropped tokens come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import agglo
from agglo.methods import create
from tests.support.class_heads import torchvision_model
from tests.support.reductions import built, view


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


@pytest.mark.parametrize("host", [transformers_vit, torchvision_model])
@pytest.mark.parametrize("name", ["atc", "kmedoids", "topk", "sit", "svit", "evovit"])  # one of each kind
def test_every_kind_of_method_runs_on_every_host(host: Any, name: str) -> None:
    torch.manual_seed(0)
    model, x = host().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for parameter in model.parameters():  # torchvision's head starts as zeros
            parameter.add_(torch.randn(parameter.shape) * 0.05)
        dense = run(model, x)
    keys = list(model.state_dict())
    agglo.apply(model, name, keep_rate=0.6)
    new = len(model.state_dict()) - len(keys)
    assert (new > 0) == next(info.learns for info in agglo.list_methods() if info.name == name)
    with agglo.trace(model) as trace:
        reduced = run(model, x)
    assert reduced.shape == dense.shape
    assert reduced.isfinite().all()
    report: Any = agglo.report(model)
    for step in trace.steps:
        assert report.varies != "no" or step.total.n_groups - 1 == report.counts[step.block]
    assert not torch.equal(reduced, dense)
    model.train()
    run(model, x).pow(2).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    agglo.remove(model).eval()
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(run(model, x), dense)


NO_LAYER_DECIDES = [info.name for info in agglo.list_methods() if not info.learns or info.name == "dpc_knn"]


@pytest.mark.parametrize("name", NO_LAYER_DECIDES)
def test_autocast_selects_what_float32_selects(name: str) -> None:
    """Given the same keys, values and tokens, which are bfloat16 here, the decision is that of float32."""
    method = built(create(name, **({"seed": 0} if name == "random" else {})), n=64, target=33, width=8)
    shown = view(batch=8, n=64, target=36 if name == "pool" else 33, grid=(8, 8), memory=torch.rand(8, 65))
    half = {each: getattr(shown, each).bfloat16() for each in ("tokens", "keys", "values")}
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        actual = method.reduce(replace(shown, **half)).grouping
    with torch.no_grad():
        exact = method.reduce(replace(shown, **{each: tensor.float() for each, tensor in half.items()})).grouping
    assert torch.equal(actual.labels, exact.labels) and torch.equal(actual.sizes, exact.sizes)


@torch.no_grad()
@pytest.mark.parametrize("host", ["timm", "open_clip", "transformers"])
def test_patches_are_where_the_host_says(host: str) -> None:
    """4 x 16 patches are as many as 8 x 8, and lie elsewhere."""
    if host == "timm":
        timm = pytest.importorskip("timm.models.vision_transformer")
        model: nn.Module = timm.VisionTransformer(img_size=(16, 64), patch_size=4, embed_dim=32, depth=4, num_heads=4)
    elif host == "open_clip":
        transformer = pytest.importorskip("open_clip.transformer")
        model = transformer.VisionTransformer((16, 64), 4, 32, 4, 4, 2.0, output_dim=5)
    else:
        model = transformers_vit()
    agglo.apply(model.eval(), "linf", keep_rate=0.5, blocks=(1,))
    with agglo.trace(model) as trace:
        model(torch.randn(1, 3, 16, 64), **({"interpolate_pos_encoding": True} if host == "transformers" else {}))
    kept = trace.steps[0].total.labels[0, -64:].reshape(4, 16) >= 0
    y = (torch.arange(4) - 1.5).abs()[:, None].expand(4, 16) * 4 / 3
    x = (torch.arange(16) - 7.5).abs()[None].expand(4, 16) * 16 / 15
    distance = torch.maximum(y, x)
    assert distance[kept].max() <= distance[~kept].min() + 1e-5 and 20 < int(kept.sum()) < 44


def test_shuffled_patches_have_no_grid() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=4
    )
    model = transformers.ViTMAEModel(config)
    with pytest.raises(ValueError, match="l2 needs a grid of patches: these 16 are in no order"):
        agglo.apply(model, "l2", keep_rate=0.5)
    agglo.apply(model, "atc", keep_rate=0.5)
