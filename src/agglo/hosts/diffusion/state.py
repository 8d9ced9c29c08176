"""What one forward pass, and one generation, knows. It belongs to the thread that runs them, never to the model.

A pass is opened by the call of the whole model and read by the blocks and attentions inside: what they would have to
hand each other as arguments, were the code between them ours. `threading.local` and not `contextvars`, since
torch.compile follows assignments to the former.

A generation is opened by the call of a pipeline, or by `agglo.generation()` around a loop of one's own. Only within one
do groupings outlive a pass (`every=`, `drift=`): so none is ever used for another picture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods import Grid
from agglo.tracing import Step, Trace

if TYPE_CHECKING:
    from agglo.hosts.diffusion.family import Family
    from agglo.hosts.diffusion.plan import Plan
    from agglo.methods import Method


@dataclass(frozen=True)
class Site:
    """One self-attention of a model.

    index: its number, in the order in which the model names its modules.
    name: of the block, in the model.
    downsample: how many times fewer rows and columns its tokens have than the finest ones the model could have.
    width, inner, heads: channels of a token, channels of all heads together, heads.
    """

    index: int
    name: str
    downsample: int
    width: int
    inner: int
    heads: int


@dataclass(frozen=True)
class AttentionStep(Step):
    """A step of a trace: which self-attention, and the grid (rows, columns) of its tokens, where it is known."""

    site: Site
    grid: Grid | None


@dataclass
class AtBlock:
    """Where a pass is: inside a block.

    tokens: (B, N, C), the image tokens that entered it. axes: their grid, (rows, columns) or (frames, rows, columns).
    text: tokens in front of them where an attention sees both in one sequence.
    grouping: of the tokens; None until decided, and where none is merged.
    """

    site: Site
    tokens: Tensor
    axes: tuple[int, ...] | None
    text: int = 0
    grouping: Grouping | None = None
    decided: bool = False

    @property
    def grid(self) -> Grid | None:
        """(rows, columns); the frames of a video one below the other."""
        if self.axes is None:
            return None
        *above, columns = self.axes
        rows = 1
        for length in above:
            rows *= length
        return rows, columns


@dataclass
class Pass:
    """One call of a model.

    axes: of the latent or of its tokens, as the family of models counts them. places: see `rotary`.
    block: where the pass is. shared: groupings by downsampling, for blocks that share them.
    """

    owner: Any
    plan: Plan
    family: Family
    traces: tuple[Trace, ...]
    axes: tuple[int, ...] | None
    places: Any
    run: Run | None
    block: AtBlock | None = None
    shared: dict[int, Grouping] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


@dataclass
class Kept:
    """A grouping, the step at which it was made, and the features it was made of where their drift matters."""

    grouping: Grouping
    step: int
    features: Tensor | None


class Run:
    """The calls of one model in one generation.

    A step is the calls with one timestep: pipelines that run prompted and unprompted images one after the other call
    the model twice. Such calls keep groupings of their own, by their number within the step.
    """

    def __init__(self, owner: Any, plan: Plan) -> None:
        self.owner, self.plan = owner, plan
        self.step = -1
        self.call = 0
        self.timestep: float | None = None
        self.kept: dict[tuple[int, int], Kept] = {}

    def begin(self, timestep: Any) -> None:
        """A call of the model begins."""
        if timestep is None:
            raise ValueError("every= and drift= count denoising steps: call the model with its timestep")
        now = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
        if now == self.timestep:
            self.call += 1
        else:
            self.step, self.call, self.timestep = self.step + 1, 0, now


class Generation:
    """From noise to pictures: one call of a pipeline."""

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        self.generators: dict[int, torch.Generator] = {}

    def run(self, owner: Any, plan: Plan) -> Run:
        """Of a model; a new one after another `apply`, whose groups are others."""
        run = self.runs.get(id(owner))
        if run is None or run.plan is not plan:
            run = self.runs[id(owner)] = Run(owner, plan)
        return run


class _Thread(threading.local):
    """What this thread is in the middle of."""

    def __init__(self) -> None:
        # Attributes of each thread from the start: torch.compile guards on whether they exist.
        self.current: Pass | None = None
        self.generation: Generation | None = None
        self.generators: dict[int, tuple[ref[Method], torch.Generator]] = {}  # by identity: equal methods draw apart

    def generator(self, method: Method, seed: int | None, device: torch.device) -> torch.Generator:
        """The generator of a method: of this generation, or outside of any of this thread, as tomesd keeps it."""
        if self.generation is not None:
            return _known_or_new(self.generation.generators, id(method), seed, device)
        alive = {key: pair for key, pair in self.generators.items() if pair[0]() is not None}
        known = {key: generator for key, (_, generator) in alive.items()}
        found = _known_or_new(known, id(method), seed, device)
        self.generators = {**alive, id(method): (ref(method), found)}
        return found


def _known_or_new(
    known: dict[int, torch.Generator], key: int, seed: int | None, device: torch.device
) -> torch.Generator:
    found = known.get(key)
    if found is None or (found.device != device and device.type in ("cpu", "cuda")):
        found = known[key] = _new_generator(seed, device)
    return found


def _new_generator(seed: int | None, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device if device.type == "cuda" else "cpu")
    if seed is not None:
        return generator.manual_seed(seed)
    on_device = device.type == "cuda"
    return generator.set_state(torch.cuda.get_rng_state(device) if on_device else torch.get_rng_state())


THREAD = _Thread()


@contextmanager
def generation() -> Iterator[None]:
    """Around a denoising loop of one's own: what `every=`, `drift=` and a drawn `tome` keep lives as long as this.

    Pipelines given to `agglo.apply` open one by themselves at every call.

    >>> from agglo.embedded import generator
    >>> model = agglo.apply(generator.trained(), keep_rate=0.5, every=2)
    >>> latents, label = torch.rand(1, 1, 32, 32), torch.tensor([3])
    >>> with agglo.generation():
    ...     for step in (900, 800, 700):
    ...         noise = model(latents, torch.tensor([step]), label).sample
    """
    before = THREAD.generation
    THREAD.generation = Generation()
    try:
        yield
    finally:
        THREAD.generation = before
