"""`agglo.tune`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agglo.checks import number
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.hosts.diffusers import is_diffusion
from agglo.methods.registry import find
from agglo.models.checkpoints import fingerprint
from agglo.tuned import FORMAT
from agglo.tuning.images import split
from agglo.tuning.objectives import Output
from agglo.tuning.result import Tuned
from agglo.tuning.search import Search
from agglo.tuning.settings import Target, TuneSettings
from agglo.tuning.space import space_of
from agglo.tuning.subject import Subject, evaluating
from agglo.utils.files import require_output
from agglo.utils.journal import Journal, plain
from agglo.utils.machine import machine

_SAME = ("format", "target", "model", "data", "settings")  # entries in which a file must agree to be continued


def tune(
    model: nn.Module,
    images: Any,
    *,
    speedup: float | None = None,
    max_drop: float | None = None,
    gflops: float | None = None,
    labels: Tensor | Sequence[int] | None = None,
    output: Output | None = None,
    methods: Sequence[str] | None = None,
    minutes: float = 10.0,
    batch_size: int | None = None,
    path: str | PathLike[str] | None = None,
    settings: TuneSettings | None = None,
) -> Tuned:
    """Find the config that makes a model as fast, or keeps it as accurate, as you ask for.

    Exactly one of `speedup`, `max_drop` and `gflops` is given. The search keeps outputs near the dense model's and
    needs no labels; `agglo.tuning.space` lists the schedules and options that are searched. The model is dense
    afterwards: `agglo.apply(model, tuned.config)` reduces it.

    Args:
        model: A vision transformer, a model that holds one, or the denoiser of a diffusion pipeline.
        images: A few hundred of your own, as the model takes them: a tensor (N, C, H, W), a list of tensors, or batches
            (a DataLoader), with or without labels. Half of them are kept for confirmation.
        speedup: Times as fast as the dense model, measured on its device with its dtype, in turns with it.
        max_drop: Points of accuracy that may be lost; without labels, decisions that may change, which is more.
        gflops: Fraction of the dense model's multiply-adds that is left.
        labels: Classes of images in one tensor or list, (N,), for the report and `max_drop`.
        output: Function of (model, batch) that returns the tensor, or tensors, to compare; it is also what is timed.
        methods: Names of methods, each searched for its own best schedule; the best of all is chosen. By default "atc"
            and "tome", or "tomesd" for a diffusion model.
        minutes: How long the search may take, about.
        batch_size: Images of the batch that is timed; None is 64, or the size of the batches.
        path: A JSON file that is written after every evaluation. The same call continues a search that was stopped.
        settings: Further settings, which are seldom needed.

    Returns:
        The config, with everything that was measured.

    Raises:
        ValueError: An argument is not accepted, no method can do what is asked for, or the file belongs to another
            search.

    >>> import timm
    >>> model = timm.create_model("test_vit", img_size=64, depth=4).eval()
    >>> from agglo.tuning import TuneSettings
    >>> few = TuneSettings(candidates=2, quiet=True)  # leave it out: ten minutes are better
    >>> tuned = agglo.tune(model, torch.rand(16, 3, 64, 64), gflops=0.7, methods=["atc"], settings=few)
    >>> model = agglo.apply(model, tuned.config)
    """
    target = Target.of(speedup=speedup, max_drop=max_drop, gflops=gflops)
    settings = TuneSettings() if settings is None else settings
    diffusion = is_diffusion(model)
    names = list(("atc", "tomesd" if diffusion else "tome") if methods is None else methods)
    if not isinstance(model, nn.Module):
        hint = "; of a pipeline its denoiser is tuned: pipeline.unet or pipeline.transformer" if diffusion else ""
        raise UnsupportedModelError(f"a torch.nn.Module is needed, got {type(model).__name__}{hint}")
    if isinstance(methods, str) or not names or len(set(names)) != len(names):
        raise ValueError(f"methods={methods!r} must be a list of different names, at least one")
    for method in names:
        if issubclass(find(method), nn.Module):
            raise ValueError(f"method {method!r} learns: what it does cannot be tuned without training it")
    number("minutes", minutes, above=0)
    file = None if path is None else require_output(Path(path))
    seed, candidates = settings.seed, settings.candidates
    found = split(images, labels, batch_size, tuples_are_inputs=diffusion, seed=seed)
    with evaluating(model):
        subject = Subject(model, found, settings, output=output)
        if target.kind == "max_drop" and not subject.decides:
            raise ValueError(
                f"max_drop={max_drop!r} is about decisions, and outputs compared by {subject.objective!r} are none: "
                "give speedup or gflops, or output= a function that returns logits (B, classes)"
            )
        spaces = {name: space_of(name, depth=subject.depth, tries=subject.require_runs) for name in names}
        header = {
            "format": FORMAT,
            "config": None,
            "target": {"kind": target.kind, "value": target.value},
            "model": {"name": settings.name or type(model).__name__, "fingerprint": fingerprint(model.state_dict())},
            "data": found.about,
            "settings": {
                "objective": subject.objective,
                "output": None if output is None else getattr(output, "__qualname__", type(output).__name__),
                "methods": names,
                "seed": seed,
                "candidates": candidates,
                "device": str(subject.device),
                "dtype": str(subject.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "tower": subject.tower,
            },
            "machine": machine(subject.device),
            "minutes": minutes,
        }
        journal = Journal(file, header, same=_SAME, entries="steps")
        search = Search(subject, spaces, target, journal, minutes=minutes, settings=settings)
        journal.header |= plain({**search.run(), "seconds": round(search.seconds, 2)})
        journal.write()
        return Tuned(journal.content)
