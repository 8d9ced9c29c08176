"""A denoising step of Stable Diffusion 1.5's U-Net: dense, with tomesd, and with agglo's options.

The weights are random (--architecture sd15 is the real architecture, tiny one for trying out), so times are real, but
errors are not those of a trained model. All contestants take turns: each step of a generation is run by one after the
other before the next step begins. The steps come from a scheduler that the dense model drives; repeats begin at other
noise levels. Rows that keep groupings run every step, and their mean counts, since the first step pays; the others run
the first, middle and last step. The first keep rate is measured with all options, further ones with a choice of them.

Goal: at keep rate 0.5 a step takes no longer than with tomesd.

With --json a run that was stopped continues with the first repeat that it had not finished.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo import patch
from agglo.config import ReductionConfig
from agglo.hosts.diffusers.families import Modules, family_of
from agglo.hosts.diffusers.state import asked_for, generation
from agglo.lab.bench import TimingOptions
from agglo.lab.bench.diffusion_report import DENSE, TOMESD, WITHOUT, table
from agglo.lab.options import AtLeastOne, option, require_limits
from agglo.lab.tasks.synthesis.evaluation.errors import relative_errors
from agglo.methods import View
from agglo.utils.devices import DTYPES, dtype_named, require_device, torch_threads
from agglo.utils.journal import Journal
from agglo.utils.machine import machine
from agglo.utils.progress import progress
from agglo.utils.randomness import generator
from agglo.utils.timing import stopwatch

EXAMPLES = """\
examples:
  agglo bench diffusion --json diffusion.json
  agglo bench diffusion --architecture tiny --size 64 --window 4 --repeats 2
  agglo bench diffusion --device cuda --dtype float16 --repeats 3 --json diffusion.json
