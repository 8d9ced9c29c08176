"""The demo: what token reduction does to one classifier, as a table, a plot and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agglo.classification.data import detect, open_split
from agglo.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.classification.evaluation.grid import EvaluationSettings, run
from agglo.classification.evaluation.pictures import draw_variants
from agglo.classification.evaluation.report import plot
from agglo.embedded import classifier as embedded
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.variants import Variant, variants_of

KEEP_RATES = (0.9, 0.7, 0.5, 0.25)
LINKAGES = ("single", "average", "complete")
_DRAWN = 2  # images
_DRAWN_SIDE = 280  # pixels, at least
EMBEDDED = ModelSpec(embedded.NAME, pretrained=True)


def own_images() -> Path:
    """The whole test set of the embedded model if this machine has it, otherwise the images that come with agglo."""
    return embedded.FULL if any(embedded.FULL.glob("t10k-images-idx3-ubyte*")) else embedded.IMAGES


def show(spec: ModelSpec, data: Path, output: Path, *, images: int | None = None) -> dict[str, Any]:
    """Evaluate a model dense, with ToMe and with ATC; the report, with accuracy.png, groups.png and results.json in the
    output folder, in place of an earlier demo's."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").unlink(missing_ok=True)  # a demo measures: it does not repeat what was measured before
    variants = variants_of(("tome", "atc"), keep_rates=KEEP_RATES, linkages=LINKAGES)
    report = run(EvaluationSettings(spec, data, variants, images=images), output / "results.json")
    plot(report, output / "accuracy.png")
    _draw(spec, data, [variant for variant in variants if variant.keep_rate == 0.5]).save(output / "groups.png")
    return report


def _draw(spec: ModelSpec, data: Path, variants: list[Variant]) -> Any:
    model = build(spec)
    name = detect(data)
    inputs = inputs_for(model, name)
    split = open_split(name, data, "val", transform=evaluation_transform(inputs, normalise=False))
    chosen = torch.stack([torch.as_tensor(split[len(split) * index // _DRAWN][0]) for index in range(_DRAWN)])
    pictures = chosen.expand(-1, 3, -1, -1)
    scale = max(1, -(-_DRAWN_SIDE // chosen.shape[-1]))
    return draw_variants(model, Normalise(inputs.mean, inputs.std)(chosen), pictures, variants, scale=scale)
