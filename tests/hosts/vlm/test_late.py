"""output="merged_late": the tower runs whole and its tokens are merged once, in every family."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from scipy.cluster.hierarchy import cut_tree, linkage
from torch import Tensor

import agglo
from tests.support.vlms import VLM, VLMS, every_vlm, image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KEEP_RATE = 0.3
IMAGES = [[image(1)], [], [image(2), image(3)]]


def features(model: Any, inputs: Any) -> list[Tensor]:
    """What the language model is given of every image or tile, one behind the other."""
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    with torch.no_grad():
        given = model.model.get_image_features(**{name: inputs[name] for name in names if name in inputs}).pooler_output
    return list(given)


def by_hand(tokens: Tensor, n_groups: int) -> tuple[Tensor, list[int]]:
    """Average linkage by SciPy: means (K, D) in order of their first members, and the group of each token."""
    found = cut_tree(linkage(tokens.double().numpy(), "average", metric="cosine"), n_groups).ravel().tolist()
    order = list(dict.fromkeys(found))
    labels = [order.index(group) for group in found]
    means = [tokens[torch.tensor(labels) == group].mean(0) for group in range(n_groups)]
    return torch.stack(means), labels


def applied(vlm: VLM, keep_rate: float = KEEP_RATE, **options: Any) -> tuple[Any, Any]:
    model, processor = vlm.model(), vlm.processor()
    agglo.apply(model, keep_rate=keep_rate, output="merged_late", **options)
    return model, agglo.adapt_processor(processor, model)


def logits(model: Any, inputs: Any, **others: Any) -> Tensor:
    with torch.no_grad():
        given: Tensor = model(**{**inputs, **others}).logits
    return given


def without_images(vlm: VLM) -> list[list[Any]]:
    """Processors that take images of all prompts or none cannot have a prompt without."""
    return [each for each in IMAGES if each] if vlm.name in ("paligemma", "gemma3") else IMAGES


@every_vlm
def test_the_language_model_gets_the_means_of_the_groups_at_the_right_places(vlm: VLM) -> None:
    model, processor = applied(vlm)
    images = without_images(vlm)
    inputs = vlm.inputs(processor, images)
    merged = torch.cat([each.reshape(-1, each.shape[-1]) for each in features(model, inputs)])
    reduced = logits(model, inputs)

    agglo.remove(model)
    dense_inputs = vlm.inputs(agglo.remove(processor), images)
    dense = torch.cat([each.reshape(-1, each.shape[-1]) for each in features(model, dense_inputs)])
    n_groups = int(KEEP_RATE * vlm.dense)
    found = [by_hand(tokens, n_groups) for tokens in dense.split(vlm.dense)]
    expected = torch.cat([means for means, _ in found])
    torch.testing.assert_close(merged, expected, atol=2e-5, rtol=0)

    n_images = len(dense) // vlm.dense
    is_image = inputs["input_ids"] == 4
    assert int(is_image.sum()) == n_images * n_groups
    was_image = dense_inputs["input_ids"] == 4
    assert inputs["input_ids"].shape[1] < dense_inputs["input_ids"].shape[1]
    for row in range(len(images)):  # everything but placeholders and padding stays
        short, long = inputs["input_ids"][row], dense_inputs["input_ids"][row]
        assert short[(short != 4) & (short != 0)].tolist() == long[(long != 4) & (long != 0)].tolist()

    # The library's own model, given the embeddings of the short prompt.
    embeds = model.get_input_embeddings()(inputs["input_ids"].where(~is_image, 0)).detach()
    embeds[is_image] = expected
    kept = {name: inputs[name] for name in ("attention_mask", "token_type_ids") if name in inputs}
    if "image_grid_thw" in inputs:
        kept["position_ids"] = mrope_by_hand(model, inputs, dense_inputs, was_image, [labels for _, labels in found])
        kept.update(deepstack_by_hand(model, dense_inputs, is_image, [labels for _, labels in found]))
    oracle = language_logits(model, embeds, kept)
    there = inputs["attention_mask"].bool()
    torch.testing.assert_close(reduced[there], oracle[there], atol=2e-4, rtol=0)


def language_logits(model: Any, embeds: Tensor, kept: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        if "visual_pos_masks" in kept:
            return model.lm_head(model.model.language_model(inputs_embeds=embeds, **kept).last_hidden_state)
        given: Tensor = model(inputs_embeds=embeds, **kept).logits
    return given


def mrope_by_hand(model: Any, inputs: Any, dense_inputs: Any, was_image: Tensor, labels: list[list[int]]) -> Tensor:
    """Positions (3, B, L): of text as in the dense prompt, of a group the rounded mean of its members'."""
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    dense, _ = model.model.get_rope_index(**{name: dense_inputs[name] for name in names})
    found = torch.zeros(3, *inputs["input_ids"].shape, dtype=torch.long)
    rest = iter(labels)
    for row in range(len(was_image)):
        columns: list[Tensor] = []
        there, done = dense_inputs["attention_mask"][row].bool(), 0
        of_row, images = dense[:, row, there].double(), was_image[row][there]
        while done < len(images):
            groups = torch.tensor(next(rest) if images[done] else [0])
            members = of_row[:, done : done + len(groups)]
            found_here = range(int(groups.max()) + 1)
            columns += [torch.floor(members[:, groups == group].mean(1) + 0.5) for group in found_here]
            done += len(groups)
        found[:, row, inputs["attention_mask"][row].bool()] = torch.stack(columns, dim=1).long()
    return found


