"""`agglo.heal`: a reduced model learns from its own dense outputs what the reduction costs, without labels."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from agglo.checks import choice, number
from agglo.config import ReductionConfig
from agglo.healing.images import source_of
from agglo.healing.result import Healed
from agglo.healing.training import Training
from agglo.hosts.common.swap import Healing, healing_of
from agglo.hosts.diffusers import is_diffusion
from agglo.hosts.registry import applied_modules, unwrapped
from agglo.models.inputs import Inputs
from agglo.models.outputs import call
from agglo.patch import remove
from agglo.tuning.settings import Output
from agglo.utils.files import require_output

__all__ = ["Healed", "Trained", "heal"]

Trained = Literal["norms", "biases", "all"]


def heal(
    model: nn.Module,
    images: Any,
    *,
    minutes: float = 10.0,
    parameters: Trained = "norms",
    lr: float = 2e-3,
    batch_size: int = 16,
    steps: int | None = None,
    output: Output | None = None,
    inputs: Inputs | None = None,
    autocast: torch.dtype | None = None,
    checkpoint: str | PathLike[str] | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Healed:
    """Train a few parameters of a reduced model so that its outputs come near those of the dense model again. In place.

    It needs no labels. An eighth of the images, at most 256, says when to stop, and another eighth is only used to
    report; the others are trained on. Where the images to stop by show no gain, the parameters are put back, with a
    warning. `agglo.remove(model)` puts the parameters of before back in any case.

    What matters:
        model: A model that `agglo.apply` has reduced, or the denoiser of a diffusion pipeline.
        images: Some hundreds of your own, better thousands: image files or PIL images (a list, or a data set, perhaps
            with classes, which serve the report alone); or what the model takes, as for `agglo.tune`: a tensor
            (N, C, H, W), a list of tensors, or batches. Of files random crops are trained on, of tensors small shifts,
            and half of either mirrored.
        minutes: How long it may take, about: how many steps fit is measured at the beginning.

    To tinker with:
        parameters: "norms": scales and biases of normalisation layers; "biases": all biases too; "all".
        lr: Highest learning rate of the cycle, of the norms; biases of other layers have a tenth of it, matrices a
            two-hundredth.
        batch_size: Images of a step.
        steps: How many, in place of what fits into the minutes.
        output: Function of (model, batch) that returns the tensor, or tensors, to compare, as for `agglo.tune`: logits
            (B, classes) by their KL divergence, anything else by its relative error.
        inputs: How image files are prepared; None is as the model's library says.
        autocast: dtype of mixed precision, such as torch.bfloat16.
        checkpoint: A file for a run to go on from: the same call continues one that was stopped or killed, and gives
            the same with the same `steps`.
        seed: Decides the parts, the views and the order of the images.
        quiet: Whether no progress is shown.

    In several processes (torchrun) with a process group, each takes its share of every step. Models in half precision
    are trained in float32 and rounded. The model is in eval mode meanwhile; its mode, `requires_grad` and gradients are
    afterwards what they were.

    Returns:
        What it gave, with its standard error; `save` writes the weights.

    Raises:
        ValueError: Nothing is applied to the model, there are too few images, or the checkpoint is of another run.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit", img_size=64, depth=4).eval(), keep_rate=0.5)
    >>> healed = agglo.heal(model, torch.rand(24, 3, 64, 64), steps=4, quiet=True)  # leave steps= out
    >>> print(healed.report().splitlines()[-1].split(";")[1])
     4 steps, 0.0 minutes
    """
    began = time.monotonic()
    choice("parameters", parameters, get_args(Trained))
    number("minutes", minutes, above=0)
    number("batch_size", batch_size, whole=True, minimum=1)
    number("lr", lr, above=0)
    if steps is not None:
        number("steps", steps, whole=True, minimum=1)
    file = None if checkpoint is None else require_output(Path(checkpoint))
    model = unwrapped(model)
    reduced, config = _applied(model)
    healing = healing_of(model)
    if healing is not None and not healing.before:
        raise ValueError("these weights were healed before, and the dense outputs are lost: load the weights of before")
    dense = remove(copy.deepcopy(model)).eval().requires_grad_(False)
    source = source_of(images, model, inputs, tuples_are_inputs=is_diffusion(model))
    with _trainable(model, parameters) as trained:
        before = [parameter.detach().clone() for parameter in trained]
        how: dict[str, Any] = {"lr": lr, "batch_size": batch_size, "seed": seed}
        about = {"config": config.to_dict(), "parameters": parameters, "steps": steps, **how}
        try:
            training = Training(model, dense, trained, source, output=output or call, autocast=autocast, **how)
            start = training.values.clone()
            at = training.run(file, about, steps=steps, until=began + 60 * minutes, quiet=quiet)
            after, then = training.judge(training.parts.reporting)
            best = training.values.clone()
            training.put(start)
            first, of_each = training.judge(training.parts.reporting)
            training.put(best)
        except BaseException:
            for parameter, value in zip(trained, before, strict=True):
                parameter.data.copy_(value)
            raise
    changed = [(p, value) for p, value in zip(trained, before, strict=True) if not torch.equal(p, value)]
    known = [] if healing is None else list(healing.before)  # healed a second time: the first values count
    known += [pair for pair in changed if all(pair[0] is not parameter for parameter, _ in known)]
    if changed:
        reduced.agglo_healing = Healing(config, tuple(known))  # type: ignore[assignment]
    else:
        warnings.warn("healing gained nothing: the parameters are what they were before", stacklevel=2)
    named = model.named_parameters(remove_duplicate=False)
    return Healed(
        config,
        " and ".join(dict.fromkeys([objective] if isinstance(objective := training.objective, str) else objective)),
        first,
        after,
        error=float((then - of_each).std() / math.sqrt(len(then))) if len(then) > 1 else math.inf,
        steps=at.step,
        minutes=at.seconds / 60,
        curve=at.curve,
        parameters={name: p.detach().clone() for name, p in named if any(p is parameter for parameter, _ in known)},
        model=model,
    )


def _applied(model: nn.Module) -> tuple[nn.Module, ReductionConfig]:
    """Return the module that a model's reduction was put into, and its config."""
    for module in applied_modules(model):
        config = getattr(module.agglo_applied, "config", None)
        if config is not None:
            return module, config
    raise ValueError(f"nothing is applied to this {type(model).__name__}: call agglo.apply(model, ...) first")


@contextmanager
def _trainable(model: nn.Module, which: str) -> Iterator[dict[nn.Parameter, str]]:
    """Let only the parameters to train have gradients, in eval mode; put modes and gradients back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    needed = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval().requires_grad_(False)
        if not (trained := _chosen(model, which)):
            raise ValueError(f"parameters={which!r}: {type(model).__name__} has none; 'biases' or 'all' may be there")
        for parameter in trained:
            parameter.requires_grad_()
        yield trained
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, wanted in needed:
            parameter.requires_grad_(wanted)


def _chosen(model: nn.Module, which: str) -> dict[nn.Parameter, str]:
    """Return the parameters to train and their kinds: of layers whose class is some norm, besides biases, or all."""
    wanted = {"norms": ["norm"], "biases": ["norm", "bias"], "all": ["norm", "bias", "matrix"]}[which]
    found: dict[nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for _, parameter in module.named_parameters(recurse=False):
            kind = "matrix" if parameter.dim() > 1 else "norm" if is_norm else "bias"
            if kind in wanted and parameter.is_floating_point() and "agglo_method" not in prefix.split("."):
                found[parameter] = kind
    return found
