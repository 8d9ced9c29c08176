"""Detectors by size, by the folder of a run or by a file of weights, and Mask R-CNN on a ViT-Adapter in one call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import timm
from safetensors import safe_open
from torch import Tensor, nn

from agglo import embedded
from agglo.checks import choice
from agglo.lab.tasks.detection.model import published
from agglo.lab.tasks.detection.model.adapter import ViTAdapter
from agglo.lab.tasks.detection.model.heads import HeadSettings, head_settings
from agglo.lab.tasks.detection.model.mask_rcnn import Detector
from agglo.lab.tasks.detection.model.vit import MINIATURE, SIZES, load_vit, miniature_vit, plain_vit
from agglo.models.checkpoints import load_exactly, read_checkpoint, split_method

NAMES = (*SIZES, MINIATURE)
_PUBLISHED = "rpn_head.rpn_conv.weight"  # a name in MMDetection's detectors alone
_METADATA = "detector"  # the key in a weight file's metadata that holds the spec
_CLASS_SCORES = re.compile(r"^(roi\..*classes|roi_head\.bbox_head\.fc_cls)\.weight$")  # ours, and the published


@dataclass(frozen=True)
class DetectorSpec:
    """All that makes a detector, without its weights."""

    model: str = "tiny"  # "tiny", "small", "miniature", or the name of a timm ViT
    n_classes: int = 80  # without background
    backbone_options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the timm ViT
    adapter_options: Mapping[str, Any] = field(default_factory=dict)  # of `vit_adapter`
    head_options: Mapping[str, Any] = field(default_factory=dict)  # of `HeadSettings`
    classes: tuple[str, ...] = ()  # their names, in the order of its labels; empty if only their number is known
    image_size: int | None = None  # side of the squares that images become; None is a short side of 800 pixels

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, such as "class 3" where only their number is known."""
        return list(self.classes) or [f"class {label}" for label in range(self.n_classes)]

    def build(self, weights: Path | None = None, *, start: bool = False) -> Detector:
        """Build the detector on the CPU; ValueError names what does not fit.

        weights are as `vit_adapter` takes them; with `start` the miniature starts from the embedded classifier.
        """
        if self.model not in NAMES and not timm.is_model(self.model):
            choice("model", self.model, NAMES, also=", or the name of a timm ViT")
        if self.model in SIZES and self.backbone_options:
            raise ValueError(f"backbone_options={dict(self.backbone_options)} are for a timm model")
        vit: nn.Module | str = self.model
        try:
            if self.model == MINIATURE:
                vit = miniature_vit(pretrained=start and weights is None, **self.backbone_options)
            elif self.model not in SIZES:
                vit = timm.create_model(self.model, pretrained=False, **self.backbone_options)
            heads = head_settings(self.head_options)
            detector = vit_adapter(vit, n_classes=self.n_classes, weights=weights, heads=heads, **self.adapter_options)
        except TypeError as error:
            raise ValueError(f"model={self.model!r} cannot be built: {error}") from error
        if self.image_size is not None:
            side = -(-self.image_size // detector.strides[-1]) * detector.strides[-1]
            detector.backbone.nominal_size = (side, side)
        return detector

    def about(self) -> dict[str, str]:
        """Return the metadata of a file of weights, from which `open_detector` builds the detector again."""
        return {_METADATA: json.dumps(asdict(self), sort_keys=True)}


@dataclass(frozen=True)
class Opened:
    """A detector in evaluation mode, its name for titles, and where its weights come from: a file, or "random".

    `learned` is what a method had learned with it; None if all weights are random.
    """

    spec: DetectorSpec
    model: Detector
    learned: Mapping[str, Tensor] | None
    name: str
    weights: str


def open_detector(model: str, checkpoint: Path | None = None, *, n_classes: int | None = None) -> Opened:
    """Open a detector.

    Args:
        model: A name, the folder of a run, or a file of weights; "embedded" is the one in the package.
        checkpoint: Weights for a name.
        n_classes: Of a name without weights; None is COCO's 80.
    """
    path = embedded.DETECTOR_WEIGHTS if model == embedded.DETECTOR else Path(model)
    if model in NAMES:
        if checkpoint is not None:
            return _of_file(checkpoint, model)
        spec = DetectorSpec(model, n_classes or 80)
        return Opened(spec, spec.build().eval(), None, model, "random")
    if checkpoint is not None:
        raise ValueError(f"checkpoint={str(checkpoint)!r} is for {' or '.join(NAMES)}; {model!r} has its own weights")
    if path.is_dir():
        return _of_file(path / "best" / "model.safetensors", path.name)
    if path.is_file():
        return _of_file(path, None)
    accepted = f"{', '.join(map(repr, (*NAMES, embedded.DETECTOR)))}, the folder of a run, or a file of weights"
    raise ValueError(f"model={model!r} is not known and there is no such file; accepted: {accepted}")


def _of_file(path: Path, name: str | None) -> Opened:
    """Open a file of weights; name is that of the model or of its run, None where the file must say."""
    state = read_checkpoint(path)
    n_classes = next((len(value) - 1 for key, value in state.items() if _CLASS_SCORES.match(key)), None)
    if n_classes is None:
        raise ValueError(f"{str(path)!r} holds no detector: `agglo detect train --checkpoint` starts one from a ViT")
    values = None
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            values = json.loads((file.metadata() or {}).get(_METADATA, "null"))
    if values is not None:
        spec = DetectorSpec(**{**values, "classes": tuple(values["classes"])})
    else:
        width = next((value.shape[-1] for key, value in state.items() if key.endswith("pos_embed")), None)
        size = name if name in NAMES else next((size for size in SIZES if SIZES[size].width == width), None)
        if size is None:
            raise ValueError(f"{str(path)!r} does not say what detector it is of: give a name and checkpoint=FILE")
        spec = DetectorSpec(size, n_classes)
    title = spec.model if name is None or name in NAMES else f"{spec.model} of {name}"
    return Opened(spec, spec.build(path).eval(), method_weights(path), title, str(path))


def vit_adapter(
    vit: nn.Module | str,
    *,
    n_classes: int = 80,
    weights: Path | str | None = None,
    class_token: bool = False,
    heads: HeadSettings | None = None,
    **adapter: Any,
) -> Detector:
    """Build Mask R-CNN on a ViT-Adapter: boxes, classes and masks of the objects in images of any size.

    Args:
        vit: "tiny" or "small", which is DeiT's shape without class token, last norm and head; or any plain ViT of timm
            that agglo knows, which becomes part of the detector.
        n_classes: Without background.
        weights: A file. ImageNet weights of a timm ViT (DeiT, AugReg), which the ViT starts from; or a whole detector,
            saved by agglo or published by the authors of SViT or ATC. All tensors must fit, but for those
            that a detector has no use for (class token, head). `method_weights` reads what a method learned.
        class_token: Keep the ViT's, for methods that need its attention. No published detector has one.
        heads: Every number of the heads.
        **adapter: Further options of `ViTAdapter` (interactions, deform_heads, prior_width, drop_path, ...).
    """
    state = None if weights is None else read_checkpoint(Path(weights))
    if isinstance(vit, str):
        adapter.setdefault("drop_path", SIZES[choice("size", vit, tuple(SIZES))].drop_path)
        vit = plain_vit(vit, class_token=class_token, drop_path=adapter["drop_path"])
    detector = Detector(ViTAdapter(vit, class_token=class_token, **adapter), n_classes=n_classes, settings=heads)
    if state is None:
        return detector
    if "patch_embed.proj.weight" in state:
        load_vit(detector.backbone.vit, state, str(weights))
    elif _PUBLISHED in state:
        load_exactly(detector, published.from_published(state, detector.state_dict()), str(weights))
        if any(published.ENCODER_LAYER in name for name in state):
            for module in detector.backbone.vit.blocks.modules():
                if isinstance(module, nn.LayerNorm):
                    module.eps = published.ENCODER_LAYER_EPS
    else:
        load_exactly(detector, split_method(state)[0], str(weights))
    return detector


def method_weights(weights: Path | str) -> dict[str, Tensor]:
    """Return what a method had learned, in a detector's file or a published one (SViT's gates); empty if nothing.

    `agglo.models.checkpoints.load_method` gives it to the applied method.
    """
    state = read_checkpoint(Path(weights))
    return published.gates(state) if _PUBLISHED in state else split_method(state)[1]
