"""Qwen-VL's positions on three axes, and its videos."""

from __future__ import annotations

import pytest
import torch

import agglo
from tests.support.vlms import QWEN, VLM, image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
every_qwen = pytest.mark.parametrize("vlm", QWEN, ids=lambda vlm: vlm.name)
ASKED = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")


@every_qwen
def test_text_has_the_positions_of_the_dense_prompt(vlm: VLM) -> None:
    """Before an image is seen, and what `generate` adds for later tokens."""
    model, processor = vlm.model(), vlm.processor()
    images = [[image(1, 64, 64)], [], [image(2, 32, 96), image(3, 128, 64)]]
    dense = vlm.inputs(processor, images)
    expected, deltas = model.model.get_rope_index(**{name: dense[name] for name in ASKED})
    agglo.apply(model, keep_rate=0.25, output="merged_late")
    inputs = vlm.inputs(agglo.adapt_processor(processor, model), images)
    found, reduced_deltas = model.model.get_rope_index(**{name: inputs[name] for name in ASKED})
    for row in range(3):
        of_dense = (dense["input_ids"][row] != 4) & dense["attention_mask"][row].bool()
        of_reduced = (inputs["input_ids"][row] != 4) & inputs["attention_mask"][row].bool()
        assert torch.equal(found[:, row, of_reduced], expected[:, row, of_dense])
        # The position of the next token: the last one, and one more.
        following = int(inputs["attention_mask"][row].sum() + reduced_deltas[row])
        assert following == int(dense["attention_mask"][row].sum() + deltas[row]) == int(found[:, row].max()) + 1


@every_qwen
def test_features_computed_beforehand_take_their_positions_along(vlm: VLM) -> None:
    model = agglo.apply(vlm.model(), keep_rate=0.3, output="merged_late")
    inputs = vlm.inputs(agglo.adapt_processor(vlm.processor(), model), [[image(1), image(2)]])
    with torch.no_grad():
        expected = model(**inputs).logits
        pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        encoded = model.model.get_image_features(**pixels)
        others = {name: value for name, value in inputs.items() if name != "pixel_values"}
        assert torch.equal(model(**others, mm_encoder_outputs={"image": encoded}).logits, expected)
        encoded.pooler_output = tuple(tokens.clone() for tokens in encoded.pooler_output)
        with pytest.raises(ValueError, match="get_image_features"):
            model(**others, mm_encoder_outputs={"image": encoded})


@every_qwen
def test_an_image_beside_a_video(vlm: VLM) -> None:
    """Keep rate 1 takes the same way as any other, and is the dense model. Videos stay as they are."""
    model = vlm.model()
    shown = vlm.inputs(vlm.processor(), [[image(1)]])
    frames = [[9] * 16, [9] * 16] if vlm.name == "qwen3" else [[9] * 32]
    ids = [12, *[4] * 16, 13, *[token for frame in frames for token in (10, *frame, 11)], 14]
    inputs = {
        "input_ids": torch.tensor([ids]),
        "mm_token_type_ids": torch.tensor([[{4: 1, 9: 2}.get(token, 0) for token in ids]]),
        "pixel_values": shown["pixel_values"],
        "image_grid_thw": shown["image_grid_thw"],
        "pixel_values_videos": torch.randn(2 * 64, 384),
        "video_grid_thw": torch.tensor([[2, 8, 8]]),
    }
    with torch.no_grad():
        dense = model(**inputs).logits
        videos = [inputs[name] for name in ("pixel_values_videos", "video_grid_thw")]
        whole = torch.cat(model.model.get_video_features(*videos).pooler_output)
        agglo.apply(model, keep_rate=1.0, output="merged_late")
        assert torch.equal(model(**inputs).logits, dense)
        agglo.apply(model, keep_rate=0.25, output="merged_late")
        assert torch.equal(torch.cat(model.model.get_video_features(*videos).pooler_output), whole)
