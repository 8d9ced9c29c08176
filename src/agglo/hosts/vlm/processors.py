"""Prompts of a reduced vision-language model: how many tokens an image takes, and processors that write as many."""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn

from agglo.checks import number
from agglo.hosts.common.swap import ReducedModule, reduced_class
from agglo.hosts.vlm.families import FAMILIES, Family, find_vlm
from agglo.hosts.vlm.reduction import VLMReduction, reduced_vlms, vlm_reduction_of
from agglo.methods import Grid


def image_tokens(model: nn.Module, dense: int | None = None) -> int:
    """Return how many tokens an image takes in the prompt of a reduced vision-language model.

    Args:
        model: The reduced model. Where it cuts an image into tiles, the number is that of one tile.
        dense: How many it takes without reduction, for models whose images differ in size (Qwen-VL).

    >>> from transformers import LlavaConfig, LlavaForConditionalGeneration
    >>> small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    >>> vision = {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 8, **small}
    >>> config = LlavaConfig(vision_config=vision, text_config={"model_type": "llama", "vocab_size": 99, **small})
    >>> model = LlavaForConditionalGeneration(config)
    >>> model = agglo.apply(model, keep_rate=0.25, output="merged_late")
    >>> agglo.image_tokens(model)  # of 64
    16
    """
    reduction = next((vlm_reduction_of(module) for module in reduced_vlms(model)), None)
    if reduction is None:
        raise ValueError(f"{type(model).__name__} is not reduced: call agglo.apply(model, ..., output='merged') first")
    if dense is not None:
        dense = number("dense", dense, whole=True, minimum=1)
    if None not in (dense, reduction.dense) and dense != reduction.dense:
        raise ValueError(f"dense={dense!r}: every image of this model takes {reduction.dense} tokens without reduction")
    return reduction.count(dense)


class AdaptedProcessor(ReducedModule):
    """The overrides of a processor of transformers."""

    agglo_reduction: VLMReduction

    def replace_image_token(self: Any, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        text = self.agglo_original.replace_image_token(self, image_inputs, image_idx, **kwargs)
        grid = _family_of(self).grid
        return _shortened(self, text, None if grid is None else grid(self, image_inputs, image_idx))

    def replace_video_token(self: Any, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        # Some models take the frames of a video for images.
        return _shortened(self, self.agglo_original.replace_video_token(self, video_inputs, video_idx, **kwargs))

    def to_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the processor as it was, which is what is saved."""
        return restored(copy.copy(self)).to_dict(*args, **kwargs)


def _family_of(processor: Any) -> Family:
    return next(family for family in FAMILIES if family.has(processor))


def _shortened(processor: Any, text: str, grid: Grid | None = None) -> str:
    """Return a text with as many placeholders as the reduced model gives tokens."""
    reduction: VLMReduction = processor.agglo_reduction
    placeholder = _family_of(processor).placeholder(processor)

    def fewer(run: re.Match[str]) -> str:
        n_written, each = len(run.group()) // len(placeholder), reduction.dense
        if each is None:
            return placeholder * reduction.count(n_written, grid)
        if n_written % each:
            raise ValueError(f"the processor writes {n_written} placeholders for images that take {each} each")
        return placeholder * (n_written // each * reduction.count())  # perhaps of several tiles

    return re.sub(f"(?:{re.escape(placeholder)})+", fewer, text)


def adapt_processor(processor: Any, model: nn.Module) -> Any:
    """Let a processor of transformers write as many placeholders for each image as the model now takes. In place.

    Call it again after every other `apply`. With a model that is not reduced, the processor is as it was; so it is
    after `agglo.remove(processor)`. What `save_pretrained` writes is the processor as it was. Returns the processor.

    >>> from transformers import LlavaConfig, LlavaForConditionalGeneration
    >>> small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    >>> vision = {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 8, **small}
    >>> config = LlavaConfig(vision_config=vision, text_config={"model_type": "llama", "vocab_size": 99, **small})
    >>> model = LlavaForConditionalGeneration(config)
    >>> model = agglo.apply(model, keep_rate=0.25, output="merged_late")
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"<image>": 0, "what": 1}, unk_token="what"))
    >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=["<image>"])
    >>> square = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    >>> processor = LlavaProcessor(CLIPImageProcessor(**square), tokenizer, patch_size=8, image_token="<image>",
    ...     vision_feature_select_strategy="default", num_additional_image_tokens=1)
    >>> processor = agglo.adapt_processor(processor, model)
    >>> prompt = processor(images=torch.zeros(3, 64, 64), text="<image> what", return_tensors="pt")
    >>> int((prompt["input_ids"] == 0).sum())
    16
    """
    module, family = find_vlm(model, "merged")
    if not family.has(processor):
        raise ValueError(
            f"{type(processor).__name__} is no processor of {type(module).__name__} that agglo can adapt; "
            f"accepted: {', '.join(family.processors)}"
        )
    reduction = vlm_reduction_of(module)
    restored(processor)
    if reduction is not None:
        processor.agglo_reduction = reduction
        processor.__class__ = reduced_class(AdaptedProcessor, type(processor))
    return processor


def restored(processor: Any) -> Any:
    """Return a processor to the state in which its library made it."""
    if isinstance(processor, AdaptedProcessor):
        changed: Any = processor
        changed.__class__ = changed.agglo_original
        del changed.agglo_reduction
    return processor