def deepstack_by_hand(model: Any, dense_inputs: Any, is_image: Tensor, labels: list[list[int]]) -> dict[str, Any]:
    """What Qwen3-VL's language model gains in its first layers: means over the same groups."""
    with torch.no_grad():
        outputs = model.model.get_image_features(dense_inputs["pixel_values"], dense_inputs["image_grid_thw"])
    deeper = getattr(outputs, "deepstack_features", None)
    if deeper is None:
        return {}
    embeds = []
    for layer in deeper:
        means = [
            torch.stack([tokens[torch.tensor(groups) == group].mean(0) for group in range(max(groups) + 1)])
            for tokens, groups in zip(layer, labels, strict=True)
        ]
        embeds.append(torch.cat(means))
    return {"visual_pos_masks": is_image, "deepstack_visual_embeds": embeds}


@every_vlm
def test_keep_rate_1_is_the_dense_model_and_removal_is_exact(vlm: VLM) -> None:
    model, processor = vlm.model(), vlm.processor()
    inputs = vlm.inputs(processor, [[image(1)], [image(2), image(3)]])
    dense, keys = logits(model, inputs), list(model.state_dict())
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    classes = [type(module) for module in model.modules()]

    agglo.apply(model, keep_rate=1.0, output="merged")
    torch.testing.assert_close(logits(model, inputs), dense, atol=1e-5, rtol=0)
    agglo.apply(model, keep_rate=1.0, output="merged_late")
    same = vlm.inputs(agglo.adapt_processor(processor, model), [[image(1)], [image(2), image(3)]])
    assert torch.equal(same["input_ids"], inputs["input_ids"])
    assert torch.equal(logits(model, inputs), dense)
    assert agglo.image_tokens(model, vlm.dense) == vlm.dense

    agglo.apply(model, keep_rate=0.7, output="merged")
    agglo.apply(model, keep_rate=KEEP_RATE, output="merged_late")
    assert list(model.state_dict()) == keys
    agglo.remove(model)
    assert [type(module) for module in model.modules()] == classes
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }
    assert torch.equal(logits(model, inputs), dense)


@pytest.mark.parametrize("vlm", [VLMS[index] for index in (0, 3, 5, -3, -1)], ids=lambda vlm: vlm.name)
def test_generate_works_unchanged(vlm: VLM) -> None:
    """Alone and in a batch, with and without cache, and with beams."""
    model, processor = applied(vlm)
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    images = without_images(vlm)
    together = model.generate(**vlm.inputs(processor, images), **settings)
    batch = torch.stack(together.logits)
    for row, each in enumerate(images):
        if not each and vlm.name in ("idefics3", "smolvlm"):
            continue  # their processors take a prompt without an image in a batch only
        inputs = vlm.inputs(processor, [each])
        alone = model.generate(**inputs, **settings)
        torch.testing.assert_close(torch.stack(alone.logits)[:, 0], batch[:, row], atol=2e-4, rtol=0)
        assert alone.past_key_values.get_seq_length() == inputs["input_ids"].shape[1] + 3
        slow = model.generate(**inputs, **settings, use_cache=False)
        torch.testing.assert_close(torch.stack(slow.logits), torch.stack(alone.logits), atol=2e-4, rtol=0)
    inputs = vlm.inputs(processor, [each for each in images if each])
    beams = model.generate(**inputs, max_new_tokens=2, num_beams=2, do_sample=False)
    assert beams.shape == (2, inputs["input_ids"].shape[1] + 2)


@every_vlm
def test_a_prompt_of_the_dense_model_is_told_what_helps(vlm: VLM) -> None:
    model, processor = vlm.model(), vlm.processor()
    agglo.apply(model, keep_rate=KEEP_RATE, output="merged_late")
    with pytest.raises(ValueError, match="adapt_processor"):
        logits(model, vlm.inputs(processor, [[image(1)]]))


@pytest.mark.parametrize("vlm", [VLMS[0], VLMS[-1]], ids=lambda vlm: vlm.name)
def test_random_dropping_hands_on_some_of_the_tokens_as_they_are(vlm: VLM) -> None:
    model, processor = applied(vlm, method="random", seed=3)
    inputs = vlm.inputs(processor, [[image(1), image(2)]])
    n_kept = int(KEEP_RATE * vlm.dense)
    with agglo.trace(model) as trace:
        kept = [each for part in features(model, inputs) for each in part.reshape(-1, n_kept, 32)]
    assert trace.groupings[0].n_groups == n_kept
    agglo.remove(model)
    given = [each for part in features(model, inputs) for each in part.reshape(-1, vlm.dense, 32)]
    assert len(kept) == len(given) >= 2
    for some, every in zip(kept, given, strict=True):
        places = [int((every == token).all(1).nonzero()[0]) for token in some]
        assert places == sorted(set(places))


@pytest.mark.parametrize("vlm", [VLMS[0], VLMS[-1]], ids=lambda vlm: vlm.name)
def test_copies_and_pickles_are_reduced_too(vlm: VLM) -> None:
    model, processor = applied(vlm)
    others = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    inputs, dense_inputs = (vlm.inputs(each, [[image(1)]]) for each in (processor, vlm.processor()))
    expected = logits(model, inputs)
    dense = logits(vlm.model(), dense_inputs)
    for other in others:
        assert torch.equal(logits(other, inputs), expected)
        assert torch.equal(logits(agglo.remove(other), dense_inputs), dense)
    assert torch.equal(logits(model, inputs), expected)


def test_gradients_reach_the_tower() -> None:
    model, processor = applied(VLMS[-1])
    model(**VLMS[-1].inputs(processor, [[image(1)]])).logits.sum().backward()
    tower = [parameter for name, parameter in model.named_parameters() if "vis" in name and parameter.grad is not None]
    assert any(parameter.grad.abs().sum() > 0 for parameter in tower)
