"""Models of open_clip: `open_clip:ViT-B-32`, or `open_clip:ViT-B-32:openai` with a tag of its weights.

Its own spellings are taken too: `open_clip:hf-hub:ORG/NAME` and `open_clip:local-dir:PATH`. Without prompts, a model is
its image tower, which gives embeddings (B, C).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from agglo.checks import choice
from agglo.models.checkpoints import Checkpoint, load_exactly
from agglo.models.inputs import Inputs
from agglo.models.libraries.base import Known, Library, ModelSpec, remember, with_prompts

_SOURCES = ("hf-hub:", "local-dir:")  # whose rest is open_clip's to read
_TOWER = "visual."


class OpenClip(Library):
    prefix: ClassVar[str] = "open_clip:"
    package: ClassVar[str] = "open_clip"

    def build(self, name: str, spec: ModelSpec, checkpoint: Checkpoint | None) -> nn.Module:
        import open_clip
        from open_clip.model import resize_pos_embed

        self.refuse_options({"num_classes": spec.prompts is None and spec.num_classes, **spec.options}, "open_clip")
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
        inputs, state = self.inputs(model), None
        if checkpoint is not None:
            state = dict(checkpoint.model)
            resize_pos_embed(state, model)
        if spec.prompts is not None:
            return with_prompts(model, open_clip.get_tokenizer(name), spec, state, inputs)
        if state is not None:  # may be of the whole model, texts too
            tower = {key.removeprefix(_TOWER): value for key, value in state.items() if key.startswith(_TOWER)}
            load_exactly(model.visual, tower, str(spec.checkpoint))
        return remember(model.visual, Known(inputs))

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
