"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size, packed one behind the other.

The connector (the library's "merger") makes one token of 2 x 2 patches, at the end of the tower. Its outputs are
merged, each picture's to a number that follows from its size; those of Qwen3-VL's deeper connectors (DeepStack) by the
very same groups. Videos stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.hosts.swap import ReducedModule, UnsupportedModelError, begins_pass
from agglo.hosts.vit.reading import StandIn
from agglo.hosts.vlm import positions
from agglo.hosts.vlm.family import Family
from agglo.hosts.vlm.mixin import ReducedVLM, as_asked, merged_features
from agglo.hosts.vlm.outlet import Outlet, Picture, Shrink
from agglo.methods import Grid


class ReducedQwen(ReducedVLM):
    """Besides the features, the positions of M-RoPE."""

    @begins_pass
    def get_image_features(
        self: Any, outlet: Outlet, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
    ) -> Any:
        return as_asked(self, _features(self, outlet, pixel_values, image_grid_thw, **kwargs), kwargs)

    @begins_pass
    def get_video_features(self: Any, outlet: Outlet, *args: Any, **kwargs: Any) -> Any:
        # Qwen3-VL's calls get_image_features.
        whole = StandIn(self, get_image_features=partial(outlet.owner.get_image_features, self))  # type: ignore[attr-defined]
        return outlet.owner.get_video_features(whole, *args, **kwargs)  # type: ignore[attr-defined]

    @begins_pass
    def get_rope_index(
        self: Any,
        outlet: Outlet,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        original = partial(outlet.owner.get_rope_index, self, image_grid_thw=image_grid_thw)  # type: ignore[attr-defined]
        grids = _grids(self, image_grid_thw)
        counts = [(outlet.count(rows * columns, (rows, columns)), rows * columns) for rows, columns in grids]
        return positions.spread(original, counts, input_ids, mm_token_type_ids, attention_mask, **kwargs)

    @begins_pass
    def forward(
        self: Any,
        outlet: Outlet,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        original = partial(
            outlet.owner.forward,
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
        )
        # What was merged must be known before the positions of a picture's tokens.
        kwargs = _encoded(self, outlet, kwargs)
        image = (kwargs.get("mm_encoder_outputs") or {}).get("image")
        if image is None or input_ids is None:
            return original(position_ids=position_ids, **kwargs)
        if position_ids is None:
            asked = {name: kwargs[name] for name in _OF_POSITIONS if kwargs.get(name) is not None}
            position_ids = self.compute_3d_position_ids(
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **{"image_grid_thw": None, "video_grid_thw": None, **asked},
            )
        if position_ids is not None:
            is_image = input_ids == self.config.image_token_id
            position_ids = positions.of_groups(position_ids, is_image, image.pooler_output)
        return original(position_ids=position_ids, **kwargs)


_OF_POSITIONS = ("image_grid_thw", "video_grid_thw", "mm_token_type_ids", "second_per_grid_ts")
_OF_FORWARD = (*_OF_POSITIONS, "pixel_values", "pixel_values_videos", "mm_encoder_outputs", "use_cache")


def _encoded(model: Any, outlet: Outlet, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `forward` with what tower and connector give in place of pixels, where a picture is shown."""
    if kwargs.get("pixel_values") is None or kwargs.get("mm_encoder_outputs"):
        return kwargs
    pixels, video = kwargs["pixel_values"], kwargs.get("pixel_values_videos")
    others = {name: value for name, value in kwargs.items() if name not in _OF_FORWARD}
    encoded = {"image": _features(model, outlet, pixels, kwargs.get("image_grid_thw"), **others)}
    if video is not None:
        encoded["video"] = model.get_video_features(video, kwargs.get("video_grid_thw"), return_dict=True, **others)
    return {**kwargs, "pixel_values": None, "pixel_values_videos": None, "mm_encoder_outputs": encoded}


def _features(model: Any, outlet: Outlet, pixel_values: Tensor, image_grid_thw: Tensor | None, **kwargs: Any) -> Any:
    grids = _grids(model, image_grid_thw)
    outputs, pictures = merged_features(model, outlet, grids, pixel_values, image_grid_thw, **kwargs)
    # Pictures are handed about one by one; each takes along where its tokens are.
    placed = zip(pictures, grids, strict=True)
    outputs.pooler_output = tuple(positions.with_cells(each.tokens, each.labels, grid) for each, grid in placed)
    deeper = getattr(outputs, "deepstack_features", None)
    if deeper is not None:
        outputs.deepstack_features = [
            tuple(_by_groups(tokens, picture) for tokens, picture in zip(layer, pictures, strict=True))
            for layer in deeper
        ]
    return outputs


def _by_groups(tokens: Tensor, picture: Picture) -> Tensor:
    """Other tokens (M, D) of a picture, merged as its own were."""
    if picture.labels is None:
        return tokens
    groups = Grouping.of(picture.labels.unsqueeze(0), len(picture.tokens), drops=bool((picture.labels < 0).any()))
    return groups.merge(tokens.unsqueeze(0))[0]


def _grids(model: Any, grid_thw: Tensor | None) -> list[Grid]:
    """(rows, columns) of every picture's tokens. Frames, of which a picture has one, would be below each other."""
    if grid_thw is None:
        return []
    side = model.config.vision_config.spatial_merge_size
    return [(frames * rows // side, columns // side) for frames, rows, columns in grid_thw.tolist()]


class QwenVL(Family):
    model_classes: ClassVar[tuple[str, ...]] = ("Qwen2VLModel", "Qwen2_5_VLModel", "Qwen3VLModel")
    processor_classes: ClassVar[tuple[str, ...]] = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
    mixin: ClassVar[type[ReducedModule]] = ReducedQwen

    def dense(self, model: Any) -> int | None:
        return None

    def patches_per_token(self, model: Any) -> int:
        return int(model.config.vision_config.spatial_merge_size) ** 2

    def shrink(self, model: Any) -> Shrink:
        raise UnsupportedModelError(
            "Qwen-VL takes pictures of any size: for smaller ones give its processor another size, as in "
            "processor(..., size={'shortest_edge': ..., 'longest_edge': ...}), both in pixels of area"
        )

    def grid(self, processor: Any, image_inputs: Mapping[str, Any], index: int) -> Grid | None:
        side = processor.image_processor.merge_size
        frames, rows, columns = torch.as_tensor(image_inputs["image_grid_thw"][index]).tolist()
        return frames * rows // side, columns // side
