"""What agglo does not reduce, it refuses in a sentence that says why, and that points to the page on hosts."""

# ruff: noqa: E501 a model is a line
from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import agglo
from tests.support.class_heads import open_clip_tower
from tests.support.families import FAMILIES, SMALL, build_naflex, images

transformers = pytest.importorskip("transformers")
pytest.importorskip("timm")


def timm(folder: str, cls: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module(f"timm.models.{folder}"), cls)(**options)  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "timm-swin": (timm("swin_transformer", "SwinTransformer", img_size=32, embed_dim=8, depths=(1, 1), num_heads=(1, 1), window_size=4), "SwinTransformer attends within windows"),
    "timm-xcit": (timm("xcit", "Xcit", img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2), "Xcit attends between channels"),
    "timm-sam": (timm("vision_transformer_sam", "VisionTransformerSAM", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, window_size=2), "VisionTransformerSAM attends within windows"),
    "swin": (lambda: transformers.SwinModel(transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[1, 2], window_size=4)), "SwinModel attends within windows"),
    "sam": (lambda: transformers.SamVisionModel(transformers.SamVisionConfig(**{**SMALL, "num_hidden_layers": 2}, output_channels=8, window_size=2, global_attn_indexes=[1])), "SamVisionLayer, which attends within windows"),
    "timesformer": (lambda: transformers.TimesformerModel(transformers.TimesformerConfig(**SMALL, num_frames=2)), "TimesformerLayer, which attends between frames at every position alone"),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 3, 3)), "holds no transformer that agglo can reduce; supported: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(name: str) -> None:
    build, sentence = REFUSED[name]
    model = build()
    types = [type(module) for module in model.modules()]
    with pytest.raises(agglo.UnsupportedModelError) as refusal:
        agglo.apply(model, keep_rate=0.5)
    assert sentence in str(refusal.value)
    assert "docs/hosts.md" in str(refusal.value) or "is built from" in str(refusal.value)
    assert [type(module) for module in model.modules()] == types


# The module that owns the loop of a model, the method that agglo overrides there, and the blocks.
LOOPS = {
    "timm-VisionTransformer": ("", "forward_features", "blocks"),
    "torchvision-VisionTransformer": ("encoder", "forward", "encoder.layers"),
    "open_clip-VisionTransformer": ("transformer", "forward", "transformer.resblocks"),
    "transformers-ViTForImageClassification": ("vit", "forward", "vit.layers"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_cannot_be_taken_apart_is_refused_by_name(name: str) -> None:
    (path, method, blocks), library = LOOPS[name], name.partition("-")[0]
    pytest.importorskip(library)
    family = next(one for one in FAMILIES if one.id == name)
    model = family.fresh()
    loop = model.get_submodule(path)
    loop.__class__ = type("Own", (type(loop),), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(agglo.UnsupportedModelError, match=f"Own replaces {method} of {library}"):
        agglo.apply(model, keep_rate=0.5)
    model = family.fresh()
    model.get_submodule(blocks)[2] = nn.TransformerEncoderLayer(24, 2)
    with pytest.raises(agglo.UnsupportedModelError, match="built from TransformerEncoderLayer, which has no MLP"):
        agglo.apply(model, keep_rate=0.5)


def test_tokens_that_agglo_does_not_know_are_not_guessed_at() -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**SMALL))
    model.embeddings.prompts = nn.Parameter(model.embeddings.cls_token.detach().clone())
    with pytest.raises(agglo.UnsupportedModelError, match="a parameter 'prompts' that agglo does not know"):
        agglo.apply(model, keep_rate=0.5)


TOKENS, MASK = torch.zeros(2, 17, 24), torch.zeros(2, 1, 17, 17)
# By the name of the mask: what makes a model, what to call in it, and the arguments before the mask.
MASKED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], str, tuple[Any, ...]]] = {
    "transformers": (lambda: transformers.ViTModel(transformers.ViTConfig(**SMALL)), lambda model: model, "attention_mask", (images(), None, None)),
    "transformers-encoder": (lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL)), lambda model: model.encoder, "attention_mask", (TOKENS,)),
    "timm": (timm("vision_transformer", "VisionTransformer", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2), lambda model: model, "attn_mask", (images(),)),
    "timm-naflex": (build_naflex, lambda model: model.forward_features, "attn_mask", (images(), None, None)),
    "open_clip": (open_clip_tower, lambda model: model.transformer, "attn_mask", (torch.zeros(2, 17, 48),)),
}  # fmt: skip


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("name", MASKED)
@torch.no_grad()
def test_a_mask_is_refused_however_it_is_given(name: str, positional: bool) -> None:
    build, called, argument, before = MASKED[name]
    call = called(agglo.apply(build().eval(), keep_rate=0.5))
    mask = MASK + torch.linspace(0, 1, 17)
    with pytest.raises(ValueError, match=f"{argument} does not go with token reduction"):
        call(*before, mask) if positional else call(*before, **{argument: mask})
