"""The families of vision-language models that can be given fewer tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agglo.hosts.common.swap import ReducedModule, UnsupportedModelError
from agglo.hosts.vlm.qwen import ReducedQwen
from agglo.hosts.vlm.reduction import ReducedVLM, SmallerImages
from agglo.methods import Grid

Number = Callable[[Any], int]


@dataclass(frozen=True)
class Family:
    """A family of vision-language models."""

    models: tuple[str, ...]  # classes whose `get_image_features` runs tower and connector, as transformers names them
    processors: tuple[str, ...]  # classes that prepare their prompts
    dense: Callable[[Any], int | None]  # tokens of an image or tile without reduction; None where images differ
    side: Number = lambda model: 1  # of the square of patches that the connector makes one token of
    pointwise: bool = False  # whether the connector acts on each token alone; the tower's groups may then pass it
    states: Callable[[Any], int | Sequence[int]] = lambda model: -1  # of the tower, that a pointwise connector reads
    left_out: Number = lambda model: 0  # tokens in front that it does not read
    takes_one_size: str | None = None  # why images cannot be made smaller, if so
    mixin: type[ReducedModule] = ReducedVLM
    placeholder: Callable[[Any], str] = lambda processor: str(processor.image_token)  # one for every token of an image
    # (rows, columns) of the dense tokens of an image, given the processor, all images and the number of this one
    grid: Callable[[Any, Mapping[str, Any], int], Grid] | None = None

    def read_blocks(self, model: Any, depth: int) -> tuple[int, ...]:
        """Return the blocks of the tower after which a pointwise connector reads tokens."""
        states = self.states(model)
        numbers = [states] if isinstance(states, int) else list(states)
        blocks = tuple(state - 1 if state >= 0 else state + depth for state in numbers)
        if min(blocks) < 0:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads states {states!r} of its tower: before the first block nothing is merged"
            )
        return blocks

    def shrink(self, model: Any) -> SmallerImages:
        """Return what makes images smaller; UnsupportedModelError where the model takes one size."""
        if self.takes_one_size is not None:
            raise UnsupportedModelError(
                f"output='smaller_image' is not for {type(model).__name__}: {self.takes_one_size}"
            )
        size = model.config.vision_config.patch_size
        pixels = int(size if isinstance(size, int) else size[0])
        return SmallerImages(pixels * self.side(model), interpolate_positions=self.pointwise)

    def has(self, thing: object) -> bool:
        """Return whether this is a model or processor of the family."""
        own = {cls.__name__ for cls in type(thing).__mro__ if cls.__module__.split(".")[0] == "transformers"}
        return not own.isdisjoint(self.models + self.processors)


def _n_patches(model: Any) -> int:
    """Return the number of patches of the tower's square image."""
    vision = model.config.vision_config
    pixels, step = (each if isinstance(each, int) else each[0] for each in (vision.image_size, vision.patch_size))
    return (int(pixels) // int(step)) ** 2


def _llava_dense(model: Any) -> int | None:
    tower = model.config.vision_config.model_type
    if tower == "pixtral":
        raise UnsupportedModelError("a Pixtral tower's prompt has marks between rows, and merged tokens have no rows")
    prefix = {"clip_vision_model": 1, "siglip_vision_model": 0}.get(tower)
    if prefix is None:  # as many as the processor says
        return None
    return prefix + _n_patches(model) - _llava_left_out(model)


def _llava_left_out(model: Any) -> int:
    return int(model.config.vision_feature_select_strategy == "default")


def _qwen_grid(processor: Any, image_inputs: Mapping[str, Any], index: int) -> Grid:
    side = processor.image_processor.merge_size
    frames, rows, columns = torch.as_tensor(image_inputs["image_grid_thw"][index]).tolist()
    return frames * rows // side, columns // side


def _internvl_side(model: Any) -> int:
    return int(1 / model.config.downsample_ratio)


FAMILIES: tuple[Family, ...] = (
    # An MLP on each token.
    Family(
        ("LlavaModel",), ("LlavaProcessor",), _llava_dense, pointwise=True,
        states=lambda model: model.config.vision_feature_layer, left_out=_llava_left_out,
    ),
    # An MLP on several layers of the tower, one beside the other, without the class token.
    Family(
        ("VipLlavaModel",), ("LlavaProcessor",), _n_patches, pointwise=True,
        states=lambda model: model.config.vision_feature_layers, left_out=lambda model: 1,
    ),
    Family(("PaliGemmaModel",), ("PaliGemmaProcessor",), _n_patches, pointwise=True),
    # The connector averages squares of patches; the prompt has other marks for an image and its tokens.
    Family(
        ("Gemma3Model",), ("Gemma3Processor",), lambda model: int(model.multi_modal_projector.tokens_per_side) ** 2,
        side=lambda model: int(model.multi_modal_projector.kernel_size), takes_one_size="its images have one size",
        placeholder=lambda processor: str(processor.tokenizer.image_token),
    ),
    # Images are cut into tiles; the connector puts the channels of a square of patches into one token.
    Family(
        ("InternVLModel",), ("InternVLProcessor",), lambda model: _n_patches(model) // _internvl_side(model) ** 2,
        side=_internvl_side,
    ),
    # As InternVL, with the whole image as one more tile.
    Family(
        ("Idefics3Model", "SmolVLMModel"), ("Idefics3Processor", "SmolVLMProcessor"),
        lambda model: int(model.image_seq_len), side=lambda model: int(model.config.scale_factor),
    ),
    # Images of any size; the connector makes one token of 2 x 2 patches.
    Family(
        ("Qwen2VLModel", "Qwen2_5_VLModel", "Qwen3VLModel"),
        ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"),
        lambda model: None, side=lambda model: int(model.config.vision_config.spatial_merge_size),
        takes_one_size="give its processor another size, as in "
        "processor(..., size={'shortest_edge': ..., 'longest_edge': ...}), both in pixels of area",
        mixin=ReducedQwen, grid=_qwen_grid,
    ),
)  # fmt: skip


def find_vlm(model: nn.Module, output: str) -> tuple[nn.Module, Family]:
    """Return the module inside a model that joins images and text, and its family."""
    found = [(module, family) for module in model.modules() for family in FAMILIES if family.has(module)]
    if not found:
        supported = ", ".join(name for family in FAMILIES for name in family.models)
        raise UnsupportedModelError(
            f"output={output!r} is for vision-language models, and {type(model).__name__} holds none that agglo knows; "
            f"supported, from transformers: {supported}"
        )
    return found[0]
