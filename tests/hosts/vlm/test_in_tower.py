"""output="merged": the tower runs reduced, and what is merged stays merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from tests.hosts.vlm.test_late import features, logits
from tests.support import vlms
from tests.support.vlms import VLM, VLMS, image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

POINTWISE = [vlm for vlm in VLMS if vlm.pointwise]
ON_A_GRID = [vlm for vlm in VLMS if not vlm.pointwise]
pointwise = pytest.mark.parametrize("vlm", POINTWISE, ids=lambda vlm: vlm.name)
on_a_grid = pytest.mark.parametrize("vlm", ON_A_GRID, ids=lambda vlm: vlm.name)


def applied(vlm: VLM, **options: Any) -> tuple[Any, Any]:
    model, processor = vlm.model(), vlm.processor()
    agglo.apply(model, output="merged", **{"keep_rate": 0.7, **options})
    return model, agglo.adapt_processor(processor, model)


def labels_of(model: Any, inputs: Any, deepest: int) -> Tensor:
    """The groups of patches (B, N) that the latest reduction up to a block made."""
    with agglo.trace(model) as trace:
        features(model, inputs)
    block = max(block for block in trace.groupings if block <= deepest)
    grouping = trace.groupings[block]
    return grouping.labels[:, grouping.prefix :] - grouping.prefix


@pointwise
def test_the_groups_of_the_tower_pass_the_connector(vlm: VLM) -> None:
    """As with every position restored, of which all but one of each group are left out."""
    model, processor = applied(vlm)
    inputs = vlm.inputs(processor, [[image(1)], [image(2), image(3)]])
    deepest = 7 if vlm.name == "paligemma" else 6  # LLaVA reads what comes before the last block
    n_groups = int(64 * 0.7**3)
    assert agglo.image_tokens(model) == n_groups
    assert (inputs["input_ids"] == 4).sum(1).tolist() == [n_groups, 2 * n_groups]
    merged = torch.stack(features(model, inputs))
    agglo.apply(model, keep_rate=0.7)
    restored = torch.stack(features(model, inputs))
    labels = labels_of(model, inputs, deepest)
    assert labels.shape == (3, 64)
    assert merged.shape == (3, n_groups, restored.shape[2])
    if vlm.name == "vipllava":
        restored = _side_by_side(model, inputs, labels)
    first = torch.stack([(labels == group).int().argmax(1) for group in range(n_groups)], dim=1)
    expected = restored.gather(1, first.unsqueeze(-1).expand(-1, -1, restored.shape[-1]))
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=0)
    assert (first.diff(dim=1) > 0).all()  # in order of first members


def _side_by_side(model: Any, inputs: Any, labels: Tensor) -> Tensor:
    """VipLLaVA's connector on several layers, every one of them averaged over the groups of the deepest."""
    with torch.no_grad():
        states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states
        layers = [states[layer][:, 1:] for layer in model.config.vision_feature_layers]
        same = (labels.unsqueeze(1) == labels.unsqueeze(2)).float()  # (B, N, N)
        means = [same @ layer / same.sum(2, keepdim=True) for layer in layers]
        given: Tensor = model.model.multi_modal_projector(torch.cat(means, dim=-1))
    return given


@on_a_grid
def test_a_connector_on_a_grid_gets_every_position_and_its_outputs_are_merged_as_far(vlm: VLM) -> None:
    model, processor = applied(vlm)
    n_groups = int(16 * 0.7**3)
    assert agglo.image_tokens(model, 16) == n_groups
    inputs = vlm.inputs(processor, [[image(1)], [image(2), image(3)]])
    merged = torch.cat([each.reshape(-1, n_groups, 32) for each in features(model, inputs)])
    agglo.apply(model, keep_rate=0.7)
    restored = torch.cat([each.reshape(-1, 16, 32) for each in features(model, inputs)])
    labels = agglo.cluster(restored, n_groups)
    expected = agglo.grouping.Grouping.of(labels, n_groups).merge(restored)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["pool", "evit", "sinkhorn"])
def test_other_methods_leave_the_tower_merged_too(method: str) -> None:
    model, processor = applied(VLMS[0], method=method)
    n_tokens = agglo.image_tokens(model)
    inputs = VLMS[0].inputs(processor, [[image(1), image(2)]])
    assert [len(each) for each in features(model, inputs)] == [n_tokens, n_tokens]
    assert n_tokens < 64
    assert not logits(model, inputs).isnan().any()


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_the_class_token_is_handed_on_where_the_configuration_says_so(strategy: str) -> None:
    model = vlms._llava(vision_feature_select_strategy=strategy).eval()
    processor = vlms._llava_processor(vision_feature_select_strategy=strategy)
    dense = (VLMS[0].inputs(processor, [[image(1)]])["input_ids"] == 4).sum()
    agglo.apply(model, keep_rate=0.5, output="merged")
    inputs = VLMS[0].inputs(agglo.adapt_processor(processor, model), [[image(1)]])
    count = (inputs["input_ids"] == 4).sum()
    assert (int(dense), int(count)) == ((64, 8) if strategy == "default" else (65, 9))
    logits(model, inputs)


def test_a_count_by_hand_at_the_layer_that_is_read() -> None:
    """Late in the tower, by the keys of the block that is read, to a number of one's own."""
    model, processor = applied(VLMS[0], keep_rate=None, schedule=agglo.Counts((10,), blocks=(6,)))
    inputs = VLMS[0].inputs(processor, [[image(1)]])
    assert agglo.image_tokens(model) == 10 == int((inputs["input_ids"] == 4).sum())
    logits(model, inputs)
    agglo.apply(model, schedule=agglo.Counts((10,), blocks=(7,)), output="merged")  # after what is read
    assert agglo.image_tokens(model) == 64


def test_apply_replaces_what_was_applied_before_and_the_report_says_how_many_tokens_leave() -> None:
    vlm = VLMS[0]
    model, processor = applied(vlm)
    assert agglo.report(model).image_tokens == (64, 21)  # type: ignore[union-attr]
    assert "64 -> 21 image tokens" in str(agglo.report(model))
    agglo.apply(model, keep_rate=0.5, output="merged_late")
    inputs = vlm.inputs(agglo.adapt_processor(processor, model), [[image(1)]])
    assert int((inputs["input_ids"] == 4).sum()) == agglo.image_tokens(model) == 32
    logits(model, inputs)
    found: Any = agglo.report(model)
    assert found.image_tokens == (64, 32)
    assert found.gflops_after == found.gflops_before
    agglo.apply(model, keep_rate=0.5)
    inputs = vlm.inputs(agglo.adapt_processor(processor, model), [[image(1)]])
    assert int((inputs["input_ids"] == 4).sum()) == 64
    with pytest.raises(ValueError, match="output='merged'"):
        agglo.image_tokens(model)
    assert agglo.report(agglo.remove(model)) is None
