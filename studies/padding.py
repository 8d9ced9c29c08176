"""Not in the paper: what padding does to AP: a scene alone, and the same scene beside a wider one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from agglo.lab.paper.classifiers import FASHION, data_need
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.detectors import BOX_AND_MASK, HeldImages, is_kept, keeping, samples_in
from agglo.lab.paper.study import Result, RunCell, Section, Settings, StudyCell
from agglo.lab.tasks.detection.data import make_scenes, transforms_for
from agglo.lab.tasks.detection.evaluation.matches import interval
from agglo.lab.tasks.detection.evaluation.one_pass import DetectionBatches, evaluate
from agglo.lab.tasks.detection.specs import open_detector
from agglo.patch import apply, remove
from agglo.utils.tables import Column, Table
from studies import study

CASES = ((DENSE, None), ("atc", 0.5), ("atc", 0.25), ("tome", 0.5))
_RESAMPLES = 500
ALONE, APART, MERGED = "alone", "padded, apart", "padded, merged"


class Beside(nn.Module):
    """A detector that sees an image of twice the width beside every image, whose detections are left out."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: list[Tensor], original_sizes: list[tuple[int, int]]) -> list[Any]:
        [image] = images
        wide = torch.cat([image, image.flip(-1)], dim=-1)
        found: list[Any] = self.detector([image, wide], original_sizes=[*original_sizes, wide.shape[-2:]])
        return found[:1]


def _axes(scenes: int, settings: Settings) -> Iterator[StudyCell]:
    for method, rate in CASES:
        for way in (ALONE, APART, MERGED) if rate else (ALONE, APART):
            about = {"method": method, "keep_rate": rate, "way": way}
            yield StudyCell(about, (data_need(FASHION),))


def _run(scenes: int, settings: Settings) -> RunCell:
    opened = open_detector("embedded")
    detector: Any = opened.model

    @cache
    def images() -> DetectionBatches:
        made = make_scenes(settings.data[FASHION], scenes, 0, "val")
        return HeldImages(made, transforms_for(opened.spec.image_size)[1])

    def folder(about: Mapping[str, Any]) -> Any:
        name = f"{about['method']}-{about['keep_rate']}-{about['way'].replace(', ', '-')}"
        return settings.run_folder("padding", name)

    def judge(about: Mapping[str, Any]) -> dict[str, Any]:
        remove(detector)
        detector.backbone.padding = "merge" if about["way"] == MERGED else "apart"
        if about["keep_rate"] is not None:
            apply(detector, about["method"], keep_rate=about["keep_rate"])
        model = detector if about["way"] == ALONE else Beside(detector)
        return evaluate(model, images(), keep=keeping(images(), folder(about)))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        found = judge(about)
        alone = {**about, "way": ALONE}
        if not is_kept(folder(alone)):
            judge(alone)
        ours, others = (samples_in(folder(each), _RESAMPLES) for each in (about, alone))
        to_alone = {kind: interval(ours[kind] - others[kind]) for kind in BOX_AND_MASK}
        aps = {f"{kind}_AP": found[f"{kind}_AP"] for kind in BOX_AND_MASK}
        return {**aps, "to_alone": to_alone, "scenes": scenes, "resamples": _RESAMPLES}

    return run


def _table(results: Sequence[Result], scenes: int) -> list[Section]:
    if not results:
        return []
    columns = [Column("reduced", left=True), Column("scenes", left=True)]
    columns += [Column(f"{kind} AP") for kind in BOX_AND_MASK]
    rows = []
    for result in results:
        rate = "" if result["keep_rate"] is None else f" {result['keep_rate']:.0%}"
        way = "padded" if result["keep_rate"] is None and result["way"] == APART else result["way"]
        rows.append([f"{result['method']}{rate}", way, *(_cell_text(result, kind) for kind in BOX_AND_MASK)])
    text = (
        f"{results[0]['scenes']} scenes; in brackets the 95 % interval of the difference to the scenes alone, over "
        "resampled scenes."
    )
    return [Section("AP by way of padding", Table(columns, rows), text)]


def _cell_text(result: Result, kind: str) -> str:
    text, (low, high) = f"{result[f'{kind}_AP']:.1f}", result["to_alone"][kind]
    return text if result["way"] == ALONE else f"{text} [{low:+.1f}, {high:+.1f}]"


PADDING = study(
    name="padding",
    about="AP of the embedded detector on scenes alone and beside a picture of twice their width, which pads them: "
    "half of the patches then show nothing, and are merged apart (agglo's default) or like everything else (as in the "
    "released detectors)",
    full=None,
    miniature=150,  # scenes
    axes=_axes,
    run=_run,
    table=_table,
)
ITEMS = (PADDING,)
