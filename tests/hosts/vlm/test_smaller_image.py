"""output="smaller_image": the baseline that merges nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import agglo
from tests.hosts.vlm.test_late import features, logits
from tests.support.vlms import VLM, VLMS, image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SMALLER = [vlm for vlm in VLMS if vlm.name in ("llava", "internvl", "idefics3")]
every_vlm = pytest.mark.parametrize("vlm", SMALLER, ids=lambda vlm: vlm.name)


@every_vlm
def test_the_tower_sees_the_image_scaled_down(vlm: VLM) -> None:
    model, processor = vlm.model(), vlm.processor()
    dense_inputs = vlm.inputs(processor, [[image(1)]])
    dense = logits(model, dense_inputs)
    agglo.apply(model, keep_rate=1.0, output="smaller_image")
    assert torch.equal(logits(model, dense_inputs), dense)
    tiles = int((dense_inputs["input_ids"] == 4).sum()) // vlm.dense
    agglo.apply(model, keep_rate=0.25, output="smaller_image")
    inputs = vlm.inputs(agglo.adapt_processor(processor, model), [[image(1)]])
    assert agglo.image_tokens(model) == vlm.dense // 4
    assert int((inputs["input_ids"] == 4).sum()) == tiles * vlm.dense // 4
    small = torch.cat([each.reshape(-1, each.shape[-1]) for each in features(model, inputs)])
    assert len(small) == tiles * vlm.dense // 4
    assert not logits(model, inputs).isnan().any()
    generated = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert generated.shape[1] == inputs["input_ids"].shape[1] + 2

    agglo.remove(model)
    pixels = inputs["pixel_values"].reshape(-1, 3, 64, 64)
    scaled = F.interpolate(pixels, (32, 32), mode="bicubic", antialias=True)
    options = {"interpolate_pos_encoding": True} if vlm.pointwise else {}
    if "pixel_attention_mask" in inputs:
        scaled = scaled.unsqueeze(0)
    with torch.no_grad():
        expected = list(model.model.get_image_features(scaled, **options).pooler_output)
    expected_tokens = torch.cat([each.reshape(-1, each.shape[-1]) for each in expected])
    torch.testing.assert_close(small, expected_tokens, atol=1e-5, rtol=0)


def test_the_nearest_square_is_taken_and_told() -> None:
    model = agglo.apply(VLMS[0].model(), keep_rate=0.5, output="smaller_image")
    assert agglo.image_tokens(model) == 36  # 32 are asked for, 25 and 36 are squares
    found: Any = agglo.report(model)
    assert found.image_tokens == (64, 36)
    assert found.counts == [36] * 8
    assert found.gflops_after < found.gflops_before
    assert str(found).startswith("smaller image")
