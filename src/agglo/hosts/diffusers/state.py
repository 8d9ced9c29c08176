"""What `apply` puts into a diffusion model, and the state of one pass and of one generation.

State belongs to the thread that runs the model, never to the model: `threading.local` and not `contextvars`, since
torch.compile follows assignments to the former. The call of a whole model opens a pass, which its blocks and attentions
read. Only within a generation do groupings outlive a pass (`every=`, `drift=`), so none is used for another image.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from agglo.compiling import outside_graphs
from agglo.config import ReductionConfig
from agglo.grouping import Grouping, Mean
from agglo.hosts.common.swap import Setting
from agglo.methods import Grid, Method, Outcome, View
from agglo.methods.tome import fresh_generators
from agglo.tracing import Step, Trace

if TYPE_CHECKING:
    from agglo.hosts.diffusers.architectures import Architecture

# Tokens per side of the windows in which ATC clusters by default. All 64 x 64 tokens at once take many times as long,
# which eats what attention saves (docs/synthesis.md).
WINDOW = 16
Axes = tuple[int, ...]  # (rows, columns) or (frames, rows, columns)


@dataclass(frozen=True)
class Site(Setting):
    """One self-attention of a model; sites are numbered in the order in which the model names its modules."""

    index: int
    name: str  # of the block
    downsample: int  # how many times fewer rows and columns than the finest tokens the model could have
    width: int  # channels of a token
    inner: int  # channels of all heads together


@dataclass(frozen=True)
class DiffusionPlan(Setting):
    """What `agglo.apply` decided about a denoiser; a forward pass reads it once, at its beginning."""

    config: ReductionConfig
    method: Method
    keep_rate: float
    sites: frozenset[int]  # indices of the self-attentions that are reduced
    proportional: bool
    mean: Mean  # how the tokens of a group become one
    architecture: Architecture

    @property
    def projection(self) -> str | None:
        """The layer of an attention that makes what tokens are compared by; None where that is no projection."""
        features = getattr(self.method, "features", None)
        return {"keys": "to_k", "keys_per_head": "to_k", "values": "to_v"}.get(str(features))

    @property
    def reuses_keys(self) -> bool:
        """Whether the keys of merged tokens are the means of the keys that were compared: both steps are linear."""
        return self.projection == "to_k" and self.mean == "plain" and "attn" in self.config.merge

    def window(self, n_tokens: int, grid: Grid | None) -> int | None:
        """Return the side of the windows that tokens are clustered in by default; None where they fit into one.

        Also None where the grid is not known, and where there are more windows than groups.
        """
        if grid is None or max(grid) <= WINDOW:
            return None
        n_windows = math.prod(-(-length // WINDOW) for length in grid)
        return WINDOW if n_windows <= self.target(n_tokens, grid) else None

    def target(self, n_tokens: int, grid: Grid | None) -> int:
        """Return the number of groups of n_tokens tokens; ValueError if the method cannot reach it."""
        asked = asked_for(n_tokens, self.keep_rate)
        return n_tokens if asked == n_tokens else self.method.stages(n_tokens, [asked], grid)[0]


def asked_for(n_tokens: int, keep_rate: float) -> int:
    """Return the number of groups to keep: as in the paper and tomesd, int(N * (1 - keep_rate)) tokens are removed.

    >>> asked_for(4096, 0.9), asked_for(10, 0.9), asked_for(5, 0.5)
    (3687, 9, 3)
    """
    return max(1, math.ceil(n_tokens * keep_rate - 1e-9))  # 10 * 0.9 is 9, whatever binary fractions make of it


@dataclass(frozen=True)
class AttentionStep(Step):
    """A step of a trace: the self-attention, and the grid (rows, columns) of its tokens, where it is known."""

    site: Site
    grid: Grid | None


@dataclass
class CurrentBlock:
    """The block that a pass is in."""

    site: Site
    tokens: Tensor  # the image tokens (B, N, C) that entered it
    axes: Axes | None  # their grid
    text: int = 0  # text tokens in front of them, where an attention sees both in one sequence
    grouping: Grouping | None = None  # None until decided, and where no tokens merge
    decided: bool = False
    keys: tuple[Any, Tensor] | None = None  # the layer that made them, and those of all tokens, to be merged

    @property
    def grid(self) -> Grid | None:
        """(rows, columns); the frames of a video one below the other."""
        return None if self.axes is None else (math.prod(self.axes[:-1]), self.axes[-1])


@dataclass
class DenoiserPass:
    """One call of a denoiser."""

    model: Any
    plan: DiffusionPlan
    traces: tuple[Trace, ...]
    given: dict[str, Any]  # the arguments of the call
    axes: Axes | None  # as `Architecture.axes` gives them
    history: History | None  # None unless groupings outlive a pass
    block: CurrentBlock | None = None
    shared: dict[int, Grouping] = field(default_factory=dict)  # by downsampling
    steps: list[Step] = field(default_factory=list)


class Kept(NamedTuple):
    """A grouping, the step at which it was made, and the features it was made of where their drift matters."""

    grouping: Grouping
    step: int
    features: Tensor | None


@dataclass
class History:
    """The calls of one model, which this keeps alive, in one generation.

    A step is the calls with one timestep: some pipelines run prompted and unprompted images one after the other. Such
    calls keep separate groupings, by their number within the step.
    """

    model: Any
    plan: DiffusionPlan
    step: int = -1
    call: int = 0
    timestep: float | None = None
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)


class _Thread(threading.local):
    """The pass that this thread is in, and what its generation keeps, by the id of the model."""

    def __init__(self) -> None:
        # Attributes of each thread from the start: torch.compile guards on whether they exist.
        self.current: DenoiserPass | None = None
        self.histories: dict[int, History] | None = None


THREAD = _Thread()


@contextmanager
def generation() -> Iterator[None]:
    """Open a generation around a denoising loop: what `every=`, `drift=` and a random `tomesd` keep lives as long.

    Pipelines given to `agglo.apply` open one by themselves at every call.

    >>> from agglo.embedded import generator
    >>> model = agglo.apply(generator.trained(), keep_rate=0.5, every=2)
    >>> latents, label = torch.rand(1, 1, 32, 32), torch.tensor([3])
    >>> with agglo.hosts.diffusers.generation():
    ...     for step in (900, 800, 700):
    ...         noise = model(latents, torch.tensor([step]), label).sample
    """
    before, THREAD.histories = THREAD.histories, {}
    try:
        with fresh_generators():
            yield
    finally:
        THREAD.histories = before


@outside_graphs
def history_of(model: Any, plan: DiffusionPlan, timestep: Any) -> History:
    """Return what this generation keeps for the model, which is called once more; a new one after another `apply`."""
    if THREAD.histories is None:
        raise RuntimeError(
            "every= and drift= keep groupings for later steps of one generation: give agglo.apply the whole pipeline, "
            "or put your own loop inside `with agglo.hosts.diffusers.generation():`"
        )
    if timestep is None:
        raise ValueError("every= and drift= count denoising steps: call the model with its timestep")
    history = THREAD.histories.get(id(model))
    if history is None or history.plan is not plan:
        history = THREAD.histories[id(model)] = History(model, plan)
    now = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
    if now == history.timestep:
        history.call += 1
    else:
        history.step, history.call, history.timestep = history.step + 1, 0, now
    return history


def grouping_at(now: DenoiserPass, at: CurrentBlock, attention: Any, seen: Tensor) -> Grouping | None:
    """Return the grouping of image tokens (B, N, C) as attention sees them, decided once per block, if any merge."""
    if not at.decided:
        at.grouping, at.decided = _decide(now, at, attention, seen), True
    return at.grouping


def _decide(now: DenoiserPass, at: CurrentBlock, attention: Any, seen: Tensor) -> Grouping | None:
    plan, n_tokens = now.plan, int(seen.shape[1])
    target = plan.target(n_tokens, at.grid)
    if target == n_tokens:
        return None
    shared = plan.config.share == "resolution"
    grouping = now.shared.get(at.site.downsample) if shared else None
    if grouping is None and now.history is not None:
        grouping = _kept_or_new(now.history, at, attention, seen, target)
    elif grouping is None:
        with torch.no_grad():
            grouping = plan.method.reduce(_view(plan, at, attention, seen, target)).grouping
    if shared:
        now.shared[at.site.downsample] = grouping
    if now.traces:
        now.steps.append(AttentionStep(at.site.index, Outcome(grouping), grouping, at.site, at.grid))
    return grouping


@outside_graphs
def _kept_or_new(history: History, at: CurrentBlock, attention: Any, seen: Tensor, target: int) -> Grouping:
    """Return an earlier grouping of this generation, while it is recent enough and its features have not drifted.

    Outside of compiled code, which would be compiled anew at every step.
    """
    config, method = history.plan.config, history.plan.method
    key = (at.site.downsample if config.share == "resolution" else at.site.index, history.call)
    kept = history.kept.get(key)
    is_old = kept is not None and config.every > 1 and history.step - kept.step >= config.every
    if is_old or (kept is not None and kept.grouping.labels.shape != seen.shape[:2]):
        kept = None
    if kept is not None and config.drift is None:
        return kept.grouping
    view = _view(history.plan, at, attention, seen, target)
    features = None if config.drift is None else view.features(getattr(method, "features", "tokens"))
    if kept is not None and config.drift is not None and drift(kept.features, features) <= config.drift:
        return kept.grouping
    with torch.no_grad():
        grouping = method.reduce(view).grouping
    history.kept[key] = Kept(grouping, history.step, features)
    return grouping


def drift(before: Any, now: Any) -> float:
    """Return the relative change of features (B, N, D) in the image that changed most."""
    moved = (now.float() - before.float()).flatten(1).norm(dim=1)
    return float((moved / before.float().flatten(1).norm(dim=1).clamp(min=1e-12)).max())


@torch.no_grad()
def _view(plan: DiffusionPlan, at: CurrentBlock, attention: Any, seen: Tensor, target: int) -> View:
    which = plan.projection
    made = None if which is None else _projected(attention, seen, which, at if plan.reuses_keys else None)
    keys, values = made if which == "to_k" else None, made if which == "to_v" else None
    window = plan.window(int(seen.shape[1]), at.grid)
    return View(at.tokens, keys, values, target=target, grid=at.grid, training=attention.training, window=window)


def _projected(attention: Any, tokens: Tensor, which: str, keeper: CurrentBlock | None) -> Tensor:
    """Return keys ("to_k") or values ("to_v") (B, H, N, d) of tokens (B, N, C), keys normalised but not rotated.

    keeper: the block that keeps them as they come from the layer.
    """
    if getattr(attention, "fused_projections", False) and hasattr(attention, "to_qkv"):
        result = attention.to_qkv(tokens).chunk(3, dim=-1)["qkv".index(which[-1])]
    else:
        layer = getattr(attention, which)
        result = layer(tokens)
        if keeper is not None:
            keeper.keys = layer, result
    norm = getattr(attention, "norm_k", None) if which == "to_k" else None
    if norm is not None:
        shape = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
        if isinstance(shape, tuple) and int(shape[-1]) == result.shape[-1]:  # over all heads together
            result, norm = norm(result), None
    per_head: Tensor = result.unflatten(-1, (-1, attention.inner_dim // attention.heads))
    return (per_head if norm is None else norm(per_head)).transpose(1, 2)
