"""Models of open_clip: `open_clip:ViT-B-32`, or `open_clip:ViT-B-32:openai` with a tag of its weights.

Its own spellings are taken too: `open_clip:hf-hub:ORG/NAME` and `open_clip:local-dir:PATH`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from agglo.checks import choice
from agglo.models.checkpoints import Checkpoint, load_exactly
from agglo.models.inputs import Inputs
from agglo.models.libraries.base import Known, Library, ModelSpec, load, refuse_options, remember
from agglo.models.zero_shot import zero_shot

_SOURCES = ("hf-hub:", "local-dir:")  # whose rest is open_clip's to read


class ImageTower(nn.Module):
    """open_clip's image tower: logits (B, classes) or, without a head, embeddings (B, C)."""

    def __init__(self, visual: nn.Module, width: int, num_classes: int = 0) -> None:
        super().__init__()
        self.visual, self.num_classes = visual, num_classes
        self.head = nn.Linear(width, num_classes) if num_classes else nn.Identity()
        if isinstance(self.head, nn.Linear):
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.visual(images))
        return found


class OpenClip(Library):
    prefixes: ClassVar[tuple[str, ...]] = ("open_clip:",)
    package: ClassVar[str] = "open_clip"

    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        import open_clip

        refuse_options(spec.options, "open_clip")
        tag = None
        if not name.startswith(_SOURCES):
            name, _, tag = name.partition(":")
            choice("open_clip's model", name, open_clip.list_models())
            if tag or spec.pretrained:
                choice(f"{name}: weights", tag, open_clip.list_pretrained_tags_by_model(name))
        model: Any = open_clip.create_model(
            name,
            pretrained=(tag or None) if spec.takes_own_weights else None,
            load_weights=spec.takes_own_weights,
            # Towers that are other libraries' models would fetch weights of their own.
            pretrained_text=False,
            require_pretrained=spec.takes_own_weights,
            force_image_size=spec.image_size,
        )
        inputs = self.inputs(model)
        if spec.prompts is not None:
            return _by_prompts(model, name, spec, checkpoint, inputs)
        return _tower(model, spec, checkpoint, inputs)

    def brings_weights(self, name: str) -> bool:
        return ":" in name

    def inputs(self, model: Any) -> Inputs:
        visual = getattr(model, "visual", model)
        config = getattr(visual, "preprocess_cfg", None)
        if config is None:
            raise ValueError(f"{type(model).__name__} does not say how images are prepared (visual.preprocess_cfg)")
        choice("resize_mode", config["resize_mode"], ("shortest", "squash"))
        size = config["size"]
        height, width = (size, size) if isinstance(size, int) else size
        return Inputs(
            (int(height), int(width)),
            tuple(config["mean"]),
            tuple(config["std"]),
            interpolation=config["interpolation"],
            crop=1.0,
            squash=config["resize_mode"] == "squash",
        )


def _with_positions(model: Any, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's weights, position embeddings resampled to the model's image size by open_clip."""
    from open_clip.model import resize_pos_embed

    state = dict(checkpoint.model)
    resize_pos_embed(state, model)
    return state


def _by_prompts(model: Any, name: str, spec: ModelSpec, checkpoint: Checkpoint | None, inputs: Inputs) -> nn.Module:
    import open_clip

    assert spec.prompts is not None and spec.prompts.class_names is not None
    if checkpoint is not None:
        load_exactly(model, _with_positions(model, checkpoint), str(spec.checkpoint))
    found = zero_shot(model, open_clip.get_tokenizer(name), spec.prompts.class_names, spec.prompts.templates)
    return remember(found, Known(inputs, spec.prompts.class_names))


def _tower(model: Any, spec: ModelSpec, checkpoint: Checkpoint | None, inputs: Inputs) -> nn.Module:
    """Return the image tower, with a head where classes are known. A checkpoint may be of the whole model."""
    tower = ImageTower(model.visual, _width(model.visual, inputs), spec.classes(checkpoint) or 0)
    if checkpoint is not None:
        state = _with_positions(model, checkpoint)
        load(tower, {name: value for name, value in state.items() if name.startswith(("visual.", "head."))}, spec)
    return remember(tower, Known(inputs))


@torch.inference_mode()
def _width(visual: nn.Module, inputs: Inputs) -> int:
    """Return the width of the embeddings, by a forward pass: towers keep it under different names."""
    found: Tensor = visual.eval()(torch.zeros(1, len(inputs.mean), *inputs.image_size))
    return found.shape[-1]
