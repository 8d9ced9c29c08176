"""report and trace: what is applied to a model, and what its passes merge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from agglo.checks import number
from agglo.config import ReductionConfig
from agglo.hosts import diffusers
from agglo.hosts.common.swap import Applied, UnsupportedModelError
from agglo.hosts.registry import applied_modules, applied_towers, find_tower
from agglo.hosts.vlm.reduction import VLMReduction, reduced_vlms, vlm_reduction_of
from agglo.methods.base import Varies, square
from agglo.tracing import Trace, listening


@dataclass(frozen=True)
class Report:
    """What is applied to a model.

    Attributes:
        config: What was asked for.
        method: The Python that makes it, and the same of schedule.
        n_tokens: Patch tokens of an image.
        prefix: Tokens in front that are never merged.
        counts: Patch tokens left after each block; None where a threshold makes them differ from image to image.
        gflops_before: Multiply-adds of one image, in 1e9; of a diffusion model those of self-attention.
        gflops_after: The same once reduced.
        varies: "no"; "at_most" where images may keep fewer than the counts; "about" where they may keep more or fewer.
        returning: Whether counts are of tokens that a block processes, while the others pass it by and are not lost.
        levels: Of a diffusion model, whose counts are of its self-attentions: tokens and groups at each resolution.
        image_tokens: Of an image in a language model's prompt, without reduction and with it; None where that is the
            same, or depends on the image's size.

    >>> import timm
    >>> found = agglo.report(agglo.apply(timm.create_model("deit_tiny_patch16_224"), keep_rate=0.5))
    >>> found.n_tokens, found.prefix, f"{found.gflops_before:.2f} -> {found.gflops_after:.2f} GFLOPs"
    (196, 1, '1.25 -> 0.62 GFLOPs')
    """

    config: ReductionConfig
    method: str
    schedule: str
    n_tokens: int = 0
    prefix: int = 0
    counts: list[int] | None = None
    gflops_before: float = 0.0
    gflops_after: float | None = None
    varies: Varies = "no"
    returning: bool = False
    levels: tuple[diffusers.Level, ...] = ()
    image_tokens: tuple[int, int] | None = None

    def __str__(self) -> str:
        leaving = "" if self.image_tokens is None else ", {} -> {} image tokens".format(*self.image_tokens)
        gflops = f"{self.gflops_before:.2f} -> {self.gflops_after or 0:.2f} GFLOPs"
        if self.gflops_after is None:
            differ = f"{self.n_tokens} patch tokens, counts differ from image to image"
            what = "the tower runs whole" if leaving else differ
        elif self.levels or self.counts is None:
            what = f"{'; '.join(map(str, self.levels))} tokens, self-attention {gflops}"
        else:
            bound = "" if self.varies == "no" else f"{self.varies} ".replace("_", " ")
            processed = " processed" if self.returning else ""
            what = f"{self.n_tokens} -> {bound}{self.counts[-1]} patch tokens{processed} {self.counts}, {gflops}"
        return f"{self.method}, {self.schedule}: {what}{leaving}"


def report(model: Any, n_tokens: int | None = None) -> Report | None:
    """Return what is applied to a model now; None if nothing is.

    Args:
        model: What `apply` was given, or a part of it.
        n_tokens: Patch tokens of an image, if not those of the model's own input size; of a diffusion model those of
            its finest resolution.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("deit_tiny_patch16_224"), schedule="linear:8")
    >>> agglo.report(model).counts[-1], agglo.report(model, n_tokens=400).counts[-1]
    (105, 309)
    """
    if diffusers.is_diffusion(model):
        denoisers = diffusers.applied(model)
        return Report(**diffusers.counted(denoisers[0], n_tokens), returning=True) if denoisers else None
    towers = applied_towers(model)
    reduction = next((vlm_reduction_of(module) for module in reduced_vlms(model)), None)
    if not towers and reduction is not None:
        return _late_reduction(model, reduction)
    if not towers:
        return None
    module, host = towers[0]
    applied: Applied | None = getattr(host.loop(module), "agglo_applied", None)
    if applied is None:  # removed meanwhile, by another thread
        return None
    layout, plan, method = host.layout(module), applied.plan, applied.method
    n_tokens = layout.patches if n_tokens is None else n_tokens
    grid = layout.grid if n_tokens == layout.patches or layout.grid is None else square(n_tokens)
    known = plan.schedule is not None
    counts = plan.counts(method, n_tokens, layout.depth, grid) if known else None
    n_front = plan.front(method, plan.targets(method, n_tokens, layout.depth, grid)[-1])
    return Report(
        config=applied.config,
        method=repr(method),
        schedule=repr(plan.schedule) if known else f"threshold {plan.threshold}",
        n_tokens=n_tokens,
        prefix=layout.prefix,
        counts=counts,
        gflops_before=layout.gflops([n_tokens] * layout.depth, n_tokens),
        gflops_after=None if counts is None else layout.gflops(counts, n_tokens, plan.place == "before_block", n_front),
        varies=method.varies,
        returning=method.tokens_return != "never",
        image_tokens=_image_tokens(reduction),
    )


def _image_tokens(reduction: VLMReduction | None) -> tuple[int, int] | None:
    return None if reduction is None or reduction.dense is None else (reduction.dense, reduction.count())


def _late_reduction(model: nn.Module, reduction: VLMReduction) -> Report:
    """Report on a model whose tower runs whole."""
    found = Report(
        reduction.config,
        method=repr(reduction.method) if reduction.shrink is None else "smaller image",
        schedule=repr(reduction.plan.schedule),
        image_tokens=_image_tokens(reduction),
    )
    try:
        module, host = find_tower(model)
        layout = host.layout(module)
    except (UnsupportedModelError, ValueError):  # the tower need be none that agglo knows
        return found
    left = layout.patches if reduction.shrink is None else reduction.count() * reduction.patches_per_token
    return replace(
        found,
        n_tokens=layout.patches,
        prefix=layout.prefix,
        counts=[left] * layout.depth,
        gflops_before=layout.gflops([layout.patches] * layout.depth, layout.patches),
        gflops_after=layout.gflops([left] * layout.depth, left),
    )


@contextmanager
def trace(model: Any, passes: int = 1) -> Iterator[Trace]:
    """Record what is merged where while the model runs in this thread (or asyncio task).

    Passes of other threads are not recorded, even of those started inside the `with`; DataParallel on several devices
    runs in such threads. Tensors are detached, except the losses and masks of the latest pass.

    Args:
        model: A reduced model.
        passes: How many forward passes to keep, the latest ones.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), keep_rate=0.5, blocks=(2,))
    >>> with agglo.trace(model) as trace:
    ...     _ = model(torch.rand(1, 3, 160, 160))
    >>> trace.groupings[2].labels.shape  # after block 2, the group of every token of every image
    torch.Size([1, 101])
    """
    number("passes", passes, whole=True, minimum=1)
    applied = diffusers.applied(model) if diffusers.is_diffusion(model) else applied_modules(model)
    if not applied:
        raise ValueError(f"nothing is applied to this {type(model).__name__}: call agglo.apply(model, ...) first")
    record = Trace(limit=passes)
    with listening(record, applied):
        yield record
