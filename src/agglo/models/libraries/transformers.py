"""transformers' models: `hf:PATH`, a folder that `save_pretrained` wrote, or `hf:ORG/NAME` on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from agglo.models.checkpoints import HEADS, Checkpoint, listed, load_exactly
from agglo.models.inputs import Inputs, crop_of
from agglo.models.libraries.base import (
    Known,
    Library,
    ModelSpec,
    class_count,
    load,
    loads_as_head,
    refuse_options,
    remember,
    require_size,
)
from agglo.models.zero_shot import is_contrastive, zero_shot

_INTERPOLATION = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # as PIL numbers them
_STEPS = ("do_convert_rgb", "do_resize", "do_center_crop", "do_rescale", "do_normalize")  # of processors
_FURTHER = ("crop_pct", "rescale_offset")  # what else changes pixels in some of them
_TOWER = "vision_model."  # of a model of images and texts


class Transformers(Library):
    prefixes: ClassVar[tuple[str, ...]] = ("hf:",)
    package: ClassVar[str] = "transformers"

    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        config, inputs = _config(name, spec), inputs_of(name)
        require_size(spec, inputs)
        if spec.prompts is not None:
            return _by_prompts(name, config, spec, checkpoint, inputs)
        num_pretrained_classes = config.num_labels if _is_classifier(config) else None
        options = {key: value for key, value in spec.options.items() if value}
        refuse_options({key: value for key, value in options.items() if not hasattr(config, key)}, name)
        config.update(options)
        model = _with_weights(name, config, spec, checkpoint)
        names = _label_names(config) if class_count(model) else None
        known = Known(inputs, names, num_pretrained_classes if spec.takes_own_weights else None)
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

    def class_names(self, model: Any) -> list[str] | None:
        names = _label_names(model.config)
        return None if names is None else list(names)


def _config(name: str, spec: ModelSpec) -> Any:
    from transformers import AutoConfig

    config = _read("config", AutoConfig, name)
    if config.model_type == "timm_wrapper":
        source = "local-dir" if Path(name).expanduser().is_dir() else "hf-hub"
        raise ValueError(f"model={spec.name!r} is timm's: write {source}:{name}")
    return config


def _read(part: str, kind: Any, path: str) -> Any:
    """Return a part of a folder or of a model on the hub; ValueError if there is none."""
    try:
        return kind.from_pretrained(path)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model='hf:{path}': its {part} is in no folder and not on the hub: {reason}") from error


def _is_classifier(config: Any) -> bool:
    return any("ForImageClassification" in name for name in config.architectures or ())


def _label_names(config: Any) -> tuple[str, ...] | None:
    """Return the names of the labels; None where they are transformers' numbered defaults."""
    names = [config.id2label[number] for number in sorted(config.id2label)]
    return None if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else tuple(names)


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
    found: nn.Module = model
    return found


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
        missing = [key for key in missing if not loads_as_head(key)]
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

    assert spec.prompts is not None and spec.prompts.class_names is not None
    refusal = f"model={spec.name!r}: a {config.model_type} does not compare images with texts, as zero-shot needs"
    if not hasattr(config, "text_config"):
        raise ValueError(refusal)
    model: Any = _published(AutoModel, name, config, spec) if spec.takes_own_weights else AutoModel.from_config(config)
    if not is_contrastive(model):
        raise ValueError(refusal)
    if checkpoint is not None:
        load_exactly(model, checkpoint.model, str(spec.checkpoint))
    tokenizer = _read("tokenizer", AutoTokenizer, name)
    found = zero_shot(model, tokenizer, spec.prompts.class_names, spec.prompts.templates)
    return remember(found, Known(inputs, spec.prompts.class_names))


def inputs_of(path: str) -> Inputs:
    """Return what the image processor of a folder or a name on the hub does; ValueError if it does something else."""
    from transformers import AutoImageProcessor

    processor = _read("image processor", AutoImageProcessor, path)
    given, kind = processor.to_dict(), type(processor).__name__
    steps = [name for name in given if given[name] and (name.startswith("do_") or name in _FURTHER)]
    if unknown := [name for name in steps if name not in _STEPS]:
        raise ValueError(f"{kind} prepares images in a way that agglo does not know: {listed(unknown)}")
    size, crop = given.get("size") or {}, given.get("crop_size") or {}
    short = size.get("shortest_edge")
    resized = (short, short) if short is not None else (size.get("height"), size.get("width"))
    if not given.get("do_resize", True) or None in resized:
        raise ValueError(f"{kind} does not resize images to one size (size={dict(size)}), so batches cannot be made")
    final = (crop.get("height"), crop.get("width")) if given.get("do_center_crop") else resized
    if None in final:
        final = (crop.get("shortest_edge"),) * 2
    sides = [(int(a), int(b)) for a, b in zip(final, resized, strict=True)]  # type: ignore[arg-type]
    fractions = {crop_of(a, b) for a, b in sides}
    if len(fractions) > 1:
        raise ValueError(f"{kind} resizes to {resized} and crops to {final}, in other proportions")
    # Pixels are scaled by 1/255 here; another factor is the same as another mean and deviation.
    factor = 255 * given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 255.0
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if given.get("do_normalize", True):
        mean, std = tuple(given["image_mean"]), tuple(given["image_std"])
    return Inputs(
        (sides[0][0], sides[1][0]),
        tuple(value / factor for value in mean),
        tuple(value / factor for value in std),
        interpolation=_INTERPOLATION[int(given.get("resample", 2))],
        crop=fractions.pop(),
        squash=short is None,
    )
