"""transformers' models: `hf:PATH`, a folder that `save_pretrained` wrote, or `hf:ORG/NAME` on the hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from agglo.experiments.checkpoints import HEADS, Checkpoint, load_exactly
from agglo.experiments.inputs import Inputs
from agglo.experiments.libraries.base import (
    OFF,
    Known,
    Library,
    ModelSpec,
    known_of,
    loads_as_head,
    remember,
    with_own_head,
)
from agglo.experiments.libraries.heads import class_count
from agglo.experiments.libraries.image_processors import inputs_of
from agglo.experiments.libraries.transformers_sizes import resized
from agglo.experiments.zero_shot import is_contrastive, zero_shot

_SHOWN = 4
_TOWER = "vision_model."  # of a model of images and texts


class Transformers(Library):
    prefixes: ClassVar[tuple[str, ...]] = ("hf:",)
    accepts: ClassVar[str] = "hf:PATH, hf:google/vit-base-patch16-224 (transformers)"
    package: ClassVar[str] = "transformers"

    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        config = _config(name, spec)
        if spec.prompts is not None:
            return _by_prompts(name, config, spec, checkpoint)
        taught = config.num_labels if _is_classifier(config) else None
        options = {key: value for key, value in spec.options.items() if value}
        for option, value in options.items():
            if not hasattr(config, option):
                hint = f": {OFF[option]} leaves it out" if option in OFF else ""
                raise ValueError(f"{option}={value!r}: {type(config).__name__} has no such option{hint}")
            setattr(config, option, value)
        model = _with_weights(name, config, spec, checkpoint)
        names = _label_names(config) if class_count(model) else None
        known = Known(_inputs(name, config, spec), names, taught if spec.takes_own_weights else None)
        return remember(model, known)

    def brings_weights(self, name: str) -> bool:
        return True

    def inputs(self, model: Any) -> Inputs:
        known = known_of(model)
        if known is not None:
            return known.inputs
        return inputs_of(getattr(model, "name_or_path", ""), model.config)

    def class_names(self, model: Any) -> list[str] | None:
        names = super().class_names(model)
        if names is not None or known_of(model) is not None:
            return names
        own = _label_names(model.config)
        return None if own is None else list(own)


def _config(name: str, spec: ModelSpec) -> Any:
    from transformers import AutoConfig

    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"model={spec.name!r}: the folder holds no config.json, as save_pretrained writes it")
    if looks_like_path and not folder.is_dir():
        raise ValueError(f"model={spec.name!r} is not a folder")
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model={spec.name!r} is neither a folder of transformers nor can it be had from the hub: {reason}"
        ) from error
    if config.model_type == "timm_wrapper":
        raise ValueError(f"model={spec.name!r} is timm's: write {'local-dir' if folder.is_dir() else 'hf-hub'}:{name}")
    return config


def _inputs(name: str, config: Any, spec: ModelSpec) -> Inputs:
    inputs = inputs_of(name, config)
    return inputs if spec.image_size is None else replace(inputs, image_size=spec.image_size)


def _is_classifier(config: Any) -> bool:
    return any("ForImageClassification" in name for name in config.architectures or ())


def _label_names(config: Any) -> tuple[str, ...] | None:
    """The names of the labels; None where they are those that transformers numbers."""
    names = [config.id2label[number] for number in sorted(config.id2label)]
    return None if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else tuple(names)


def _with_weights(name: str, config: Any, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
    """A classifier where the model has a head, or is to get one; otherwise what transformers calls the base model, and
    of a model of images and texts the image tower."""
    from transformers import AutoModel, AutoModelForImageClassification

    head = None if checkpoint is None or spec.new_head else checkpoint.head_classes
    classes = spec.num_classes or head
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
        load_exactly(model, with_own_head(model, state) if spec.new_head else state, str(spec.checkpoint))
    found: nn.Module = model if spec.image_size is None else resized(model, spec.image_size)
    return found


def _published(kind: Any, name: str, config: Any, spec: ModelSpec) -> Any:
    """The model with its weights, all of them: transformers would go on with random ones for what is missing."""
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
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        shown = ", ".join(sorted(missing)[:_SHOWN]) + more
        of_head = all(key.startswith(tuple(f"{head}." for head in HEADS)) for key in missing)
        hint = ": its head is of other classes" if of_head else ""
        raise ValueError(f"model={spec.name!r} has no fitting weights for {shown}{hint}")
    return model


def _by_prompts(name: str, config: Any, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
    from transformers import AutoModel, AutoTokenizer

    assert spec.prompts is not None
    if spec.prompts.class_names is None:
        raise ValueError("zero-shot: class names are needed, one for each class")
    refusal = f"model={spec.name!r}: a {config.model_type} does not compare images with texts, as zero-shot needs"
    if not hasattr(config, "text_config"):
        raise ValueError(refusal)
    model: Any = _published(AutoModel, name, config, spec) if spec.takes_own_weights else AutoModel.from_config(config)
    if not is_contrastive(model):
        raise ValueError(refusal)
    if checkpoint is not None:
        load_exactly(model, checkpoint.model, str(spec.checkpoint))
    model = model if spec.image_size is None else resized(model, spec.image_size)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model={spec.name!r} brings no tokenizer for its prompts: {reason}") from error
    found = zero_shot(model, tokenizer, spec.prompts.class_names, spec.prompts.templates)
    return remember(found, Known(_inputs(name, config, spec), spec.prompts.class_names))
