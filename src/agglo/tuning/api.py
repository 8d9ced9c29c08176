"""agglo.tune"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agglo.experiments.checkpoints import fingerprint
from agglo.experiments.machine import machine
from agglo.hosts.diffusion import is_diffusion
from agglo.hosts.swap import UnsupportedModelError
from agglo.methods.registry import find
from agglo.tuning.choosing import choose, winner
from agglo.tuning.images import split
from agglo.tuning.objectives import Objective
from agglo.tuning.outputs import Output
from agglo.tuning.points import Measured, Speed
from agglo.tuning.record import Record
from agglo.tuning.result import Tuned
from agglo.tuning.search import Search
from agglo.tuning.space import Space, space_of
from agglo.tuning.subject import Subject, evaluating
from agglo.tuning.target import Target

_FINAL_TURNS = 7


def tune(
    model: nn.Module,
    images: Any,
    *,
    speedup: float | None = None,
    max_drop: float | None = None,
    gflops: float | None = None,
    labels: Tensor | Sequence[int] | None = None,
    output: Output | None = None,
    objective: str | Objective = "auto",
    methods: Sequence[str] = ("atc", "tome"),
    minutes: float = 10.0,
    batch_size: int | None = None,
    n_images: int | None = None,
    path: str | PathLike[str] | None = None,
    candidates: int | None = None,
    seed: int = 0,
    tower: str | nn.Module | None = None,
    n_tokens: int | None = None,
    name: str | None = None,
    quiet: bool = False,
) -> Tuned:
    """Find how to reduce a model so that it is as fast, or as accurate, as you ask for: `agglo.apply(model, **tuned)`.

    One of:
        speedup: times as fast as the dense model, measured on its device with its dtype, in turns with it.
        max_drop: points of accuracy that may be lost; without labels, decisions that may change, which is more.
        gflops: the fraction of the dense model's multiply-adds that is left.

    What matters:
        images: a few hundred of your own, as the model takes them: a tensor, a list of tensors, or batches (a
            DataLoader), with or without labels. Half of them are kept for confirmation.
        labels: of images in one tensor or list, for the report. The search needs none: it keeps outputs near the dense
            model's.
        path: a JSON file that is written after every evaluation. The same call goes on where it was stopped.
        minutes: that the search may take, about.

    To tinker with:
        output: function of (model, batch) that gives the tensor (or several) to compare and runs what is to be timed.
        objective: "kl" for logits, "relative" or "cosine" for anything else, or a function of the dense and the reduced
            output that gives a value for each image. "auto" is "kl" where outputs are logits, and "relative" otherwise.
        methods: that are searched, each at its own best schedule; the best of them all is chosen.
        batch_size: that is timed. n_images: the first so many are used.
        candidates: of each method, in place of what fits into the minutes: the search is then the same on any machine.
        tower: the submodule to reduce, or its name. n_tokens: of an image, where a diffusion model cannot tell.
        name: of the model, for the report.

    Schedules and options that are searched: `agglo.tuning.space`. The model is dense afterwards.

    >>> import timm
    >>> model = timm.create_model("test_vit", img_size=64, depth=4).eval()
    >>> few = {"methods": ["atc"], "candidates": 2, "batch_size": 4, "quiet": True}  # leave out: ten minutes are better
    >>> tuned = agglo.tune(model, torch.rand(16, 3, 64, 64), gflops=0.7, **few)
    >>> model = agglo.apply(model, **tuned)
    """
    target = Target.of(speedup=speedup, max_drop=max_drop, gflops=gflops)
    _check(model, methods, minutes, candidates)
    where = _name_of(model, tower)
    found = split(
        images,
        labels,
        batch_size=batch_size,
        n_images=n_images,
        tuples_are_inputs=is_diffusion(model),
        seed=seed,
    )
    with evaluating(model):
        subject = Subject(model, found, output=output, objective=objective, tower=where, n_tokens=n_tokens)
        if target.kind == "max_drop" and not subject.decides:
            raise ValueError(
                f"max_drop={max_drop!r} is about decisions, and outputs compared by {subject.objective!r} are none: "
                "give speedup or gflops, or output= a function that gives logits (B, classes)"
            )
        spaces = {method: _space(subject, method) for method in methods}
        about = {
            "target": {"kind": target.kind, "value": target.value},
            "model": {"name": name or type(model).__name__, "fingerprint": fingerprint(model.state_dict())},
            "data": found.about,
            "settings": _settings(subject, methods, seed, candidates, output),
            "machine": machine(subject.device),
            "minutes": minutes,
        }
        record = Record(about, None if path is None else Path(path))
        search = Search(subject, spaces, target, record, minutes=minutes, candidates=candidates, seed=seed, quiet=quiet)
        return Tuned(record.finish(_searched(search)))


def _searched(search: Search) -> dict[str, Any]:
    """The whole search; what it adds to the record."""
    search.calibrate()
    best = {method: search.best_of(space) for method, space in search.spaces.items()}
    for method in [method for method, found in best.items() if not found]:
        search.notes.append(f"{method} cannot do it ({search.why_not(method)})")
        del best[method]
    if not best:
        raise ValueError(f"no method can do it: {search.target}; {'; '.join(search.notes)}")
    front = search.front(best)
    chosen = choose(search, best, front)
    one = winner(search, chosen)
    final = search.speeds([each.point for each in chosen.values()], _FINAL_TURNS, "final")
    speeds = dict(zip(chosen, final, strict=True))
    told = {
        method: {**_told(each, speeds[method]), "confirmation": search.confirmed(each.point).as_dict()}
        for method, each in chosen.items()
    }
    # What was timed several times is told as it was timed last, in the most turns.
    drawn = {str(each.point.arguments): _told(each, each.speed) for each in front}
    drawn |= {str(each.point.arguments): _told(each, speeds[method]) for method, each in chosen.items()}
    subject = search.subject
    where = {} if subject.tower is None else {"tower": subject.tower}
    return {
        "apply": {**one.point.arguments, **where},
        "chosen": told[one.point.method],
        "beside": [each for method, each in told.items() if method != one.point.method],
        "front": list(drawn.values()),
        "dense": {"accuracy": subject.accuracy(subject.images.confirmation), "tokens": subject.tokens},
        "latency": None if search.solver.latency is None else search.solver.latency.as_dict(),
        "left_out": [reason for space in search.spaces.values() for reason in space.left_out],
        "notes": search.notes,
    }


def _told(each: Measured, speed: Speed) -> dict[str, Any]:
    cost = each.point.cost
    return {
        "method": each.point.method,
        "apply": each.point.arguments,
        "counts": cost.counts,
        "gflops": cost.gflops,
        "speed": {"median": speed.median, "low": speed.low, "high": speed.high, "turns": speed.turns},
        "search": each.quality.as_dict(),
    }


def _space(subject: Subject, method: str) -> Space:
    """What can be searched of a method, found out by applying it with as little reduction as there is."""
    few = {"keep_rate": 0.9} if subject.diffusion else {"keep_rate": 0.9, "blocks": [max(1, (subject.depth or 2) // 2)]}
    return space_of(
        method,
        depth=subject.depth,
        diffusion=subject.diffusion,
        tries=lambda arguments: subject.require_runs({**arguments, **few}),
    )


def _settings(
    subject: Subject, methods: Sequence[str], seed: int, candidates: int | None, output: Output | None
) -> dict[str, Any]:
    return {
        "objective": subject.objective,
        "output": None if output is None else getattr(output, "__qualname__", type(output).__name__),
        "methods": list(methods),
        "seed": seed,
        "candidates": candidates,
        "device": str(subject.device),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "tower": subject.tower,
    }


def _check(model: Any, methods: Sequence[str], minutes: float, candidates: int | None) -> None:
    if not isinstance(model, nn.Module):
        hint = (
            "; of a pipeline its denoiser is tuned: pipeline.unet or pipeline.transformer"
            if is_diffusion(model)
            else ""
        )
        raise UnsupportedModelError(f"a torch.nn.Module is needed, got {type(model).__name__}{hint}")
    if isinstance(methods, str) or not methods or len(set(methods)) != len(methods):
        raise ValueError(f"methods={methods!r} must be a list of different names, at least one")
    for method in methods:
        if issubclass(find(method), nn.Module):
            raise ValueError(f"method {method!r} learns: what it does cannot be tuned without training it")
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not minutes > 0:
        raise ValueError(f"minutes={minutes!r} must be a number above 0")
    if candidates is not None and (isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < 2):
        raise ValueError(f"candidates={candidates!r} must be a whole number, at least 2")


def _name_of(model: nn.Module, tower: str | nn.Module | None) -> str | None:
    """A tower by its name, which files can hold."""
    if not isinstance(tower, nn.Module):
        return tower
    for name, module in model.named_modules():
        if module is tower:
            return name or None
    raise ValueError(f"tower={type(tower).__name__} is not a submodule of this {type(model).__name__}")
