"""Every method on every host: shapes stay, learned parameters are found, dropped tokens come back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import agglo
from agglo.methods import Method, Outcome, View, create

NAMES = [info.name for info in agglo.list_methods()]


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


@pytest.mark.parametrize(
    ("host", "name"),
    [
        *((transformers_vit, name) for name in NAMES),
        *product([timm_eva, torchvision_vit, open_clip_vit], ["atc", "kmedoids", "topk", "sit", "svit", "evovit"]),
    ],
)
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
    assert (new > 0) == next(info.learns for info in agglo.list_methods() if info.name == name)
    with agglo.trace(model) as trace:
        reduced = run(model, x)
    assert reduced.shape == dense.shape
    assert reduced.isfinite().all()
    counts = [step.total.n_groups - 1 for step in trace.steps]
    report = agglo.report(model)
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


class Watched:
    """A model's method, which answers every view twice: as the model asks, and once more outside autocast, with
    attention weights worked out here in float32 from the very queries and keys that attention was given."""

    def __init__(self, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
        self.q = self.k = torch.empty(0)
        self.scale = 1.0
        self.answers: list[tuple[Outcome, Outcome]] = []
        attend, reduce = F.scaled_dot_product_attention, type(method).reduce
        remember = type(method).remember

        def watched_attend(q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
            self.q, self.k, self.scale = q, k, options.get("scale") or q.shape[-1] ** -0.5
            return attend(q, k, v, *more, **options)

        def watched_reduce(method: Method, view: View) -> Outcome:
            outcome = reduce(method, view)
            with torch.autocast("cpu", enabled=False):
                self.answers.append((outcome, reduce(method, self.exact(method, view))))
            return outcome

        def watched_remember(method: Method, attention: Tensor, memory: Tensor | None) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                torch.testing.assert_close(attention, self.weights(None)[:, :, 0], rtol=1e-5, atol=1e-7)
            return remember(method, attention, memory)

        monkeypatch.setattr(F, "scaled_dot_product_attention", watched_attend)
        monkeypatch.setattr(type(method), "reduce", watched_reduce)
        monkeypatch.setattr(type(method), "remember", watched_remember)

    def weights(self, sizes: Tensor | None) -> Tensor:
        logits = self.q.float() @ self.k.float().transpose(-2, -1) * self.scale
        return (logits if sizes is None else logits + sizes.log()[:, None, None]).softmax(-1)

    def exact(self, method: Method, view: View) -> View:
        sizes = view.sizes if method.proportional or view.sizes is None else (view.sizes > 0).float()
        per_token = {
            "tokens": view.tokens,
            "keys": view.keys,
            "values": view.values,
            "class_attention": None if view.class_attention is None else self.weights(sizes)[:, :, 0],
            "attention_received": None if view.attention_received is None else self.weights(None).sum((1, 2)),
        }
        return replace(view, **{name: None if each is None else each.float() for name, each in per_token.items()})


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_autocast_selects_what_float32_selects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the same queries, keys, values and tokens, which are bfloat16 here, the decision is that of float32."""
    torch.manual_seed(0)
    model, x = timm_eva().eval(), torch.randn(8, 3, 32, 32)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.2)
    method = create(name, **({"seed": 0} if name == "random" else {}))
    agglo.apply(model, method, keep_rate=0.6)
    watched = Watched(method, monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(model, x)
    assert len(watched.answers) >= 2
    learns = isinstance(method, nn.Module) and any(True for _ in method.parameters()) and name != "dpc_knn"
    for actual, exact in watched.answers:
        if learns:  # layers of the model's precision decide, as in the rest of the model
            agree = (actual.grouping.labels >= 0) == (exact.grouping.labels >= 0)
            assert agree.float().mean() > 0.9
        else:
            assert torch.equal(actual.grouping.labels, exact.grouping.labels)
            assert torch.equal(actual.grouping.sizes, exact.grouping.sizes)


@pytest.mark.parametrize("host", ["timm", "open_clip", "transformers"])
@pytest.mark.parametrize("name", ["l1", "linf", "pool"])
@torch.no_grad()
def test_patches_are_where_the_host_says(host: str, name: str) -> None:
    """4 x 16 patches are as many as 8 x 8, and lie elsewhere."""
    if host == "timm":
        timm = pytest.importorskip("timm.models.vision_transformer")
        model: nn.Module = timm.VisionTransformer(img_size=(16, 64), patch_size=4, embed_dim=32, depth=4, num_heads=4)
    elif host == "open_clip":
        transformer = pytest.importorskip("open_clip.transformer")
        model = transformer.VisionTransformer((16, 64), 4, 32, 4, 4, 2.0, output_dim=5)
    else:
        model = transformers_vit()
    agglo.apply(model.eval(), name, keep_rate=0.5, blocks=(1,))
    options = {"interpolate_pos_encoding": True} if host == "transformers" else {}
    with agglo.trace(model) as trace:
        model(torch.randn(1, 3, 16, 64), **options)
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
