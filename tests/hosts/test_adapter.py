"""Reduction inside a ViT-Adapter: pauses for injectors and extractors, every method, dense maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import agglo
from agglo.grouping import Grouping
from agglo.hosts import UnsupportedModelError
from agglo.hosts.common.blocks import Parts, Projected
from agglo.hosts.common.forward_pass import ForwardPass
from agglo.hosts.common.swap import PassSetup
from agglo.methods.registry import find
from agglo.plan import Plan
from agglo.testing import HostContract
from tests.support.adapters import WIDTH, rotary_vit, small_adapter, small_vit


def images_of(batch: int = 2, height: int = 64, width: int = 64, seed: int = 3) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


class TestAdapterInADetectorWithClassToken(HostContract):
    """Found inside of another module; a class token and registers go along."""

    threshold = 0.1

    def model(self) -> nn.Module:
        return nn.Sequential(small_adapter(small_vit(reg_tokens=1, init_values=0.5), class_token=True))


def slowly(adapter: Any, images: Tensor, keep_rate: float, linkage: str) -> list[Tensor]:
    """6.2 of the facts from public clustering and the modules: maps of every reduction in lists, unmerged through all
    of them in reverse, injected, merged forward with sizes rebuilt from ones."""
    state = adapter.begin(images)
    x = state.embedded.tokens
    batch, n_all, c = x.shape
    maps: list[Tensor] = []  # labels of each reduction
    size = torch.ones(batch, n_all)

    def merged(x: Tensor, size: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        k = int(labels.max()) + 1
        one_hot = torch.nn.functional.one_hot(labels, k).float().transpose(1, 2)  # (B, k, N)
        total = one_hot @ size.unsqueeze(-1)
        return (one_hot @ (x * size.unsqueeze(-1))) / total, total.squeeze(-1)

    def unmerged(x: Tensor) -> Tensor:
        for labels in reversed(maps):
            x = torch.stack([x[image, labels[image]] for image in range(batch)])
        return x

    for index, block in enumerate(adapter.vit.blocks):
        if index % 2 == 0:
            full = unmerged(x)
            x = full + state.inject(index // 2, full)
            ones = torch.ones(batch, n_all)
            for labels in maps:
                x, ones = merged(x, ones, labels)
        heads = block.attn.num_heads
        q, k, v = block.attn.qkv(block.norm1(x)).view(batch, -1, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-2, -1) * (c // heads) ** -0.5 + size.log()[:, None, None, :]
        x = x + block.attn.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        if index in (2, 4, 6):
            labels = agglo.cluster(k.mean(dim=1), int(keep_rate * x.shape[1]), linkage)
            x, size = merged(x, size, labels)
            maps.append(labels)
        x = x + block.mlp(block.norm2(x))
        if index % 2 == 1:
            state.extract(index // 2, unmerged(x))
    found: list[Tensor] = state.maps(unmerged(x))
    return found


@pytest.mark.parametrize(("linkage", "keep_rate"), [("average", 0.25), ("single", 0.7)])
@torch.no_grad()
def test_atc_is_what_the_paper_describes(linkage: str, keep_rate: float) -> None:
    adapter = small_adapter()
    images = images_of(2, 64, 96)
    expected = slowly(adapter, images, keep_rate, linkage)
    agglo.apply(adapter, keep_rate=keep_rate, linkage=linkage)
    for found, wanted in zip(adapter(images), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def counts(adapter: nn.Module, tokens: int | None = None) -> list[int]:
    report: Any = agglo.report(adapter, n_tokens=tokens)
    return report.counts


def test_counts_are_of_the_tokens_that_are_left() -> None:
    """int(r T) at every stage: of 196 at 70 % 137, 95, 66 and not 137, 96, 67."""
    adapter = small_adapter(small_vit(img_size=112), nominal_size=(112, 112))
    agglo.apply(adapter, keep_rate=0.7)
    assert counts(adapter) == [196, 196, 137, 137, 95, 95, 66, 66]
    with agglo.trace(adapter) as trace, torch.no_grad():
        adapter(images_of(1, 112, 112))
    assert [g.n_groups for g in trace.groupings.values()] == [137, 95, 66]
    agglo.apply(adapter, schedule="stages:0.7")  # a schedule is taken as it is written
    assert counts(adapter) == [196, 196, 137, 137, 96, 96, 67, 67]


@torch.no_grad()
def test_nominal_size_and_gflops() -> None:
    """Counted by torch for the dense model, but for the samples of deformable attention, which it does not count."""
    adapter = small_adapter(nominal_size=(64, 96))
    with FlopCounterMode(display=False) as counter:
        adapter(images_of(1, 64, 96))
    agglo.apply(adapter, keep_rate=0.5)
    report: Any = agglo.report(adapter)
    assert report.n_tokens == 96
    # levels x points x channels x (4 corners and a weight), of 4 injectors and 6 extractors
    samples = 96 * (4 * 3 * 4 * WIDTH * 5 + 6 * 5.25 * 4 * WIDTH * 5)
    assert report.gflops_before * 1e9 == pytest.approx(counter.get_total_flops() / 2 + samples, abs=2 * 96)
    assert report.gflops_after < report.gflops_before
    assert counts(adapter, 24)[-1] == 3


def beginning(method: Any, x: Tensor, prefix: int, **plan: Any) -> tuple[ForwardPass, Callable[[int], Tensor]]:
    """A pass, and what runs one of its blocks, whose attention and MLP add nothing: every patch after it."""

    class Nothing(Parts):
        def whole(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Tensor:
            return x

        def project(self, block: nn.Module, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
            heads = x.unsqueeze(1)
            return Projected(heads, heads, heads)

        def join(self, block: nn.Module, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
            return x

        def feed(self, block: nn.Module, x: Tensor) -> Tensor:
            return x

    run = ForwardPass(PassSetup(Plan(**plan), method), x, depth=4, prefix=prefix, training=False)

    def block(index: int) -> Tensor:
        run.block(index, nn.Identity(), Nothing())
        return run.patches()

    return run, block


@pytest.mark.parametrize("prefix", [0, 2])
def test_a_group_gains_the_weighted_mean_of_its_members(prefix: int) -> None:
    torch.manual_seed(0)
    x, gain = torch.randn(2, prefix + 12, 5), torch.randn(2, 12, 5)
    atc = agglo.methods.create("atc")
    run, block = beginning(atc, x, prefix, schedule=agglo.Counts((7, 3), blocks=(0, 1)))
    before = [block(0), block(1)][1]
    run.add(torch.nn.functional.pad(gain, (0, 0, prefix, 0)))
    after = [block(2), block(3)][1]
    assert run.total is not None
    labels = run.total.labels[:, prefix:]
    assert labels.unique().numel() == 3
    for image in range(2):
        for group in labels[image].unique():
            members = labels[image] == group
            assert (before[image][members] == before[image][members][0]).all()
            torch.testing.assert_close(
                after[image][members] - before[image][members], gain[image][members].mean(0).expand(members.sum(), 5)
            )
    assert torch.equal(run.full()[:, :prefix], x[:, :prefix])


def test_what_was_dropped_keeps_its_value_and_gains_its_own() -> None:
    torch.manual_seed(0)
    x, first, second = torch.randn(2, 12, 5), torch.randn(2, 12, 5), torch.randn(2, 12, 5)
    drops = agglo.methods.create("random", seed=1)
    run, block = beginning(drops, x, 0, schedule=agglo.Counts((7, 3), blocks=(0, 2)), proportional=False)
    torch.testing.assert_close(block(0), x)
    run.add(first)
    assert block(1).shape == x.shape
    torch.testing.assert_close(block(2), x + first)
    assert run.x.shape[1] == 3
    run.add(second)
    torch.testing.assert_close(block(3), x + first + second)


def test_members_that_were_dropped_together_gain_apart() -> None:
    """A group that is dropped has one value for its members until they gain something."""
    x, gain = torch.randn(1, 4, 5), torch.randn(1, 4, 5)

    class FirstPairs(agglo.Method):
        name = "first_pairs"

        def reduce(self, view: agglo.methods.View) -> agglo.methods.Outcome:
            if view.stage == 0:
                return agglo.methods.Outcome(Grouping.of(torch.tensor([[0, 0, 1, 1]]), 2))
            return agglo.methods.Outcome(Grouping.select(torch.tensor([[1]]), 2, weights=view.sizes))

    run, block = beginning(FirstPairs(), x, 0, schedule=agglo.Counts((2, 1), blocks=(0, 1)))
    means = [block(0), block(1)][1]
    torch.testing.assert_close(means, x.view(1, 2, 2, 5).mean(dim=2, keepdim=True).expand(1, 2, 2, 5).reshape(1, 4, 5))
    run.add(gain)
    expected = means + gain
    expected[:, 2:] = means[:, 2:] + gain[:, 2:].mean(dim=1, keepdim=True)
    torch.testing.assert_close(block(2), expected)


EVERY = [
    "atc", "atc:sizes=ignored", "tome", "kmedoids", "dpc_knn", "evit", "topk", "ats", "dynamicvit", "dynamicvit_prsv",
    "evovit", "evovit:per_block=true", "svit", "random", "pool", "l1", "l2", "linf", "sit", "patch_merger", "sinkhorn",
    "pitome", "tofu", "mctf", "mutual", "diffrate", "diffrate_learned", "dct", "dtem",
]  # fmt: skip
ASK_THE_CLASS_TOKEN = ("evit", "topk", "ats", "evovit", "evovit:per_block=true", "diffrate", "diffrate_learned")


def test_no_method_is_forgotten() -> None:
    # Other tests may have registered methods of their own.
    ours = {info.name for info in agglo.list_methods() if find(info.name).__module__.startswith("agglo.methods.")}
    assert {text.partition(":")[0] for text in EVERY} == ours


@pytest.mark.parametrize("text", EVERY)
def test_every_method_forward_backward_and_at_other_sizes(text: str) -> None:
    adapter = small_adapter(nominal_size=(64, 64)).train()
    if asks := text in ASK_THE_CLASS_TOKEN:
        with pytest.raises(ValueError, match="class_token=True"):
            agglo.apply(adapter, text, keep_rate=0.5)
        adapter = small_adapter(class_token=True).train()
    torch.manual_seed(0)
    agglo.apply(adapter, text, keep_rate=0.5)
    with agglo.trace(adapter) as trace:
        maps = adapter(images_of())
    assert [tuple(m.shape) for m in maps] == [(2, WIDTH, side, side) for side in (32, 16, 8, 4)]
    loss = sum(m.pow(2).mean() for m in maps) + (0 if trace.loss is None else trace.loss)
    loss.backward()  # type: ignore[union-attr]
    assert trace.steps and all(m.isfinite().all() for m in maps)
    gradients = {name: p.grad for name, p in adapter.named_parameters()}
    assert all(gradient.isfinite().all() for gradient in gradients.values() if gradient is not None)
    # Decisions at inference have no gradient; a class token speaks through attention.
    assert all(name.startswith("agglo_method") for name, gradient in gradients.items() if gradient is None)
    if text in ("sit", "patch_merger", "sinkhorn"):
        with pytest.raises(ValueError, match="its parameters fit one input size and schedule"):
            adapter(images_of(1, 48, 96))
    elif not asks:
        assert adapter.eval()(images_of(1, 48, 96))[2].shape == (1, WIDTH, 6, 12)


@torch.no_grad()
def test_rotary_models_are_reduced() -> None:
    adapter = small_adapter(rotary_vit(), class_token=True, deform_heads=3)
    images = images_of(1, 48, 80)
    dense = adapter(images)
    for found, expected in zip(agglo.apply(adapter, keep_rate=1.0)(images), dense, strict=True):
        torch.testing.assert_close(found, expected)
    agglo.apply(adapter, keep_rate=0.5)
    assert all(m.isfinite().all() for m in adapter(images))


def test_the_vit_inside_is_not_applied_to_in_vain() -> None:
    adapter = small_adapter()
    agglo.apply(adapter, tower="vit", keep_rate=0.5)
    with pytest.raises(UnsupportedModelError, match="apply to the adapter"):
        adapter(images_of())
    with pytest.raises(UnsupportedModelError, match=r"agglo\.remove that first"):
        agglo.apply(adapter, keep_rate=0.5)
    agglo.remove(adapter)
    assert adapter(images_of())[0].isfinite().all()
