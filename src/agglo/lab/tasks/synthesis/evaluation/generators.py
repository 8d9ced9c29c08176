"""Generators of images: a pipeline of diffusers, or the generator that comes with agglo."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from PIL import Image as pil
from PIL import ImageOps
from PIL.Image import Image
from torch import Tensor

from agglo.embedded import generator as embedded
from agglo.hosts.diffusers.applying import denoisers
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.models.checkpoints import fingerprint

AfterStep = Callable[[int], None]  # called with the number of steps done


class Generator(ABC):
    """Generates images from requests."""

    reduced: Any  # the pipeline or model that `agglo.apply` takes
    steps: int  # of denoising
    about: dict[str, Any]  # all settings that decide what the images look like, as plain values for JSON

    @abstractmethod
    def __call__(self, requests: Sequence[Request], after_step: AfterStep | None = None) -> list[Image]:
        """Return one image for each request, from its own seed. What `after_step` raises ends the generation."""

    def canvas(self, image: Image) -> Image:
        """Return the image padded to what the model's tokens cover."""
        return image


class EmbeddedGenerator(Generator):
    """The embedded generator of clothes, grey images of 28 x 28; `weights` replaces those in the package."""

    def __init__(
        self,
        *,
        weights: Path | None = None,
        steps: int = 25,
        guidance: float = 1.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.reduced = embedded.trained(embedded.WEIGHTS if weights is None else weights).to(device)
        if dtype != torch.float32:  # diffusers warns of every cast
            self.reduced.to(dtype)
        self.steps, self.guidance = steps, guidance
        weighed = {"model": embedded.NAME, "weights": fingerprint(self.reduced.state_dict())}
        self.about = {**weighed, "scheduler": "DDIMScheduler", **_sampling(steps, guidance, dtype)}

    def __call__(self, requests: Sequence[Request], after_step: AfterStep | None = None) -> list[Image]:
        labels, seeds = [request.label for request in requests], [request.seed for request in requests]
        how: dict[str, Any] = {"steps": self.steps, "guidance": self.guidance, "after_step": after_step}
        return pil_images(embedded.sample(self.reduced, labels, seeds, **how))

    def canvas(self, image: Image) -> Image:
        return ImageOps.expand(image, embedded.PADDING)


class PipelineGenerator(Generator):
    """A text-to-image pipeline of diffusers, or one that takes classes (DiT), from a folder or by its name.

    guidance is the scale of classifier-free guidance; size (height and width) and scheduler (a class of diffusers) are
    the pipeline's own where they are None.
    """

    def __init__(
        self,
        name: str,
        *,
        steps: int = 50,
        guidance: float = 7.5,
        size: tuple[int, int] | None = None,
        scheduler: str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        import diffusers

        pipeline = diffusers.DiffusionPipeline.from_pretrained(name, dtype=dtype)
        accepted = inspect.signature(type(pipeline).__call__).parameters
        if "prompt" not in accepted and "class_labels" not in accepted:
            raise ValueError(f"model={name!r} is a {type(pipeline).__name__}, which takes neither prompts nor classes")
        if getattr(pipeline, "safety_checker", None) is not None:
            pipeline.register_modules(safety_checker=None)  # it blackens images: no measure of a model
        if scheduler is not None:
            kind: Any = getattr(diffusers, scheduler, None)
            if not hasattr(kind, "set_timesteps"):
                raise ValueError(f"scheduler={scheduler!r} is no scheduler of diffusers, such as 'PNDMScheduler'")
            pipeline.scheduler = kind.from_config(pipeline.scheduler.config)
        pipeline.set_progress_bar_config(disable=True)
        self.reduced, self.steps, self.device = pipeline.to(device), steps, torch.device(device)
        self.by_prompt = "prompt" in accepted
        self.options: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": guidance}
        if size is not None:
            self.options |= {"height": size[0], "width": size[1]}
        self.about = {
            "model": name,
            "scheduler": type(pipeline.scheduler).__name__,
            "size": size and list(size),
            "device": self.device.type,  # noise is drawn on it: the same seeds give other images on another
            **_sampling(steps, guidance, dtype),
        }

    def __call__(self, requests: Sequence[Request], after_step: AfterStep | None = None) -> list[Image]:
        generators = [torch.Generator(self.device).manual_seed(request.seed) for request in requests]
        name, value = ("prompt", "prompt") if self.by_prompt else ("class_labels", "label")
        wanted = {name: [getattr(request, value) for request in requests]}
        calls, done = count(1), after_step or (lambda step: None)
        # Not every pipeline takes a callback.
        hook = denoisers(self.reduced)[0].register_forward_hook(lambda *_: done(next(calls)))
        try:
            found: list[Image] = self.reduced(**wanted, **self.options, generator=generators).images
        finally:
            hook.remove()
        return found


def _sampling(steps: int, guidance: float, dtype: torch.dtype) -> dict[str, Any]:
    return {"steps": steps, "guidance": guidance, "dtype": str(dtype).removeprefix("torch.")}


def pil_images(images: Tensor) -> list[Image]:
    """Return grey images (B, 1, H, W), uint8, as PIL images."""
    return [pil.fromarray(image[0].cpu().numpy()) for image in images]
