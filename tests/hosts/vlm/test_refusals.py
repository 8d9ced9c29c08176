"""Requests that do not go with merged tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import agglo
from tests.support import vlms
from tests.support.vlms import VLM, VLMS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LLAVA, GEMMA3, QWEN = VLMS[0], VLMS[3], VLMS[-1]
LATE = {"keep_rate": 0.5, "output": "merged_late"}


@pytest.mark.parametrize(
    ("vlm", "options", "message"),
    [
        (LLAVA, {**LATE, "output": "fewer"}, "output='fewer'"),
        (LLAVA, {"threshold": 0.2, "output": "merged"}, "threshold=0.2"),
        (LLAVA, {"keep_rate": 0.5, "method": "ats", "output": "merged"}, "ats"),
        (LLAVA, {**LATE, "blocks": (3,)}, "blocks="),
        (LLAVA, {**LATE, "place": "before_block", "features": "tokens"}, "place="),
        (LLAVA, {**LATE, "method": "sinkhorn"}, "sinkhorn"),
        (LLAVA, {**LATE, "method": "evit"}, "evit"),
        (LLAVA, {**LATE, "importance": "received"}, "atc"),
        (LLAVA, {**LATE, "keep_rate": 0.3, "method": "tome"}, "tome"),
        (LLAVA, {**LATE, "output": "smaller_image", "method": "tome"}, "no method"),
        (LLAVA, {**LATE, "keep_rate": 0.01}, "at least 1"),
        (GEMMA3, {"keep_rate": 0.25, "output": "merged"}, "16 tokens"),
        (GEMMA3, {"keep_rate": 0.7, "output": "merged", "method": "sinkhorn"}, "sinkhorn"),
        (GEMMA3, {**LATE, "output": "smaller_image"}, "Gemma3Model"),
        (QWEN, {**LATE, "output": "smaller_image"}, "its processor"),
    ],
)
def test_impossible_requests_raise_before_anything_changes(vlm: VLM, options: dict[str, Any], message: str) -> None:
    model = vlm.model()
    with pytest.raises((ValueError, agglo.UnsupportedModelError), match=message):
        agglo.apply(model, **options)
    assert not any("agglo" in name for module in model.modules() for name in vars(module))


@pytest.mark.parametrize("output", ["merged", "merged_late"])
@pytest.mark.parametrize("vlm", vlms.QWEN, ids=lambda vlm: vlm.name)
@torch.no_grad()
def test_no_image_is_too_small(vlm: VLM, output: str) -> None:
    model = agglo.apply(vlm.model(), keep_rate=0.3, output=output)
    processor = agglo.adapt_processor(vlm.processor(), model)
    inputs = vlm.inputs(processor, [[vlms.image(1, 16, 16), vlms.image(2, 16, 32)], [vlms.image(3)]])
    assert [agglo.image_tokens(model, dense) for dense in (1, 2)] == [1, 1]
    assert model(**inputs).logits.isfinite().all()


def test_other_models_are_refused() -> None:
    config = tf.ViTConfig(image_size=32, hidden_size=24, num_hidden_layers=4, num_attention_heads=2)
    with pytest.raises(agglo.UnsupportedModelError, match="LlavaModel"):
        agglo.apply(tf.ViTModel(config), keep_rate=0.5, output="merged")
    with pytest.raises(agglo.UnsupportedModelError, match="before the first block"):
        agglo.apply(vlms._llava(vision_feature_layer=0), keep_rate=0.5, output="merged")


@pytest.mark.parametrize(("vlm", "dense"), [(QWEN, 0), (LLAVA, 100)])
def test_numbers_of_tokens_that_are_none(vlm: VLM, dense: Any) -> None:
    model = agglo.apply(vlm.model(), **LATE)
    with pytest.raises(ValueError, match="dense="):
        agglo.image_tokens(model, dense)