"""

PIXELS = 8  # of the image, per side of a latent's element
TEXT_TOKENS = 77
GUIDANCE = 7.5
DENOISING_STEPS = 50
KEPT_STEPS = 5
_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
_SAME_MACHINE = ("cpu", "cores", "gpu", "threads", "torch", "diffusers", "tomesd")

# With torch's own initialisation the softmax is nearly flat (in Stable Diffusion 1.5's first block a query spreads over
# 95 % of the tokens), so that attention gives every token the same mean and no grouping could be wrong. Queries this
# many times as long spread over about a tenth.
QUERY_GAIN = 8.0

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768},  # the rest are the defaults of diffusers
    "tiny": {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
        "norm_num_groups": 8,
    },
}


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """What to time."""

    architecture: Literal["sd15", "tiny"] = "sd15"
    size: AtLeastOne = option(512, "pixels per side")
    batch: AtLeastOne = option(2, "images of a call, those with and without the prompt together")
    keep_rates: Sequence[float] = option((0.5, 0.25), flags=("--keep-rate",), metavar="R")
    steps: AtLeastOne = option(KEPT_STEPS, "successive steps of a generation")
    repeats: AtLeastOne = option(1, "generations, each at a noise level")
    window: AtLeastOne = option(16, "tokens per side of the windows that rows cluster in")
    device: str = option("cpu", "cpu, cuda, ...", metavar="D")
    dtype: str = option("float32", choices=tuple(DTYPES), metavar=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_limits(self)
        multiple = PIXELS * (2 if self.architecture == "tiny" else 8)
        if self.size < 2 * multiple or self.size % multiple:
            raise ValueError(f"size={self.size} must be a multiple of {multiple} pixels, {2 * multiple} or more")
        if self.batch % 2:
            raise ValueError(f"batch={self.batch} must be even: each image is there with and without its prompt")
        if self.steps > DENOISING_STEPS:
            raise ValueError(f"steps={self.steps} must be between 1 and {DENOISING_STEPS}, those of a generation")
        if not self.keep_rates or not all(0 < rate <= 1 for rate in self.keep_rates):
            raise ValueError(f"keep_rates={list(self.keep_rates)} must be one or more numbers in (0, 1]")

    @property
    def side(self) -> int:
        """The side of the latent."""
        return self.size // PIXELS


def run(options: Options) -> None:
    with torch_threads(options.threads):
        print(table(measure(options)))


@torch.inference_mode()
def measure(options: Options) -> dict[str, Any]:
    """Return the record: where and what, and the calls of each row. The file holds every repeat as soon as it ends."""
    device, dtype = require_device(options.device), dtype_named(options.dtype)
    rows = all_rows(options.keep_rates, options.side, options.window)
    versions = {name: metadata.version(name) if find_spec(name) else None for name in ("diffusers", "tomesd")}
    settings = {name: value for name, value in asdict(options).items() if name not in ("threads", "json")}
    header = {"machine": {**machine(device), **versions}, "settings": settings, "tokens": options.side**2}
    same = ("settings", *(f"machine.{name}" for name in _SAME_MACHINE))
    journal = Journal(options.json, header, same=same, entries="rows")
    # A kill while a repeat is written leaves it with some rows only: it is not done.
    before = [journal.find(row.key) or {"calls": [], "cannot": None} for row in rows]
    done = min(len({call["repeat"] for call in row["calls"]}) for row in before if row["cannot"] is None)
    if done >= options.repeats:
        return journal.content

    model = random_unet(options.architecture, options.side)
    model.to(device)
    if dtype is not torch.float32:  # diffusers warns of any cast
        model.to(dtype)
    able: list[Contestant] = []
    for row in rows:
        cannot = None
        try:
            able.append(Contestant(row, model, options.batch))
        except ValueError as error:
            cannot = str(error)
        found = journal.find(row.key) or {"calls": []}
        journal.add(row.key, {"options": row.options, "keeps": row.keeps, "cannot": cannot, **found})
    total = sum(len(contestant.row.steps(options.steps)) for contestant in able)
    with progress(total * options.repeats, "bench diffusion", start=total * done) as advance:
        for repeat in range(done, options.repeats):
            # Repeats lie evenly from the beginning of a generation to its end.
            trajectory = Trajectory(model, options.batch, options.steps, (2 * repeat + 1) / (2 * options.repeats))
            for row, calls in run_generation(able, trajectory, repeat, advance).items():
                found = journal.find(row.key) or {"calls": []}
                earlier = [call for call in found["calls"] if call["repeat"] < repeat]
                journal.add(row.key, {**found, "calls": [*earlier, *calls]})
    return journal.content


def random_unet(architecture: str, side: int) -> Any:
    """Build a U-Net with random weights for latents of side x side."""
    from diffusers import UNet2DConditionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UNet2DConditionModel(sample_size=side, **ARCHITECTURES[architecture]).eval().requires_grad_(False)
    for modules in self_attentions(model):
        for attention in modules.attentions:
            attention.to_q.weight.mul_(QUERY_GAIN)  # type: ignore[operator,union-attr]
    return model


def self_attentions(model: nn.Module, downsample: int | None = None) -> list[Modules]:
    """Return the self-attentions of a U-Net, in order; all, or those at one downsampling."""
    family = family_of(model)
    assert family is not None
    return [modules for modules in family.find(model) if downsample in (None, modules.site.downsample)]


@dataclass(frozen=True)
class Call:
    """The arguments of one call of the model. sample: (B, 4, side, side), the first half without the prompt."""

    timestep: int
    sample: Tensor
    text: Tensor

    def predict(self, model: Any) -> Tensor:
        # By position: tomesd's hook looks for the sample there.
        predicted: Tensor = model(self.sample, self.timestep, encoder_hidden_states=self.text).sample
        return predicted


class Trajectory:
    """Successive steps of one generation with classifier-free guidance, driven by the dense model's predictions.

    Smooth random latents are noised to the level at which the steps begin. The scheduler is DDIM with Stable
    Diffusion's betas and 50 steps.

    Args:
        model: Its configuration gives the shapes.
        batch: Images of a call, those with and without the prompt together.
        steps: Their number.
        part: 0 to 1, where in the generation the steps lie.
    """

    def __init__(self, model: Any, batch: int, steps: int, part: float) -> None:
        from diffusers import DDIMScheduler

        self.scheduler = DDIMScheduler(steps_offset=1, **_NOISE)
        self.scheduler.set_timesteps(DENOISING_STEPS)
        first = round(part * (DENOISING_STEPS - steps))
        self.timesteps = [int(t) for t in self.scheduler.timesteps[first : first + steps]]
        side, like = model.config.sample_size, model.conv_in.weight
        drawing = generator("diffusion benchmark", 0, part)
        coarse = torch.randn(batch // 2, 4, max(side // 4, 2), max(side // 4, 2), generator=drawing)
        clean = F.interpolate(coarse, size=(side, side), mode="bicubic")
        noise = torch.randn(clean.shape, generator=drawing)
        self.latents = self.scheduler.add_noise(clean, noise, torch.tensor(self.timesteps[:1])).to(like)
        self.text = torch.randn(batch, TEXT_TOKENS, model.config.cross_attention_dim, generator=drawing).to(like)

    def calls(self) -> Iterator[Call]:
        """Yield a call per step. Between two of them `advance` must be given what the dense model predicted."""
        for timestep in self.timesteps:
            yield Call(timestep, torch.cat([self.latents, self.latents]), self.text)

    def advance(self, timestep: int, dense: Tensor) -> None:
        without, prompted = dense.chunk(2)
        guided = without + GUIDANCE * (prompted - without)
        self.latents = self.scheduler.step(guided, timestep, self.latents).prev_sample


@dataclass(frozen=True, eq=False)
class Row:
    """One contestant.

    Attributes:
        by: "agglo" or "tomesd", whose apply gets the options; "nobody" for the dense model; "hooks" for the one whose
            finest self-attentions give zeros: how much they matter at all.
    """

    name: str
    keep_rate: float | None = None
    by: Literal["agglo", "tomesd", "nobody", "hooks"] = "agglo"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        return {"name": self.name, "keep_rate": self.keep_rate}

    @property
    def keeps(self) -> bool:
        """Whether groupings are kept from step to step, so that steps differ in cost."""
        return "every" in self.options

    def steps(self, total: int) -> list[int]:
        """Return the steps of a generation that it runs."""
        if self.by == "hooks":
            return [0]
        if self.by == "nobody" or self.keeps:
            return list(range(total))
        return sorted({0, total // 2, total - 1})


def all_rows(keep_rates: Sequence[float], side: int, window: int) -> list[Row]:
    """Return every option at the first keep rate, and at further ones those that matter most."""
    rows = [Row(DENSE, by="nobody"), Row(WITHOUT, by="hooks")]
    kept, windows = f"kept for {KEPT_STEPS} steps", f"windows of {window}"
    for keep_rate in dict.fromkeys(keep_rates):
        ratio = {"ratio": round(1 - keep_rate, 9)}
        rows.append(Row(TOMESD, keep_rate, "tomesd", ratio))
        if asked_for(side * side, keep_rate) <= (side // 2) ** 2:  # where cells of 2 x 2 can do no more
            rows.append(Row(f"{TOMESD}, cells of 4 x 4", keep_rate, "tomesd", {**ratio, "sx": 4, "sy": 4}))
        ours: dict[str, dict[str, Any]] = {
            "agglo's tomesd": {"method": "tomesd"},
            "atc, paper": {"features": "tokens", "proportional": False},
            "atc": {},
            "atc, shared by the blocks": {"share": "resolution"},
            f"atc, {kept}": {"every": KEPT_STEPS},
            f"atc, {windows}": {"window": window},
            f"atc, {windows}, by need": {"window": window, "spread": "need"},
            "atc, neighbours only": {"connectivity": "grid"},
            f"atc, {windows}, {kept}": {"window": window, "every": KEPT_STEPS},
        }
        if keep_rate != keep_rates[0]:
            for name in ("agglo's tomesd", "atc, shared by the blocks", f"atc, {windows}, by need"):
                del ours[name]
            del ours["atc, neighbours only"]
        rows += [Row(name, keep_rate, options=options) for name, options in ours.items()]
    return rows


class Contestant:
    """A row applied to a copy of a model that shares its weights; ValueError if it cannot be applied."""

    def __init__(self, row: Row, model: Any, batch: int) -> None:
        self.row = row
        tensors = [*model.parameters(), *model.buffers()]
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        self.clustering = 0.0  # seconds of the latest call
        self.attention: list[Tensor] = []  # (B, N, C): what the finest self-attentions gave in the latest call
        self._watch()
        if row.by == "tomesd":
            _apply_tomesd(row, self.model)
        elif row.by == "agglo":
            patch.apply(self.model, ReductionConfig.of(**{"keep_rate": row.keep_rate, **row.options}))
            self._warm_up(batch)
            method = self.model.agglo_applied.method
            vars(method)["reduce"] = self._timed(method.reduce)
        elif row.by == "hooks":
            for modules in self_attentions(self.model, 1):
                modules.attentions[0].register_forward_hook(lambda _module, _inputs, out: torch.zeros_like(out))

    def run(self, call: Call) -> tuple[float, Tensor]:
        """Return the seconds that a call took, and what the model predicted."""
        self.clustering = 0.0
        self.attention.clear()
        with self._tomesd_clock(), stopwatch(call.sample.device) as taken:
            predicted = call.predict(self.model)
        return taken.seconds, predicted

    def _warm_up(self, batch: int) -> None:
        """Cluster random tokens of full size, which compiles kernels."""
        plan, side, site = self.model.agglo_applied, self.model.config.sample_size, self_attentions(self.model)[0].site
        drawing = torch.Generator().manual_seed(0)
        tokens = torch.randn(batch, side * side, site.inner, generator=drawing).to(self.model.conv_in.weight)
        keys = tokens.unflatten(-1, (site.heads, -1)).transpose(1, 2)
        grid = (side, side)
        target = plan.target(side * side, grid)
        plan.method.reduce(View(tokens, keys, keys, target=target, grid=grid))

    def _watch(self) -> None:
        """Note what self-attention adds to the stream: what enters the norm after it, less what entered the block."""
        entered: list[Tensor] = []

        def note(_norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.attention.append(inputs[0] - entered.pop())

        for modules in self_attentions(self.model, 1):
            block: Any = modules.block
            block.register_forward_pre_hook(lambda _block, inputs: entered.append(inputs[0]))
            block.norm2.register_forward_pre_hook(note)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with stopwatch(self.model.device) as taken:
                result = function(*arguments, **options)
            self.clustering += taken.seconds
            return result

        return run

    @contextmanager
    def _tomesd_clock(self) -> Iterator[None]:
        """Time tomesd's matching, a function of its module, for the duration of a call."""
        if self.row.by != "tomesd":
            yield
            return
        import tomesd

        original = tomesd.merge.bipartite_soft_matching_random2d
        tomesd.merge.bipartite_soft_matching_random2d = self._timed(original)
        try:
            yield
        finally:
            tomesd.merge.bipartite_soft_matching_random2d = original


