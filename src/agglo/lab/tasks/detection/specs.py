"""Detectors by size, by the folder of a run or by a file of weights, and Mask R-CNN on a ViT-Adapter in one call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from agglo.checks import choice
from agglo.embedded import detector as embedded
from agglo.lab.tasks.detection.model import published
from agglo.lab.tasks.detection.model.adapter import ViTAdapter
from agglo.lab.tasks.detection.model.mask_rcnn import Detector
from agglo.lab.tasks.detection.model.settings import HeadSettings
from agglo.lab.tasks.detection.model.vit import MINIATURE, SIZES, is_vit, load_vit, miniature_vit, plain_vit
from agglo.models.checkpoints import load_exactly, read_checkpoint, split_method

NAMES = (*SIZES, MINIATURE)
_METADATA = "detector"  # the key in a weight file's metadata that holds the spec
_CLASS_SCORES = re.compile(r"^(roi\..*classes|roi_head\.bbox_head\.fc_cls)\.weight$")  # ours, and the published


@dataclass(frozen=True)
class DetectorSpec:
    """All that makes a detector, without its weights.

    Attributes:
        model: "tiny", "small", "miniature", or the name of a timm ViT.
        n_classes: Without background.
        backbone_options: Arguments of the timm ViT.
        adapter_options: Arguments of `vit_adapter`.
        head_options: Arguments of `HeadSettings`.
        classes: Their names, in the order of its labels; empty if only their number is known.
        image_size: Side of the squares that images are resized to; None is the paper's way: a short side of 800 pixels.
    """

    model: str = "tiny"
    n_classes: int = 80
    backbone_options: Mapping[str, Any] = field(default_factory=dict)
    adapter_options: Mapping[str, Any] = field(default_factory=dict)
    head_options: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    image_size: int | None = None

    def build(self, weights: Path | None = None, *, start: bool = False) -> Detector:
        """Build the detector on the CPU; ValueError names what does not fit.

        Args:
            weights: A file of ViT or detector weights, as `vit_adapter` takes it.
            start: For training: the miniature then starts from the embedded classifier.
        """
        try:
            options = {**self.adapter_options, "heads": head_settings(self.head_options)}
            if self.model in SIZES:
                if self.backbone_options:
                    raise ValueError(f"backbone_options={dict(self.backbone_options)} are for a timm model")
                options["size"] = self.model
            else:
                options["backbone"] = self._backbone(pretrained=start and weights is None)
            detector = vit_adapter(n_classes=self.n_classes, weights=weights, **options)
        except TypeError as error:
            raise ValueError(f"model={self.model!r} cannot be built: {error}") from error
        if self.image_size is not None:
            backbone: Any = detector.backbone
            side = -(-self.image_size // backbone.strides[-1]) * backbone.strides[-1]
            backbone.nominal_size = (side, side)
        return detector

    def _backbone(self, *, pretrained: bool) -> Any:
        import timm

        if self.model == MINIATURE:
            return miniature_vit(pretrained=pretrained, **self.backbone_options)
        if not timm.is_model(self.model):
            choice("model", self.model, NAMES, also=", or the name of a timm ViT")
        return timm.create_model(self.model, pretrained=False, **self.backbone_options)

    def about(self) -> dict[str, str]:
        """Return the metadata of a file of weights, from which `open_detector` builds the detector again."""
        return {_METADATA: json.dumps(asdict(self), sort_keys=True)}


def head_settings(options: Mapping[str, Any]) -> HeadSettings:
    """Return the usual settings of the heads with some of them changed; a table changes some of a group.

    >>> head_settings({"width": 64, "test_proposals": {"kept": 100}}).test_proposals
    ProposalSettings(per_level=1000, kept=100, iou=0.7)
    """
    usual = HeadSettings()
    values: dict[str, Any] = {}
    for name, value in options.items():
        choice("head_options", name, [each.name for each in fields(HeadSettings)])
        if isinstance(value, Mapping):
            value = replace(getattr(usual, name), **value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return replace(usual, **values)


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
    if model in NAMES:
        if checkpoint is None:
            spec = DetectorSpec(model, n_classes or 80)
            return Opened(spec, spec.build().eval(), None, model, "random")
        return _of_file(checkpoint, model)
    if checkpoint is not None:
        known = ", ".join(map(repr, NAMES))
        raise ValueError(f"checkpoint={str(checkpoint)!r} goes with {known}; model={model!r} has its own weights")
    if model == embedded.NAME:
        return _of_file(embedded.required(), None)
    path = Path(model)
    if path.is_dir():
        weights = path / "best" / "model.safetensors"
        if not weights.is_file():
            raise ValueError(f"model={model!r} is a folder without {weights.relative_to(path)}: no run of agglo's")
        return _of_file(weights, path.name)
    if path.is_file():
        return _of_file(path, None)
    accepted = f"{', '.join(map(repr, (*NAMES, embedded.NAME)))}, the folder of a run, or a file of weights"
    raise ValueError(f"model={model!r} is not known and there is no such file; accepted: {accepted}")


def _of_file(path: Path, name: str | None) -> Opened:
    """Open a file of weights; name is that of the model or of its run, None where the file must say."""
    state = read_checkpoint(path)
    n_classes = next((len(value) - 1 for key, value in state.items() if _CLASS_SCORES.match(key)), None)
    if n_classes is None:
        raise ValueError(f"{str(path)!r} holds no detector: `agglo detect train --checkpoint` starts one from a ViT")
    spec = _written_in(path)
    if spec is None:
        width = next((value.shape[-1] for key, value in state.items() if key.endswith("pos_embed")), None)
        size = name if name in NAMES else next((size for size in SIZES if SIZES[size].width == width), None)
        if size is None:
            raise ValueError(f"{str(path)!r} does not say what detector it is of: give a name and checkpoint=FILE")
        # The original ViT-Adapter has windows and layer scale; those that the study used have neither.
        original = any(key.endswith("backbone.blocks.0.gamma1") for key in state)
        spec = DetectorSpec(size, n_classes, adapter_options={"windowed": True} if original else {})
    model = spec.build(path if spec.model in SIZES else None)
    if spec.model not in SIZES:
        load_detector(model, state, str(path))
    title = spec.model if name is None or name in NAMES else f"{spec.model} of {name}"
    return Opened(spec, model.eval(), method_weights(path), title, str(path))


def _written_in(path: Path) -> DetectorSpec | None:
    """Read the spec in the metadata of a file; None if there is none."""
    if path.suffix != ".safetensors":
        return None
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(_METADATA)
    if text is None:
        return None
    known = {each.name for each in fields(DetectorSpec)}
    values = {name: value for name, value in json.loads(text).items() if name in known}
    return DetectorSpec(**{**values, "classes": tuple(values.get("classes", ()))})


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
    """Build Mask R-CNN on a ViT-Adapter: boxes, classes and masks of the objects in images of any size.

    Args:
        size: "tiny" or "small": DeiT's shape, without class token, last norm and head.
        backbone: Instead of a size, any plain ViT of timm that agglo knows. It becomes part of the detector.
        n_classes: Without background.
        weights: A file. ImageNet weights of a timm ViT (DeiT, AugReg), which the ViT starts from; or a whole detector,
            saved by agglo or published by the authors of ViT-Adapter, SViT or ATC. All tensors must fit; `left_out` of
            the detector names those of the file that a detector has no use for (class token, head).
        windowed: Attend within windows of 14 x 14 tokens in all but every third block, as the original ViT-Adapter.
        class_token: Keep the ViT's, for methods that need its attention. No published detector has one.
        layer_scale: Scale what each block adds; None: if the weights have it.
        heads: Every number of the heads.
        **adapter: Further options of `ViTAdapter` (interactions, deform_heads, points, prior_width, drop_path, ...).
    """
    if (size is None) == (backbone is None):
        given = "both" if size is not None else "neither"
        raise ValueError(f"size or backbone is needed, {given} given; sizes: {', '.join(map(repr, SIZES))}")
    source = str(weights)
    state = {} if weights is None else read_checkpoint(Path(weights))
    of_vit = is_vit(state)
    left_out: list[str] = []
    if size is not None:
        if layer_scale is None:
            layer_scale = any(name.endswith(("blocks.0.ls1.gamma", "backbone.blocks.0.gamma1")) for name in state)
        backbone = plain_vit(size, class_token=class_token, drop_path=adapter.get("drop_path"), layer_scale=layer_scale)
        adapter.setdefault("drop_path", SIZES[size].drop_path)
        if of_vit:
            left_out = load_vit(backbone, state, source)
    else:
        assert backbone is not None
        if layer_scale is not None:
            raise ValueError(f"layer_scale={layer_scale} is for a size; a given backbone has it or has not")
        if of_vit:
            load_exactly(backbone, state, source)
    body = ViTAdapter(backbone, class_token=class_token, windowed=windowed, **adapter)
    detector = Detector(body, n_classes=n_classes, settings=heads)
    if weights is not None and not of_vit:
        left_out = load_detector(detector, state, source)
    detector.left_out = tuple(left_out)
    return detector


def load_detector(detector: Detector, state: Mapping[str, Tensor], source: str) -> list[str]:
    """Load a whole detector, agglo's own or a published one; returns the names of what it has no use for.

    What a method learned is left out too: `method_weights` reads it, for after `agglo.apply`.
    """
    if not published.is_published(state):
        own, learned = split_method(state)
        load_exactly(detector, own, source)
        return list(learned)
    found = published.from_published(state, detector.state_dict())
    load_exactly(detector, found.model, source)
    if found.encoder_layers:
        for name, module in detector.backbone.named_modules():
            if name.startswith("vit.blocks.") and isinstance(module, nn.LayerNorm):
                module.eps = published.ENCODER_LAYER_EPS
    return [*found.left_out, *published.gates(state)]


def method_weights(weights: Path | str) -> dict[str, Tensor]:
    """Return what a method had learned, in a detector's file or a published one (SViT's gates); empty if nothing.

    `agglo.models.checkpoints.load_method` gives it to the applied method.
    """
    state = read_checkpoint(Path(weights))
    return published.gates(state) if published.is_published(state) else split_method(state)[1]
