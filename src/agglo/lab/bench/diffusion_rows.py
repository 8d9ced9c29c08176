"""What the diffusion benchmark compares: tomesd, and agglo with its options, each on a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from agglo import patch
from agglo.config import ReductionConfig
from agglo.hosts.diffusers.state import asked_for
from agglo.lab.bench.diffusion_models import Call, finest, sharing_weights
from agglo.methods import View
from agglo.utils.timing import stopwatch

DENSE, TOMESD, WITHOUT = "dense", "tomesd", "without self-attention"
KEPT_STEPS = 5


@dataclass(frozen=True)
class Row:
    """One contestant.

    by: "agglo" or "tomesd", whose apply gets the options; "nobody" for the dense model; "hooks" for the one whose
        finest self-attentions give zeros: how much they matter at all.
    keeps: whether groupings are kept from step to step, so that steps differ in cost.
    """

    name: str
    keep_rate: float | None = None
    by: str = "agglo"
    options: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False

    @property
    def key(self) -> dict[str, Any]:
        return {"name": self.name, "keep_rate": self.keep_rate}

    def steps(self, total: int) -> list[int]:
        """Which steps of a generation it runs: all where they differ in cost, or else the first, middle and last."""
        if self.by == "hooks":
            return [0]
        if self.by == "nobody" or self.keeps:
            return list(range(total))
        return sorted({0, total // 2, total - 1})


def rows_at(keep_rate: float, side: int, window: int, brief: bool) -> list[Row]:
    """All contestants at a keep rate; brief leaves out options that another keep rate tells enough about."""
    target, half = asked_for(side * side, keep_rate), side // 2
    kept = {"every": KEPT_STEPS}
    windows = f"windows of {window}"

    def ours(name: str, **options: Any) -> Row:
        return Row(name, keep_rate, "agglo", options, keeps="every" in options)

    def tomesd(name: str, **options: Any) -> Row:
        return Row(name, keep_rate, "tomesd", {"ratio": round(1 - keep_rate, 9), **options})

    rows = [tomesd(TOMESD)]
    if target <= half * half:  # where cells of 2 x 2 can do no more
        rows.append(tomesd(f"{TOMESD}, cells of 4 x 4", sx=4, sy=4))
    if not brief:
        rows.append(ours("agglo's tomesd", method="tomesd"))
    rows += [ours("atc, paper", features="tokens", proportional=False), ours("atc")]
    if not brief:
        rows.append(ours("atc, shared by the blocks", share="resolution"))
    rows += [ours(f"atc, kept for {KEPT_STEPS} steps", **kept), ours(f"atc, {windows}", window=window)]
    if not brief:
        rows.append(ours(f"atc, {windows}, by need", window=window, spread="need"))
        rows.append(ours("atc, neighbours only", connectivity="grid"))
    rows.append(ours(f"atc, {windows}, kept for {KEPT_STEPS} steps", window=window, **kept))
    return rows


def all_rows(keep_rates: Sequence[float], side: int, window: int) -> list[Row]:
    """Every option at the first keep rate, and at further ones those that matter most."""
    rows = [Row(DENSE, by="nobody"), Row(WITHOUT, by="hooks")]
    for number, keep_rate in enumerate(dict.fromkeys(keep_rates)):
        rows += rows_at(keep_rate, side, window, brief=number > 0)
    return rows


class Contestant:
    """A row applied to a model of its own, which shares the weights of the others."""

    def __init__(self, row: Row, model: nn.Module) -> None:
        """ValueError if the row cannot be applied."""
        self.row = row
        self.model = sharing_weights(model)
        self.clustering = 0.0  # seconds of the latest call
        self.attention: list[Tensor] = []  # (B, N, C): what the finest self-attentions gave in the latest call
        self._watch()
        if row.by == "tomesd":
            _apply_tomesd(row, self.model)
        elif row.by == "agglo":
            patch.apply(self.model, ReductionConfig.of(**{"keep_rate": row.keep_rate, **row.options}))
            method = self.model.agglo_applied.method
            vars(method)["reduce"] = self._timed(method.reduce)
        elif row.by == "hooks":
            for modules in finest(self.model):
                modules.attentions[0].register_forward_hook(lambda _module, _inputs, out: torch.zeros_like(out))

    def run(self, call: Call) -> tuple[float, Tensor]:
        """Seconds, and what the model predicts."""
        self.clustering = 0.0
        self.attention.clear()
        with self._tomesd_clock():
            with stopwatch(call.sample.device) as taken:
                predicted = call.predict(self.model)
            return taken.seconds, predicted

    def warm_up(self, batch: int) -> None:
        """Cluster random tokens of full size, which compiles; ValueError if so many groups cannot be made."""
        if self.row.by != "agglo":
            return
        plan, side, site = self.model.agglo_applied, self.model.config.sample_size, finest(self.model)[0].site
        weight = self.model.conv_in.weight
        drawn = torch.randn(batch, side * side, site.inner, generator=torch.Generator().manual_seed(0)).to(weight)
        keys = drawn.unflatten(-1, (site.heads, -1)).transpose(1, 2)
        target, grid = plan.target(side * side, (side, side)), (side, side)
        plan.method.reduce(View(drawn, keys, keys, None, None, None, 0, target, None, 0, False, grid=grid))

    def _watch(self) -> None:
        """Note what self-attention adds to the stream: what enters the norm after it, less what entered the block."""
        entered: list[Tensor] = []

        def note(_norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.attention.append(inputs[0] - entered.pop())

        for modules in finest(self.model):
            block: Any = modules.block
            block.register_forward_pre_hook(lambda _block, inputs: entered.append(inputs[0]))
            block.norm2.register_forward_pre_hook(note)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        device = self.model.device

        def run(*arguments: Any, **options: Any) -> Any:
            with stopwatch(device) as taken:
                result = function(*arguments, **options)
            self.clustering += taken.seconds
            return result

        return run

    @contextmanager
    def _tomesd_clock(self) -> Iterator[None]:
        """Tomesd's matching is a function of its module: for the time of a call, one that counts its seconds."""
        if self.row.by != "tomesd":
            yield
            return
        import tomesd

        name = "bipartite_soft_matching_random2d"
        original = getattr(tomesd.merge, name)
        setattr(tomesd.merge, name, self._timed(original))
        try:
            yield
        finally:
            setattr(tomesd.merge, name, original)


def _apply_tomesd(row: Row, model: Any) -> None:
    """Tomesd merges as many as it can where it is asked for more, and does not say so: such requests raise here."""
    assert row.keep_rate is not None
    if find_spec("tomesd") is None:
        raise ValueError("tomesd is not installed")
    import tomesd

    side = model.config.sample_size
    columns, rows = row.options.get("sx", 2), row.options.get("sy", 2)
    target, fewest = asked_for(side * side, row.keep_rate), (side // rows) * (side // columns)
    if target < fewest:
        raise ValueError(
            f"tomesd cannot go from {side} x {side} tokens to {target}: one stays in each cell of {rows} x {columns}, "
            f"{fewest} in all"
        )
    tomesd.apply_patch(model, **row.options)
