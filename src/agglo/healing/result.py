"""What `agglo.heal` returns: what the healing gave, on images that had no part in it, and the healed weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from torch import Tensor, nn

from agglo.config import ReductionConfig
from agglo.models.checkpoints import HEALED_FOR, split_method
from agglo.tuning.result import Drop, Quality
from agglo.utils.files import save_weights


@dataclass(frozen=True)
class Healed:
    """What a healing gave. Qualities are of the reporting part, images that were neither trained on nor stopped by.

    Attributes:
        config: The reduction that the parameters were trained for.
        objective: How outputs are compared with the dense model's: "kl" of logits, "relative" error, or both.
        before: The distance to the dense outputs, decisions that differ, and accuracy lost, before.
        after: The same afterwards; equal to `before` where nothing was gained and the parameters were put back.
        error: Standard error of the change of the distance, image by image.
        steps: Training steps.
        minutes: How long it took, all runs together.
        curve: (step, distance of the stopping part), from step 0.
        parameters: The healed parameters by the plain model's names; empty where nothing was gained.
        model: The model that was healed.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit", img_size=64, depth=4), keep_rate=0.5)
    >>> healed = agglo.heal(model, torch.rand(24, 3, 64, 64), steps=2, quiet=True)
    >>> healed.before.images, healed.curve[0][0]
    (3, 0)
    """

    config: ReductionConfig
    objective: str
    before: Quality
    after: Quality
    error: float
    steps: int
    minutes: float
    curve: tuple[tuple[int, float], ...] = field(repr=False)
    parameters: Mapping[str, Tensor] = field(repr=False)
    model: nn.Module = field(repr=False)

    def report(self) -> str:
        """Return what was gained, on how many images, with its standard error."""
        change = self.after.distance - self.before.distance
        lines = [
            f"{self.objective} distance to the dense outputs: {self.before.distance:.4g} -> {self.after.distance:.4g} "
            f"({change:+.4g} +- {self.error:.2g}) on {self.before.images} images that had no part in the training"
        ]
        for what in ("disagreement", "drop"):
            before, after = getattr(self.before, what), getattr(self.after, what)
            if isinstance(before, Drop):
                name = {"disagreement": "decisions that differ, %", "drop": "points of accuracy lost"}[what]
                lines.append(f"{name}: {before} -> {after}")
        gained = min(distance for _, distance in self.curve) < self.curve[0][1]
        healed = f"{sum(parameter.numel() for parameter in self.parameters.values())} parameters healed"
        kept = healed if gained else "nothing was gained, the parameters were put back"
        return "\n".join([*lines, f"{kept}; {self.steps} steps, {self.minutes:.1f} minutes"])

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the distance of the stopping part over the steps, to a .png or .svg."""
        from agglo.drawing.charts import Curve, CurvePanel, draw_curves

        steps, distances = zip(*self.curve, strict=True)
        curve = Curve("images to stop by", steps, distances)
        panel = CurvePanel([curve], "step", f"{self.objective} distance to the dense output")
        draw_curves([panel], Path(path), title=f"healed for {self.config}")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the healed weights as safetensors: names of the plain model, and the config in the metadata."""
        plain, _ = split_method(self.model.state_dict())
        about = {"format": "pt"}
        if self.parameters:
            about[HEALED_FOR] = json.dumps(self.config.to_dict())
        save_weights(Path(path), {**plain, **self.parameters}, about)
