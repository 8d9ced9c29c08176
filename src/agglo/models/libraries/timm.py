"""timm's models: plain names, and timm's own spellings of models on the hub and in folders."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from agglo.checks import choice
from agglo.embedded import FASHION_CLASSES
from agglo.models.checkpoints import Checkpoint
from agglo.models.inputs import Inputs
from agglo.models.libraries.base import Known, Library, ModelSpec, load, remember

OWN_SPELLINGS = ("hf-hub:", "hf_hub:", "local-dir:")  # whose rest is timm's to read


class Timm(Library):
    prefix: ClassVar[str] = ""
    package: ClassVar[str] = "timm"

    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        import timm

        import agglo.embedded.classifier  # noqa: F401 from here on timm knows the model that comes with agglo

        if not name.startswith(OWN_SPELLINGS) and not timm.is_model(name):
            others = "; hf-hub:NAME and local-dir:PATH; of other libraries torchvision:NAME, open_clip:NAME and hf:PATH"
            choice("timm's model", name, timm.list_models(), also=others)
        state = None if checkpoint is None else checkpoint.model
        options: dict[str, Any] = {}
        if state is not None and not spec.new_head:
            if "head.weight" in state and state["head.weight"].ndim == 2:
                options["num_classes"] = len(state["head.weight"])
            if "fc_norm.weight" in state and "norm.weight" not in state:
                options["global_pool"] = "avg"  # patches are averaged
        if spec.num_classes is not None:
            options["num_classes"] = spec.num_classes
        options.update(spec.options)
        model: Any = timm.create_model(name, pretrained=spec.takes_own_weights, **options)
        if state is not None:
            load(model, state, spec)
        if spec.image_size is not None:
            if not hasattr(model, "set_input_size"):
                fixed = f"{type(model).__name__} has a fixed image size"
                raise ValueError(f"{fixed}; image_size={spec.image_size} cannot be set")
            patch = model.patch_embed.patch_size
            if any(side < 1 or side % p for side, p in zip(spec.image_size, patch, strict=True)):
                raise ValueError(f"image_size={spec.image_size} must be multiples of the patch size {tuple(patch)}")
            model.set_input_size(img_size=spec.image_size)
        return remember(model, Known(num_pretrained_classes=int(model.pretrained_cfg["num_classes"])))

    def inputs(self, model: Any) -> Inputs:
        from timm.data import resolve_data_config

        config = resolve_data_config({}, model=model)
        choice("crop_mode", config.get("crop_mode", "center"), ("center", "squash"))
        size = tuple(getattr(getattr(model, "patch_embed", None), "img_size", None) or config["input_size"][1:])
        return Inputs(
            (int(size[0]), int(size[1])),
            tuple(config["mean"]),
            tuple(config["std"]),
            interpolation=config["interpolation"],
            crop=config["crop_pct"],
            squash=config.get("crop_mode") == "squash",
        )

    def class_names(self, model: Any) -> list[str] | None:
        """Return ImageNet's names where a model has as many classes as published."""
        from timm.data import ImageNetInfo

        import agglo.embedded.classifier as embedded

        published = model.pretrained_cfg
        if model.num_classes == published["num_classes"] and published["architecture"] == embedded.NAME:
            return list(FASHION_CLASSES)
        if model.num_classes == published["num_classes"] == 1000:
            info = ImageNetInfo()
            return [info.index_to_description(number).partition(",")[0] for number in range(1000)]
        return None
