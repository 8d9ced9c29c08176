"""The search behind `agglo.tune`: a speed, an accuracy or GFLOPs in, a `ReductionConfig` out, without labels."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agglo.checks import number
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.hosts.diffusers import is_diffusion
from agglo.hosts.registry import applied_modules
from agglo.models.checkpoints import fingerprint
from agglo.tuned import FORMAT
from agglo.tuning.images import split
from agglo.tuning.result import Tuned
from agglo.tuning.search import Search
from agglo.tuning.settings import Target, TuneSettings, submodule_output
from agglo.tuning.space import space_of
from agglo.tuning.subject import Subject
from agglo.utils.files import require_output
from agglo.utils.journal import Journal, plain
from agglo.utils.machine import machine

__all__ = ["TuneSettings", "Tuned", "submodule_output", "tune"]

_SAME = ("format", "target", "model", "data", "settings")  # entries in which a file must agree to be continued


def tune(
    model: nn.Module,
    images: Any,
    *,
    speedup: float | None = None,
    max_drop: float | None = None,
    gflops: float | None = None,
    minutes: float = 10.0,
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
            (a DataLoader, a list). Batches may have labels, for the report and `max_drop`: [(images, labels)] is one.
            Half of the images are kept for confirmation.
        speedup: Times as fast as the dense model, measured on its device with its dtype, in turns with it.
        max_drop: Points of accuracy that may be lost; without labels, decisions that may change, which is more.
        gflops: Fraction of the dense model's multiply-adds that is left.
        minutes: How long the search may take, about.
        path: A JSON file that is written after every evaluation. The same call continues a search that was stopped.
        settings: Methods, the output that is compared, the batch size, and what is needed less often.

    Returns:
        The config, with everything that was measured.

    Raises:
        ValueError: An argument is not accepted, no method can do what is asked for, or the file belongs to another
            search.

    >>> import timm
    >>> model = timm.create_model("test_vit", img_size=64, depth=4).eval()
    >>> from agglo.tuning import TuneSettings
    >>> few = TuneSettings(methods=["atc"], candidates=2, quiet=True)  # leave it out: ten minutes are better
    >>> tuned = agglo.tune(model, torch.rand(16, 3, 64, 64), gflops=0.7, settings=few)
    >>> model = agglo.apply(model, tuned.config)
    """
    target = Target.of(speedup=speedup, max_drop=max_drop, gflops=gflops)
    settings = TuneSettings() if settings is None else settings
    diffusion = is_diffusion(model)
    if not isinstance(model, nn.Module):
        hint = "; of a pipeline its denoiser is tuned: pipeline.unet or pipeline.transformer" if diffusion else ""
        raise UnsupportedModelError(f"a torch.nn.Module is needed, got {type(model).__name__}{hint}")
    methods = list(settings.methods or ("atc", "tomesd" if diffusion else "tome"))
    number("minutes", minutes, above=0)
    file = None if path is None else require_output(Path(path))
    found = split(images, settings.batch_size, tuples_are_inputs=diffusion, seed=settings.seed)
    if applied_modules(model):
        raise ValueError("this model is reduced already: call agglo.remove(model) first")
    was_training = model.training
    model.eval()
    try:
        subject = Subject(model, found, settings)
        if target.kind == "max_drop" and not subject.decides:
            raise ValueError(
                f"max_drop={max_drop!r} is about decisions, and outputs compared by {subject.objective!r} are none: "
                "give speedup or gflops, or output= a function that returns logits (B, classes)"
            )
        output = settings.output
        spaces = [space_of(name, depth=subject.depth, tries=subject.require_runs) for name in methods]
        header = {
            "format": FORMAT,
            "config": None,
            "target": {"kind": target.kind, "value": target.value},
            "model": {"name": settings.name or type(model).__name__, "fingerprint": fingerprint(model.state_dict())},
            "data": found.about,
            "settings": {
                "objective": subject.objective,
                "output": None if output is None else getattr(output, "__qualname__", type(output).__name__),
                "methods": methods,
                "seed": settings.seed,
                "candidates": settings.candidates,
                "device": str(subject.device),
                "dtype": str(subject.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "tower": subject.tower,
            },
            "machine": machine(subject.device),
            "minutes": minutes,
        }
        journal = Journal(file, header, same=_SAME, entries="steps")
        journal.header |= plain(Search(subject, spaces, target, journal, settings, minutes).run())
        journal.write()
        return Tuned(journal.content)
    finally:
        model.train(was_training)
