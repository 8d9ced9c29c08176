"""A detector as a person describes it: by size, by the folder of a run, or by a file of weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from agglo.detection.model.build import load_detector, method_weights, vit_adapter
from agglo.detection.model.mask_rcnn import Detector
from agglo.detection.model.miniature import NAME as MINIATURE
from agglo.detection.model.miniature import miniature_vit
from agglo.detection.model.settings import HeadSettings
from agglo.detection.model.vit import SIZES
from agglo.embedded import detector as embedded
from agglo.experiments.checkpoints import read_checkpoint

NAMES = (*SIZES, MINIATURE)
_WORD = "detector"  # of a weight file's metadata, which holds the spec
_CLASS_SCORES = re.compile(r"^(roi\..*classes|roi_head\.bbox_head\.fc_cls)\.weight$")  # ours, and the published


@dataclass(frozen=True)
class DetectorSpec:
    """All that makes a detector, without its weights.

    model: "tiny", "small", "miniature", or the name of a timm ViT.
    backbone_options: arguments of the timm ViT. adapter_options: of `vit_adapter`. head_options: of `HeadSettings`.
    classes: their names, in the order of its labels; empty if only their number is known.
    image_size: side of the squares that its images are made; None is the paper's way: a short side of 800 pixels.
    """

    model: str = "tiny"
    n_classes: int = 80
    backbone_options: Mapping[str, Any] = field(default_factory=dict)
    adapter_options: Mapping[str, Any] = field(default_factory=dict)
    head_options: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    image_size: int | None = None

    def build(self, weights: Path | None = None, *, start: bool = False) -> Detector:
        """The detector on the CPU; ValueError names what does not fit.

        weights: a file of ViT or detector weights, as `vit_adapter` takes it.
        start: for training: the miniature then starts from the embedded classifier.
        """
        try:
            options = {**self.adapter_options, "heads": head_settings(self.head_options)}
            if self.model in SIZES:
                if self.backbone_options:
                    raise ValueError(f"backbone_options={dict(self.backbone_options)} are for a timm model")
                what: dict[str, Any] = {"size": self.model}
            else:
                what = {"backbone": self._backbone(pretrained=start and weights is None)}
            detector = vit_adapter(**what, n_classes=self.n_classes, weights=weights, **options)
        except TypeError as error:
            raise ValueError(f"model={self.model!r} cannot be built: {error}") from error
        if self.image_size is not None:
            backbone: Any = detector.backbone
            # The image whose tokens and GFLOPs are told.
            side = -(-self.image_size // backbone.strides[-1]) * backbone.strides[-1]
            backbone.nominal_size = (side, side)
        return detector

    def _backbone(self, *, pretrained: bool) -> Any:
        import timm

        if self.model == MINIATURE:
            return miniature_vit(pretrained=pretrained, **self.backbone_options)
        if not timm.is_model(self.model):
            known = ", ".join(map(repr, NAMES))
            raise ValueError(f"model={self.model!r} is not known; accepted: {known}, or the name of a timm ViT")
        return timm.create_model(self.model, pretrained=False, **self.backbone_options)

    def about(self) -> dict[str, str]:
        """For the metadata of a file of weights, from which `open_detector` makes it again."""
        return {_WORD: json.dumps(asdict(self), sort_keys=True)}


def head_settings(options: Mapping[str, Any]) -> HeadSettings:
    """The numbers of the heads where a recipe says some of them. A table changes some numbers of a group of them.

    >>> head_settings({"width": 64, "test_proposals": {"kept": 100}}).test_proposals
    ProposalSettings(per_level=1000, kept=100, iou=0.7)
    """
    usual = HeadSettings()
    values: dict[str, Any] = {}
    for name, value in options.items():
        if not hasattr(usual, name):
            known = ", ".join(each.name for each in fields(HeadSettings))
            raise ValueError(f"head_options: {name!r} is not known; accepted: {known}")
        if isinstance(value, Mapping):
            value = replace(getattr(usual, name), **value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return HeadSettings(**values)


@dataclass(frozen=True)
class Opened:
    """A detector with its weights.

    learned: what a method had learned beside it; None if all weights are random.
    name: for titles. weights: in words.
    """

    spec: DetectorSpec
    model: Detector
    learned: Mapping[str, Tensor] | None
    name: str
    weights: str


def open_detector(model: str, checkpoint: Path | None = None, *, n_classes: int | None = None) -> Opened:
    """A detector by name, by the folder of its run, or by its file of weights; "embedded" is the one in the package.

    checkpoint: weights for a name. n_classes: of a name without weights; None is COCO's 80.
    """
    if model in NAMES:
        if checkpoint is None:
            spec = DetectorSpec(model, n_classes or 80)
            return Opened(spec, spec.build().eval(), None, model, "random")
        return _of_file(checkpoint, model)
    path = Path(model)
    if model == embedded.NAME and checkpoint is None:
        return _of_file(embedded.required(), None)
    if checkpoint is not None:
        known = ", ".join(map(repr, NAMES))
        raise ValueError(f"checkpoint={str(checkpoint)!r} goes with {known}; model={model!r} has its own weights")
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
    """name: of the model, or of its run; None where the file must say."""
    state = read_checkpoint(path)
    classes = _classes_of(state)
    if classes is None:
        raise ValueError(f"{str(path)!r} holds no detector: `agglo detect train --checkpoint` starts one from a ViT")
    spec = _written_in(path)
    if spec is None:
        size = _size_of(state) if name not in NAMES else name
        if size is None:
            raise ValueError(f"{str(path)!r} does not say what detector it is of: give a name and checkpoint=FILE")
        # The original ViT-Adapter has windows and scaled layers; those that the study used have neither.
        original = any(name.endswith("backbone.blocks.0.gamma1") for name in state)
        spec = DetectorSpec(size, classes, adapter_options={"windowed": True} if original else {})
    if spec.model in SIZES:
        model = spec.build(path)
    else:
        model = spec.build()
        load_detector(model, state, str(path))
    title = spec.model if name is None or name in NAMES else f"{spec.model} of {name}"
    return Opened(spec, model.eval(), method_weights(path, model), title, str(path))


def _written_in(path: Path) -> DetectorSpec | None:
    """The spec in the metadata of a file; None if there is none."""
    if path.suffix != ".safetensors":
        return None
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(_WORD)
    if text is None:
        return None
    known = {each.name for each in fields(DetectorSpec)}
    values = {name: value for name, value in json.loads(text).items() if name in known}
    return DetectorSpec(**{**values, "classes": tuple(values.get("classes", ()))})


def _classes_of(state: Mapping[str, Tensor]) -> int | None:
    """How many classes the box head of a detector tells apart, without background; None if there is no such head."""
    return next((len(value) - 1 for name, value in state.items() if _CLASS_SCORES.match(name)), None)


def _size_of(state: Mapping[str, Tensor]) -> str | None:
    """ "tiny" or "small", by the width of the position embedding."""
    for name, value in state.items():
        if name.endswith("pos_embed"):
            return next((size for size, shape in SIZES.items() if shape.width == value.shape[-1]), None)
    return None