def _apply_tomesd(row: Row, model: Any) -> None:
    """Apply tomesd; ValueError where it would silently merge fewer tokens than it is asked to."""
    assert row.keep_rate is not None
    if find_spec("tomesd") is None:
        raise ValueError("tomesd is not installed")
    import tomesd

    side, cell = model.config.sample_size, row.options.get("sx", 2)
    target, fewest = asked_for(side * side, row.keep_rate), (side // cell) ** 2
    if target < fewest:
        raise ValueError(
            f"tomesd cannot go from {side} x {side} tokens to {target}: one stays in each cell of {cell} x {cell}, "
            f"{fewest} in all"
        )
    tomesd.apply_patch(model, **row.options)


def run_generation(
    contestants: Sequence[Contestant], trajectory: Trajectory, repeat: int, after: Callable[[str], None]
) -> dict[Row, list[dict[str, Any]]]:
    """Run step after step, all contestants in turns, the dense model first; return the calls of each row.

    One generation is enough for all: what is kept belongs to a model, and each contestant has its own.
    """
    dense, *others = contestants
    found: dict[Row, list[dict[str, Any]]] = {contestant.row: [] for contestant in contestants}
    with generation():
        for step, call in enumerate(trajectory.calls()):
            # There and back, so that none always runs after the same other.
            order = others if (repeat + step // 2) % 2 == 0 else list(reversed(others))
            right, attention = torch.empty(0), [torch.empty(0)]
            for contestant in [dense, *order]:
                row = contestant.row
                if step not in row.steps(len(trajectory.timesteps)):
                    continue
                seconds, predicted = contestant.run(call)
                about = {"repeat": repeat, "step": step, "timestep": call.timestep}
                found[row].append({**about, "seconds": seconds, "clustering": contestant.clustering})
                if contestant is dense:
                    right, attention = predicted, list(dense.attention)
                else:
                    error, attention_error = (
                        sum(float(relative_errors(ours, theirs).mean()) for ours, theirs in pairs) / len(pairs)
                        for pairs in ([(predicted, right)], list(zip(contestant.attention, attention, strict=True)))
                    )
                    found[row][-1] |= {"error": error, "attention_error": attention_error}
                contestant.attention.clear()  # at 4096 tokens, 50 MB per contestant
                budget = "" if row.keep_rate is None else f" keep {row.keep_rate:g}"
                after(f"timestep {call.timestep}: {row.name}{budget}: {seconds:.2f} s")
            trajectory.advance(call.timestep, right)
    return found
