"""Images of different sizes in one tensor: each is reduced as it is alone; windows that attend further see all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from agglo.hosts.common.sequences import block_boundaries, packed, padded, real_tokens
from tests.support.families import TRANSFORMERS, Family, random

pytest.importorskip("transformers")


def family(cls: str) -> Family:
    return next(each for each in TRANSFORMERS if each.cls.startswith(cls))


def test_sequences_of_one_length_go_together() -> None:
    groups = packed(torch.tensor([0, 3, 5, 8, 9]))
    assert [group.members.tolist() for group in groups] == [[3], [1], [0, 2]]
    assert groups[2].index.tolist() == [[0, 1, 2], [5, 6, 7]]
    shaped = packed(torch.tensor([0, 3, 6]), torch.tensor([[0, 2], [2, 0]]))
    assert [group.members.tolist() for group in shaped] == [[0], [1]], "equal lengths, other shapes"


def test_what_masks_say() -> None:
    real = torch.tensor([[True, True, False], [True, True, True]])
    assert torch.equal(real_tokens("mask", real[:, None, None].expand(-1, -1, 3, -1)), real)
    additive = torch.where(real, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    assert torch.equal(real_tokens("mask", additive), real)
    assert [group.index.tolist() for group in padded(real)] == [[[0, 1]], [[3, 4, 5]]]
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()[None, None]
    assert block_boundaries("mask", blocks).tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(torch.ones(1, 1, 3, 3).tril().bool(), id="causal"),
        pytest.param(torch.tensor([0.0, 0.5, 0.0]).expand(1, 1, 3, 3), id="weighs keys"),
        pytest.param(torch.ones(3, 3).bool(), id="two dimensions"),
        pytest.param(torch.ones(1, 2, 3, 3).bool(), id="two heads"),
    ],
)
@pytest.mark.parametrize("read", [real_tokens, block_boundaries])
def test_masks_that_say_more_are_refused(mask: Tensor, read: Callable[[str, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match="mask does not go with token reduction"):
        read("mask", mask)


GRIDS = [(4, 6), (4, 4), (6, 4), (4, 6)]


@pytest.mark.parametrize("cls", ["Qwen2Vision", "Qwen3VLVision", "Qwen2_5"])
@torch.no_grad()
def test_a_packed_image_is_reduced_as_it_is_alone(cls: str) -> None:
    model = family(cls).fresh()
    images = [random(rows * columns, 96) * (1 + number / 4) for number, (rows, columns) in enumerate(GRIDS)]
    agglo.apply(model, keep_rate=0.5)

    def run(some: list[int]) -> Any:
        grids = torch.tensor([[1, *GRIDS[number]] for number in some])
        output = model(torch.cat([images[number] for number in some]), grid_thw=grids)
        return output.last_hidden_state, output.pooler_output

    together = run([0, 1, 2, 3])
    sizes = [len(image) for image in images]
    for kind, tokens in enumerate(together):
        pieces = tokens.split([size // (4 if kind else 1) for size in sizes])
        for number, piece in enumerate(pieces):
            torch.testing.assert_close(piece, run([number])[kind], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("cls", "method"), [("Qwen2Vision", "atc"), ("Qwen2_5", "tome")])
@torch.no_grad()
def test_no_image_and_no_window_is_too_small(cls: str, method: str) -> None:
    model = agglo.apply(family(cls).fresh(), method, keep_rate=0.5)
    grids = [(18, 18), (2, 2), (10, 10), (18, 26), (2, 14)]  # windows of Qwen2.5-VL are 8 x 8
    with agglo.trace(model, passes=20) as trace:
        output = model(
            random(sum(rows * columns for rows, columns in grids), 96),
            grid_thw=torch.tensor([[1, *grid] for grid in grids]),
        )
    assert output.last_hidden_state.isfinite().all()
    assert min(step.total.n_groups for steps in trace.passes for step in steps) == 1, "of 2 x 2 patches"


@pytest.mark.parametrize("method", ["atc", "tome"])
@torch.no_grad()
def test_images_of_a_padded_batch_are_reduced_as_they_are_alone(method: str) -> None:
    model = agglo.apply(family("Siglip2").fresh(), method, keep_rate=0.5)
    shapes = torch.tensor([[4, 4], [1, 1], [1, 3], [7, 1]])
    patches, mask = random(4, 16, 192), torch.arange(16) < shapes.prod(dim=1, keepdim=True)
    both = model(patches.where(mask[..., None], 99.0), pixel_attention_mask=mask.long(), spatial_shapes=shapes)
    for image, real in enumerate(mask):
        alone = model(
            patches[image : image + 1, real],
            pixel_attention_mask=mask[image : image + 1, real].long(),
            spatial_shapes=shapes[image : image + 1],
        )
        torch.testing.assert_close(both.last_hidden_state[image, real], alone.last_hidden_state[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(both.pooler_output[image], alone.pooler_output[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_layer_beyond_windows_attends_to_the_merged_tokens_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over all tokens of the image, weighed by their sizes, written out."""
    from agglo.hosts.common import forward_pass

    model = agglo.apply(family("Qwen2_5").fresh(), "tome", keep_rate=0.5, blocks=(1,))
    attend, tokens = forward_pass.attend, dict[int, list[Any]]()

    def spying(parts: Any, block: Any, x: Tensor, inputs: Any, *rest: Any) -> Any:
        result = attend(parts, block, x, inputs, *rest)
        own = parts.project(block, x, inputs.rotary)
        tokens.setdefault(id(block), []).append((own, x, inputs.sizes, result[0]))
        return result

    monkeypatch.setattr(forward_pass, "attend", spying)
    model(random(120, 96), grid_thw=torch.tensor([[1, 10, 12]]))
    last = tokens[id(model.blocks[3])]
    assert len(last) > 1, "windows of several sizes"
    k, v = (torch.cat([getattr(own, name).transpose(0, 1).flatten(1, 2) for own, *_ in last], dim=1) for name in "kv")
    sizes = torch.cat([size.flatten() for _, _, size, _ in last])
    assert sizes.max() > 1
    for own, x, _, joined in last:
        logits = own.q @ k.transpose(-2, -1) * own.scale + sizes.log()
        attended = logits.softmax(dim=-1) @ v
        wanted = x + model.blocks[3].attn.proj(attended.transpose(1, 2).flatten(2))
        torch.testing.assert_close(joined, wanted, rtol=0, atol=1e-5)
