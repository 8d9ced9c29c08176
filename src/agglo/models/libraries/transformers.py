"""transformers' models: `hf:PATH`, a folder that `save_pretrained` wrote, or `hf:ORG/NAME` on the hub."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from agglo.models.checkpoints import HEADS, Checkpoint, listed
from agglo.models.inputs import Inputs, crop_of, evaluation_transform
from agglo.models.libraries.base import ENDS, Known, Library, ModelSpec, load, remember, with_prompts

_INTERPOLATION = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # as PIL numbers them
_TOLERATED = 2.0  # levels of 255: transformers resizes tensors where timm resizes PIL images
_TOWER = "vision_model."  # of a model of images and texts


class Transformers(Library):
    prefix: ClassVar[str] = "hf:"
    package: ClassVar[str] = "transformers"

    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        from transformers import AutoConfig

        config = _read("config", AutoConfig, name)
        if config.model_type == "timm_wrapper":
            source = "local-dir" if Path(name).expanduser().is_dir() else "hf-hub"
            raise ValueError(f"model={spec.name!r} is timm's: write {source}:{name}")
        inputs = inputs_of(name)
        self.require_size(spec, inputs)
        if spec.prompts is not None:
            return _by_prompts(name, config, spec, checkpoint, inputs)
        num_pretrained_classes = config.num_labels if _is_classifier(config) else None
        options = {key: value for key, value in spec.options.items() if value}
        self.refuse_options({key: value for key, value in options.items() if not hasattr(config, key)}, name)
        config.update(options)
        model = _with_weights(name, config, spec, checkpoint)
        names = tuple(config.id2label[number] for number in sorted(config.id2label))
        numbered = all(name == f"LABEL_{number}" for number, name in enumerate(names))  # transformers' default
        known = Known(inputs, None if numbered else names, num_pretrained_classes if spec.takes_own_weights else None)
        return remember(model, known)

    def brings_weights(self, name: str) -> bool:
        return True

    def inputs(self, model: Any) -> Inputs:
        if path := getattr(model, "name_or_path", ""):
            return inputs_of(path)
        # Made of a config and not of weights, so that any normalisation does: that of ViTImageProcessor.
        size = getattr(model.config, "vision_config", model.config).image_size
        side = int(size if isinstance(size, int) else size[0])
        return Inputs((side, side), (0.5,) * 3, (0.5,) * 3, "bilinear", crop=1.0, squash=True)


def _read(part: str, kind: Any, path: str) -> Any:
    """Return a part of a folder or of a model on the hub; ValueError if there is none."""
    try:
        return kind.from_pretrained(path)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model='hf:{path}': its {part} is in no folder and not on the hub: {reason}") from error


def _is_classifier(config: Any) -> bool:
    return any("ForImageClassification" in name for name in config.architectures or ())


def _with_weights(name: str, config: Any, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
    """Build a classifier where the model has a head or is to get one, otherwise the base model.

    Of a model of images and texts, the base model is the image tower.
    """
    from transformers import AutoModel, AutoModelForImageClassification

    classes = spec.classes(checkpoint)
    kind = AutoModelForImageClassification if classes or spec.new_head or _is_classifier(config) else AutoModel
    if classes is not None and classes != config.num_labels:
        config.num_labels = classes
    model = _published(kind, name, config, spec) if spec.takes_own_weights else kind.from_config(config)
    state = None if checkpoint is None else dict(checkpoint.model)
    if kind is AutoModel and hasattr(model, "get_image_features"):
        model = model.vision_model
        of_tower = {} if state is None else {key: value for key, value in state.items() if key.startswith(_TOWER)}
        if len(of_tower) < len(state or ()) and of_tower:  # a checkpoint of the whole model, texts too
            state = {key.removeprefix(_TOWER): value for key, value in of_tower.items()}
    if state is not None:
        load(model, state, spec)
    return model


def _published(kind: Any, name: str, config: Any, spec: ModelSpec) -> Any:
    """Load the published weights; raise for missing ones, which transformers would initialise at random."""
    model, loading = kind.from_pretrained(
        name,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    missing = [*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])]
    if spec.new_head:
        missing = [key for key in missing if not key.startswith(ENDS)]
    elif missing and all(key.startswith("pooler.") for key in missing):
        model.pooler = None  # what many towers were trained without
        missing = []
    if missing:
        of_head = all(key.startswith(tuple(f"{head}." for head in HEADS)) for key in missing)
        hint = ": its head is of other classes" if of_head else ""
        raise ValueError(f"model={spec.name!r} has no fitting weights for {listed(sorted(missing))}{hint}")
    return model


def _by_prompts(name: str, config: Any, spec: ModelSpec, checkpoint: Checkpoint | None, inputs: Inputs) -> nn.Module:
    from transformers import AutoModel, AutoTokenizer

    if not hasattr(config, "text_config"):
        raise ValueError(
            f"model={spec.name!r}: a {config.model_type} does not compare images with texts, as zero-shot needs"
        )
    has_own = spec.takes_own_weights
    model: Any = _published(AutoModel, name, config, spec) if has_own else AutoModel.from_config(config)
    state = None if checkpoint is None else checkpoint.model
    return with_prompts(model, _read("tokenizer", AutoTokenizer, name), spec, state, inputs)


def inputs_of(path: str) -> Inputs:
    """Return what the image processor of a folder or a name on the hub does; ValueError if it does something else."""
    from transformers import AutoImageProcessor

    processor = _read("image processor", AutoImageProcessor, path)
    given = processor.to_dict()
    size: dict[str, Any] = given.get("size") or {}
    crop: dict[str, Any] = given.get("crop_size") or {}
    short = size.get("shortest_edge")
    resized: list[Any] = [size.get(side, short) for side in ("height", "width")]
    final: list[Any] = [crop.get(side) for side in ("height", "width")] if given.get("do_center_crop") else resized
    if not given.get("do_resize", True) or None in (*resized, *final):
        kind = type(processor).__name__
        raise ValueError(f"{kind} does not resize images to one size (size={dict(size)}), so batches cannot be made")
    # Pixels are scaled by 1/255 here; another factor is the same as another mean and deviation.
    factor = 255 * given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 255.0
    normalises = given.get("do_normalize", True)
    mean, std = (given["image_mean"], given["image_std"]) if normalises else ((0.0,) * 3, (1.0,) * 3)
    inputs = Inputs(
        (int(final[0]), int(final[1])),
        tuple(value / factor for value in mean),
        tuple(value / factor for value in std),
        interpolation=_INTERPOLATION[int(given.get("resample", 2))],
        crop=crop_of(final[0], resized[0]),
        squash=short is None,
    )
    _require_same_pixels(processor, inputs)
    return inputs


def _require_same_pixels(processor: Any, inputs: Inputs) -> None:
    """Raise ValueError unless a random image, smooth and twice as wide as high, comes out as the processor has it."""
    from PIL import Image

    height = inputs.image_size[0]
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8))
    image = image.resize((2 * height, height), Image.Resampling.BICUBIC)
    expected = torch.as_tensor(processor(images=image, return_tensors="pt")["pixel_values"])[0]
    found = evaluation_transform(inputs)(image)
    off = math.inf
    if found.shape == expected.shape:
        off = float(255 * ((found - expected) * torch.tensor(inputs.std).view(-1, 1, 1)).abs().mean())
    if off > _TOLERATED:
        unknown = f"{type(processor).__name__} prepares images in a way that agglo does not know"
        raise ValueError(f"{unknown}: pixels are off by {off:.1f} of 255")
