"""The families of vision-language models that can be given fewer tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from agglo.hosts.common.base import Layout
from agglo.hosts.common.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.vlm.mixins import ReducedVLM
from agglo.hosts.vlm.qwen import ReducedQwen
from agglo.hosts.vlm.reduction import SmallerImages
from agglo.methods import Grid


class Family(ABC):
    """A family of vision-language models.

    Attributes:
        models: The classes whose `get_image_features` runs tower and connector, as transformers names them.
        processors: The classes that prepare their prompts.
        pointwise: Whether the connector acts on each token alone; the tower's groups may then pass it.
        mixin: The overrides of the model.
    """

    models: ClassVar[tuple[str, ...]]
    processors: ClassVar[tuple[str, ...]]
    pointwise: ClassVar[bool] = False
    mixin: ClassVar[type[ReducedModule]] = ReducedVLM

    @abstractmethod
    def dense(self, model: Any) -> int | None:
        """Return the tokens that an image, or tile of one, takes without reduction; None where images differ."""

    def side(self, model: Any) -> int:
        """Return the side of the square of patches that the connector makes one token of."""
        return 1

    def read_blocks(self, model: Any, depth: int) -> tuple[int, ...]:
        """Return the blocks of the tower after which a pointwise connector reads tokens."""
        return (depth - 1,)

    def handed_on(self, model: Any, layout: Layout, left: int) -> int:
        """Return the tokens of an image after a pointwise connector, where the tower leaves so many patches."""
        return layout.prefix + left

    def placeholder(self, processor: Any) -> str:
        """Return the text that stands in a prompt once for every token of an image."""
        return str(processor.image_token)

    def grid(self, processor: Any, image_inputs: Mapping[str, Any], index: int) -> Grid | None:
        """Return (rows, columns) of the dense tokens of a processed image, where they need not be a square."""
        return None

    def shrink(self, model: Any) -> SmallerImages:
        """Return what makes images smaller; UnsupportedModelError where the model takes one size."""
        size = model.config.vision_config.patch_size
        pixels = int(size if isinstance(size, int) else size[0])
        return SmallerImages(pixels * self.side(model), interpolate_positions=self.pointwise)

    def recognises(self, model: nn.Module) -> bool:
        return _is_of_transformers(model, self.models)

    def fits(self, processor: Any) -> bool:
        return _is_of_transformers(processor, self.processors)


def _is_of_transformers(thing: object, names: Sequence[str]) -> bool:
    return any(cls.__module__.split(".")[0] == "transformers" and cls.__name__ in names for cls in type(thing).__mro__)


def _n_patches(model: Any) -> int:
    """Return the number of patches of the tower's square image."""
    vision = model.config.vision_config
    pixels, step = (each if isinstance(each, int) else each[0] for each in (vision.image_size, vision.patch_size))
    return (int(pixels) // int(step)) ** 2


class Llava(Family):
    """LLaVA: an MLP on each token. The configuration says whether the class token is left out ("default")."""

    models = ("LlavaModel",)
    processors = ("LlavaProcessor",)
    pointwise = True
    feature_layers: ClassVar[str] = "vision_feature_layer"  # the field of the configuration

    def dense(self, model: Any) -> int | None:
        tower = model.config.vision_config.model_type
        if tower == "pixtral":
            raise UnsupportedModelError(
                "a LLaVA with a Pixtral tower puts marks between the rows of an image, which merged tokens do not have"
            )
        prefix = {"clip_vision_model": 1, "siglip_vision_model": 0}.get(tower)
        if prefix is None:  # as many as the processor says
            return None
        return prefix + _n_patches(model) - self.left_out(model)

    def left_out(self, model: Any) -> int:
        """Return the number of tokens in front that the connector does not read."""
        return int(model.config.vision_feature_select_strategy == "default")

    def read_blocks(self, model: Any, depth: int) -> tuple[int, ...]:
        layers: int | Sequence[int] = getattr(model.config, self.feature_layers)
        states = [layers] if isinstance(layers, int) else list(layers)
        blocks = tuple(state - 1 if state >= 0 else state + depth for state in states)
        if min(blocks) < 0:
            raise UnsupportedModelError(
                f"{self.feature_layers}={layers!r} reads tokens before the first block, where nothing is merged"
            )
        return blocks

    def handed_on(self, model: Any, layout: Layout, left: int) -> int:
        return layout.prefix + left - self.left_out(model)


class VipLlava(Llava):
    """VipLLaVA: an MLP on several layers of the tower side by side, without the class token."""

    models = ("VipLlavaModel",)
    feature_layers = "vision_feature_layers"

    def left_out(self, model: Any) -> int:
        return 1


class PaliGemma(Family):
    """PaliGemma: the connector is one linear layer."""

    models = ("PaliGemmaModel",)
    processors = ("PaliGemmaProcessor",)
    pointwise = True

    def dense(self, model: Any) -> int | None:
        return _n_patches(model)


class Gemma3(Family):
    """Gemma 3: the connector averages squares of patches. The prompt has other marks for an image and its tokens."""

    models = ("Gemma3Model",)
    processors = ("Gemma3Processor",)

    def dense(self, model: Any) -> int | None:
        return int(model.multi_modal_projector.tokens_per_side) ** 2

    def side(self, model: Any) -> int:
        return int(model.multi_modal_projector.kernel_size)

    def placeholder(self, processor: Any) -> str:
        return str(processor.tokenizer.image_token)

    def shrink(self, model: Any) -> SmallerImages:
        raise UnsupportedModelError("Gemma3Model takes no smaller images: output='smaller_image' is not for it")


class InternVL(Family):
    """InternVL: an image is cut into tiles; the connector puts the channels of a square of patches into one token."""

    models = ("InternVLModel",)
    processors = ("InternVLProcessor",)

    def dense(self, model: Any) -> int | None:
        return _n_patches(model) // self.side(model) ** 2

    def side(self, model: Any) -> int:
        return int(1 / model.config.downsample_ratio)


class Idefics3(Family):
    """Idefics 3 and SmolVLM: as InternVL, with the whole image as one more tile."""

    models = ("Idefics3Model", "SmolVLMModel")
    processors = ("Idefics3Processor", "SmolVLMProcessor")

    def dense(self, model: Any) -> int | None:
        return int(model.image_seq_len)

    def side(self, model: Any) -> int:
        return int(model.config.scale_factor)


class QwenVL(Family):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size; the connector makes one token of 2 x 2 patches."""

    models = ("Qwen2VLModel", "Qwen2_5_VLModel", "Qwen3VLModel")
    processors = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
    mixin = ReducedQwen

    def dense(self, model: Any) -> int | None:
        return None

    def side(self, model: Any) -> int:
        return int(model.config.vision_config.spatial_merge_size)

    def shrink(self, model: Any) -> SmallerImages:
        raise UnsupportedModelError(
            "Qwen-VL takes images of any size: for smaller ones give its processor another size, as in "
            "processor(..., size={'shortest_edge': ..., 'longest_edge': ...}), both in pixels of area"
        )

    def grid(self, processor: Any, image_inputs: Mapping[str, Any], index: int) -> Grid | None:
        side = processor.image_processor.merge_size
        frames, rows, columns = torch.as_tensor(image_inputs["image_grid_thw"][index]).tolist()
        return frames * rows // side, columns // side


FAMILIES: tuple[Family, ...] = (Llava(), VipLlava(), PaliGemma(), Gemma3(), InternVL(), Idefics3(), QwenVL())


def find(model: nn.Module, output: str) -> tuple[nn.Module, Family]:
    """Return the module inside a model that joins images and text, and its family."""
    found = [(module, family) for module in model.modules() for family in FAMILIES if family.recognises(module)]
    if not found:
        supported = ", ".join(name for family in FAMILIES for name in family.models)
        raise UnsupportedModelError(
            f"output={output!r} is for vision-language models, whose prompts can have fewer placeholders, and "
            f"{type(model).__name__} holds none that agglo knows; supported, from transformers: {supported}"
        )
    return found[0]
