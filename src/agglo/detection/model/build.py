"""A detector in one call: Mask R-CNN on a ViT-Adapter, with the weights of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from agglo.detection.model import published, vit_weights
from agglo.detection.model.adapter import ViTAdapter
from agglo.detection.model.mask_rcnn import Detector
from agglo.detection.model.settings import HeadSettings
from agglo.detection.model.vit import SIZES, plain_vit
from agglo.experiments.checkpoints import load_exactly, read_checkpoint, split_method


def vit_adapter(
    size: str | None = None,
    *,
    backbone: nn.Module | None = None,
    n_classes: int = 80,
    weights: Path | str | None = None,
    windowed: bool = False,
    class_token: bool = False,
    layer_scale: bool | None = None,
    heads: HeadSettings | None = None,
    **adapter: Any,
) -> Detector:
    """Mask R-CNN on a ViT-Adapter: boxes, classes and masks of the objects in images of any size.

    The arguments that matter:
    size: "tiny" or "small": DeiT's shape, without class token, last norm and head.
    backbone: instead of a size, any plain ViT of timm that agglo knows. It becomes part of the detector.
    n_classes: without background.
    weights: a file. ImageNet weights of a timm ViT (DeiT, AugReg), which the ViT starts from; or a whole detector,
        saved by agglo or published by the authors of ViT-Adapter, SViT or ATC. All tensors must fit; `left_out` of
        the detector names those of the file that a detector has no place for (class token, head).
    windowed: attend within windows of 14 x 14 tokens in all but every third block, as the original ViT-Adapter.
    class_token: keep the ViT's, for methods that ask it which tokens matter. Ours; no published detector has one.

    To tinker with:
    layer_scale: scale what each block adds; None: if the weights have it. heads: every number of the heads.
    adapter: further options of `ViTAdapter` (interactions, deform_heads, points, prior_width, drop_path, padding, ...).
    """
    if (size is None) == (backbone is None):
        given = "both" if size is not None else "neither"
        raise ValueError(f"size or backbone is needed, {given} given; sizes: {', '.join(map(repr, SIZES))}")
    source = str(weights)
    state = None if weights is None else read_checkpoint(Path(weights))
    left_out: list[str] = []
    if size is not None:
        if layer_scale is None:
            layer_scale = state is not None and _has_layer_scale(state)
        vit = plain_vit(size, class_token=class_token, drop_path=adapter.get("drop_path"), layer_scale=layer_scale)
        adapter.setdefault("drop_path", SIZES[size].drop_path)
        if state is not None and vit_weights.is_vit(state):
            left_out = vit_weights.load_vit(vit, state, source)
    else:
        assert backbone is not None
        if layer_scale is not None:
            raise ValueError(f"layer_scale={layer_scale} is for a size; a given backbone has it or has not")
        vit = backbone
        if state is not None and vit_weights.is_vit(state):
            load_exactly(vit, state, source)
    body = ViTAdapter(vit, class_token=class_token, windowed=windowed, **adapter)
    detector = Detector(body, n_classes=n_classes, settings=heads)
    if state is not None and not vit_weights.is_vit(state):
        left_out = load_detector(detector, state, source)
    detector.left_out = tuple(left_out)
    return detector


def load_detector(detector: Detector, state: Mapping[str, Tensor], source: str) -> list[str]:
    """Load a whole detector, agglo's own or a published one; returns the names of what it has no place for.

    What a method learned is left out too: `method_weights` reads it, for after `agglo.apply`.
    """
    if not published.is_published(state):
        own, learned = split_method(state)
        load_exactly(detector, own, source)
        return list(learned)
    try:
        found = published.from_published(state, detector.state_dict())
    except ValueError as error:
        raise ValueError(f"checkpoint={source!r}: {error}") from error
    load_exactly(detector, found.model, source)
    if found.encoder_layers:
        for name, module in detector.backbone.named_modules():
            if name.startswith("vit.blocks.") and isinstance(module, nn.LayerNorm):
                module.eps = published.ENCODER_LAYER_EPS
    return [*found.left_out, *found.method]


def method_weights(weights: Path | str, detector: Detector) -> dict[str, Tensor]:
    """What a method had learned, in a detector's file or a published one (SViT's gates); empty if nothing.

    `agglo.experiments.checkpoints.load_method` gives it to the applied method.
    """
    state = read_checkpoint(Path(weights))
    if published.is_published(state):
        return published.from_published(state, split_method(detector.state_dict())[0]).method
    return split_method(state)[1]


def _has_layer_scale(state: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(("blocks.0.ls1.gamma", "backbone.blocks.0.gamma1")) for name in state)
